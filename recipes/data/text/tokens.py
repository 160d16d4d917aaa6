"""Token ids of a text: what a source gives to the language recipes, and how they are made of documents."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mantissa.display import quantity
from recipes.data.text.cache import built, completed
from recipes.data.text.documents import Text
from recipes.data.text.tokenizers import OWN_BPE, Tokenizer, TokenizerChoice
from trainer.data.contract import Datasets
from trainer.errors import UserError
from trainer.files import read_json, write_json
from trainer.recipe import DataSource
from trainer.terminal import work

_PIECE = 2**16
_CHARACTERS_AT_ONCE = 2**22

log = logging.getLogger("mantissa")


class Samples(NamedTuple):
    """Samples of a part that are texts of their own, such as chats: they lie in its ids one after the other."""

    starts: np.ndarray
    """Where each begins in the ids, and where the last one ends: int64, samples + 1."""
    targets: np.ndarray
    """Whether an id is to be predicted: bool, as long as the ids."""


class Ids(Protocol):
    """Token ids, one after the other: an array, or what is read like one."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Return some, as a one-dimensional array of integers."""
        ...


@dataclass
class TokenData:
    """A tokenised corpus: flat arrays of ids (uint16, or uint32 for large vocabularies), memory-mapped."""

    train: Ids
    valid: Ids
    tokenizer: Tokenizer
    description: str
    test: Ids | None = None
    """Ids of the text for testing; None: the source has none."""
    text_bytes: Mapping[str, int] = field(default_factory=dict)
    """Length in UTF-8 of the text of each part, by its name here; empty: it is no text."""
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Samples of each part, by its name here; empty: a part is one text, cut into windows."""
    packing: bool = False
    """Whether several short samples share a window."""
    question: str = ""
    """Beginning of a user's message, of chats; empty: there is none."""
    added: int = 0
    """Special tokens that a tokenizer without a chat template got, and did not have."""


def amounts(parts: Mapping[str, Ids], origin: str) -> str:
    """Return how many tokens the parts have, in words, for the start block; ``origin`` says where ``valid`` is from."""
    text = f"{quantity(len(parts['train']))} tokens"
    text += f" and {quantity(len(parts['valid']))} for validation ({origin})" if "valid" in parts else ""
    return text + (f" and {quantity(len(parts['test']))} for testing" if "test" in parts else "")


@dataclass(kw_only=True)
class TextDatasets(Datasets):
    """Samples cut from a tokenised corpus, for a model of so many token ids."""

    tokens: TokenData
    tokenizer: Tokenizer
    """Tokenizer of the text, with the special tokens of the recipe."""
    vocabulary: int
    """Number of token ids that the model knows: the tokenizer's, or more."""

    @property
    def first_words(self) -> str:
        """The first three words of a line of the validation text, at most 30 characters; of chats what a user asks;
        empty: it is blank.
        """
        if self.tokens.samples:
            return self.tokens.question
        tokenizer = self.tokens.tokenizer
        text = tokenizer.decode(self.tokens.valid[:256].tolist()).rstrip("\ufffd")
        for special in tokenizer.special.values():  # such as the end of a document
            text = text.replace(special, "\n")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        line = lines[min(1, len(lines) - 1)]  # the first one may have lost its beginning to the training text
        return " ".join(line.split(" ")[:3])[:30].strip()

    def facts(self) -> dict[str, str]:
        tokens = {"training tokens": f"{len(self.tokens.train):,}", "validation tokens": f"{len(self.tokens.valid):,}"}
        return super().facts() | tokens | {"token ids": f"{self.vocabulary:,}"}

    def keep(self, folder: Path) -> None:
        """Write the tokenizer of the text to ``tokenizer/``."""
        path = folder / "tokenizer"
        path.mkdir(exist_ok=True)
        self.tokens.tokenizer.save(path)


class Windows:
    """Windows of a text's ids, one after the other; in training each is moved by its seed, so that epochs differ.

    So the ids of the first window are seen less often in training: half as often, on average.

    Args:
        tokens: the ids.
        window: how many of them begin a window each.
        more: ids after these, which belong to the next window, too.
    """

    def __init__(self, tokens: Ids, window: int, more: int = 0) -> None:
        self.tokens, self.window, self.more = tokens, window, more

    def __len__(self) -> int:
        return (len(self.tokens) - self.more) // self.window

    def cut(self, index: int, seed: int | None) -> np.ndarray:
        """Return the ids of a sample."""
        first = index * self.window + (0 if seed is None else seed % self.window)
        first = min(first, len(self.tokens) - self.window - self.more)
        return self.tokens[first : first + self.window + self.more]


@dataclass
class TextSource(DataSource):
    """Data that can be read as text."""

    def tokens(self, tokenizer: str | None) -> TokenData:
        """Tokenise the corpus, or open it from the cache.

        Args:
            tokenizer: a hub id or folder that overrides the source's own choice (a pretrained model
                brings its tokenizer), or None.

        Raises:
            UserError: the text is missing, empty, binary or cannot be fetched.
        """
        raise NotImplementedError


