"""From text to token ids on disk: a cache that is never half-written."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipes.data.text.source import Tokenizer
from recipes.data.text.split import Split
from trainer.errors import UserError
from trainer.files import flush, locked, read_json, write_json
from trainer.progress import work

FORMAT = 4
"""Part of every cache key: raise it when the same text would become other tokens, or meta.json holds more."""

_PIECE = 2**16
_CHARACTERS_AT_ONCE = 2**22
_BETWEEN_LINES = re.compile(r"\S\n(?=\S)|\n(?= \S)")
_BEFORE_LINE_END = re.compile(r"(?=\n\S)")

log = logging.getLogger("mantissa")


class Tokenized(NamedTuple):
    """The parts of a corpus by name: ``train``, ``valid`` and perhaps ``test``."""

    ids: dict[str, np.ndarray]
    """Memory maps."""
    text_bytes: dict[str, int]
    """The length of their text in UTF-8; what separates documents is no text, nor are special tokens written in it."""
    tokenizer: Tokenizer


class TokenizerPlan(NamedTuple):
    """How to make or load the tokenizer of a corpus."""

    identity: Any
    """JSON of what its ids depend on beside the text."""
    task: str
    """The log message while the user waits, such as ``training a BPE of 4096``."""
    make: Callable[[], Tokenizer]
    load: Callable[[Path], Tokenizer]
    """Opens the folder that the tokenizer's ``save`` wrote to."""


def open_or_build(cache_dir: str, name: str, splits: dict[str, Split], plan: TokenizerPlan) -> Tokenized:
    """Return the token ids of the splits (``train``, ``valid``, perhaps ``test``) and the tokenizer.

    They are built on the first call and opened on later ones. Processes that come at the same time wait
    for the first; one that is killed leaves nothing that looks complete. ``name`` begins the folder's name.

    Raises:
        UserError: the cache folder cannot be written, or a split has no tokens.
    """
    key = json.dumps([FORMAT, *(part.identity for part in splits.values()), plan.identity], sort_keys=True)
    parent = Path(cache_dir).expanduser() / "text"
    folder = parent / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = parent / f".{folder.name}.lock"
            lock.touch()
        except OSError as error:
            raise UserError(
                f"data.cache_dir={cache_dir} cannot be written ({error.strerror}); set another folder, "
                "here or in the environment variable MANTISSA_CACHE"
            ) from None
        with locked(lock):
            if not folder.exists():  # another process may have built it while this one waited
                log.info("preparing %s: %s; later runs load it from %s", name, plan.task, folder)
                _build(folder, splits, plan)
    meta = read_json(folder / "meta.json")
    ids = {part: np.memmap(folder / f"{part}.bin", dtype=meta["dtype"], mode="r") for part in splits}
    return Tokenized({**ids}, meta["text_bytes"], plan.load(folder))


def _build(folder: Path, splits: dict[str, Split], plan: TokenizerPlan) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        with work(plan.task):
            tokenizer = plan.make()
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        tokenizer.save(partial)
        text_bytes = dict.fromkeys(splits, 0)
        for part, documents in splits.items():
            tokenizing = work(f"tokenizing the {part} text", documents.megabytes, "MB")
            with (partial / f"{part}.bin").open("wb") as file, tokenizing as advance:
                for ids, size in _encoded(documents, tokenizer):
                    ids.astype(dtype).tofile(file)
                    text_bytes[part] += size
                    advance(text_bytes[part] / 1e6)
                if not file.tell():
                    other = "data.test" if part == "test" else "data.valid_fraction"
                    raise UserError(f"no text is left for the {part} part; use a longer text or another {other}")
        write_json(partial / "meta.json", {"dtype": dtype.name, "text_bytes": text_bytes})
        for path in partial.iterdir():
            flush(path)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _encoded(documents: Iterable[str | Iterable[str]], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of the documents, the tokenizer's separator between them, some megabytes at a time.

    Each with the bytes of its text.
    """
    separator = np.array(tokenizer.separator, dtype=np.uint32)
    waiting: list[tuple[bool, str]] = []
    characters = 0

    def encode() -> tuple[np.ndarray, int]:
        parts, size = [], 0
        encoded = tokenizer.encode_many([piece for _, piece in waiting])
        for (begins, piece), found in zip(waiting, encoded, strict=True):
            ids = np.asarray(found)
            parts += [separator, ids] if begins else [ids]
            size += len(piece.encode()) - _special_bytes(piece, ids, tokenizer.special)
        return np.concatenate(parts), size

    for number, document in enumerate(documents):
        for position, piece in enumerate(pieces(document)):
            waiting.append((number > 0 and position == 0, piece))
            characters += len(piece)
            if characters >= _CHARACTERS_AT_ONCE:
                yield encode()
                waiting.clear()
                characters = 0
    if waiting:
        yield encode()


def _special_bytes(text: str, ids: np.ndarray, special: Mapping[int, str]) -> int:
    """Return the bytes of ``text`` that are special tokens written in it; unknown words, which become one, are not."""
    if not special:
        return 0
    found = Counter(ids[np.isin(ids, list(special))].tolist())
    return sum(min(count, text.count(special[id])) * len(special[id].encode()) for id, count in found.items())


def watched(task: str, split: Split) -> Iterator[str]:
    """Yield all pieces of a split's text, and report how much of it was read for this task."""
    done = 0
    with work(task, split.megabytes, "MB") as advance:
        for piece in chain.from_iterable(map(pieces, split)):
            yield piece
            done += len(piece)
            advance(done / 1e6)


def pieces(document: str | Iterable[str]) -> Iterator[str]:
    """Split a long document where tokenizers split anyway, so that all cores encode it and memory stays small.

    That is between two lines, but not at a blank one or one indented by more than a space, which belongs to the word
    after it: runs of white space are tokens. In a long stretch without such a place, before a line end: there GPT-2
    and our own BPE cut too, others may not.

    Args:
        document: its text, or parts of it one after the other, which are read when they are needed.
    """
    parts = iter([document] if isinstance(document, str) else document)
    text, start = "", 0
    while True:
        if len(text) - start < 16 * _PIECE:
            text, start = _at_least(32 * _PIECE, text[start:], parts), 0
        if start == len(text):
            return
        found = _BETWEEN_LINES.search(text, start + _PIECE, start + 16 * _PIECE)
        searched = start + _PIECE
        while not (found := found or _BEFORE_LINE_END.search(text, searched)) and (more := _at_least(1, "", parts)):
            searched = max(searched, len(text) - 1)
            text += more
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _at_least(characters: int, text: str, parts: Iterator[str]) -> str:
    """Return ``text`` with so many of the parts after it that it has so many characters, or all of them."""
    texts, size = [text] if text else [], len(text)
    while size < characters and (part := next(parts, None)) is not None:
        texts.append(part)
        size += len(part)
    return "".join(texts)