def open_or_build(
    cache: Path, name: str, splits: Mapping[str, Text], choice: TokenizerChoice
) -> tuple[dict[str, np.ndarray], dict[str, int], Tokenizer]:
    """Return the token ids of the splits (``train``, ``valid``, perhaps ``test``), memory-mapped, and the tokenizer.

    Between them is the length of each split's text in UTF-8: what separates documents is no text, nor are special
    tokens written in it.

    They are built on the first call and opened on later ones. Processes that come at the same time wait
    for the first; one that is killed leaves nothing that looks complete. ``name`` begins the folder's name.

    Raises:
        UserError: the cache folder cannot be written, or a split has no tokens.
    """
    key = [*(part.identity for part in splits.values()), choice.identity()]
    folder = built(cache, name, key, lambda folder: _build(folder, splits, choice))
    meta = read_json(folder / "meta.json")
    warn_of_unknown(meta["unknown"])
    ids: dict[str, np.ndarray] = {
        part: np.memmap(folder / f"{part}.bin", dtype=meta["dtype"], mode="r") for part in splits
    }
    return ids, meta["text_bytes"], choice.opened(folder)


def warn_of_unknown(share: float) -> None:
    """Warn where the tokenizer does not know a part of the text: ``share`` of the tokens stand for it."""
    if percent := round(100 * share):
        message = "%d %% of the tokens are of text that the tokenizer does not know; no loss or bits_per_byte is "
        log.warning(message + "comparable with another tokenizer's", percent)


def _build(folder: Path, splits: Mapping[str, Text], choice: TokenizerChoice) -> None:
    with completed(folder) as partial:
        read = [splits["train"]] if choice.name == OWN_BPE else splits.values()
        texts = (piece for part in read for document in part for piece in pieces(document))
        tokenizer = choice.made(texts, partial)
        text_bytes = dict.fromkeys(splits, 0)
        unknown = tokens = 0
        for part, documents in splits.items():
            tokenizing = work(f"tokenizing the {part} text", documents.megabytes, "MB")
            with (partial / f"{part}.bin").open("wb") as file, tokenizing as advance:
                for ids, size in encoded(documents, tokenizer):
                    ids.astype(tokenizer.dtype).tofile(file)
                    text_bytes[part] += size
                    unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
                    tokens += len(ids)
                    advance(text_bytes[part] / 1e6)
                if not file.tell():
                    other = "data.test" if part == "test" else "data.valid_fraction"
                    raise UserError(f"no text is left for the {part} part; use a longer text or another {other}")
        meta = {"dtype": tokenizer.dtype.name, "text_bytes": text_bytes, "unknown": unknown / tokens}
        write_json(partial / "meta.json", meta)


def encoded(documents: Iterable[Iterable[str]], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of the documents, the tokenizer's separator between them, some megabytes at a time, and the bytes
    of their text. A document without text leaves nothing.
    """
    separator, written = np.array(tokenizer.separator, dtype=np.uint32), False
    marked = ((number == 0, piece) for document in documents for number, piece in enumerate(pieces(document)))
    for batch in _batches(marked):
        parts, size = [], 0
        encodings = tokenizer.encode_many([piece for _, piece in batch])
        for (begins, piece), encoding in zip(batch, encodings, strict=True):
            ids = np.asarray(encoding)
            parts += [separator, ids] if begins and written else [ids]
            size += len(piece.encode()) - _special_bytes(piece, ids, tokenizer.special)
            written = True
        yield np.concatenate(parts), size


def _batches(marked: Iterable[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    """Yield pieces in lists of some megabytes."""
    batch, characters = [], 0
    for mark, piece in marked:
        batch.append((mark, piece))
        characters += len(piece)
        if characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _special_bytes(text: str, ids: np.ndarray, special: Mapping[int, str]) -> int:
    """Return the bytes of ``text`` that are special tokens written in it; unknown words, which become one, are not."""
    written = {id: word for id, word in special.items() if word in text}  # of millions of rows hardly any has one
    return sum(min(int((ids == id).sum()), text.count(word)) * len(word.encode()) for id, word in written.items())


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """Cut a long document where tokenizers split anyway, so that all cores encode it and memory stays small.

    That is between two lines, but not at a blank one or one indented by more than a space, which belongs to the word
    after it: runs of white space are tokens. In a long stretch without such a place, before a line end; in a long line,
    before a space and a word: there GPT-2 and our own BPE cut too, others may not.
    """
    piece: list[str] = []
    length = 0
    for line in _parts(filter(None, lines)):
        if length >= _PIECE and (piece[-1].endswith("\n") or line[0] == " "):
            after_word, word = piece[-1][-2:-1].strip(), line[0].strip()
            spaced_word = line[0] == " " and line[1:2].strip()
            if (after_word and word) or spaced_word:
                yield "".join(piece)
                piece, length = [], 0
            elif word and length >= 16 * _PIECE:
                yield "".join(piece)[:-1]
                piece, length = ["\n"], 1
        piece.append(line)
        length += len(line)
    if piece:
        yield "".join(piece)


def _parts(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, very long ones in parts that begin with a space and a word: text8 is a single line."""
    for line in lines:
        if len(line) < 16 * _PIECE:
            yield line
        else:
            parts = re.finditer(rf"(?s).{{{_PIECE}}}.*?(?<=\S)(?= \S)|.+", line)
            yield from (match[0] for match in parts)
