"""``data.max_tokens``: the beginning of a dataset that is larger than the disk, tokenised as it arrives."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.display import quantity
from recipes.data.text.cache import FORMAT, building, digest
from recipes.data.text.pretrained import local_path, opening
from recipes.data.text.shards import TokenFile, TokenFiles
from recipes.data.text.tokenizers import Tokenizer, TokenizerChoice
from recipes.data.text.tokens import TokenData, amounts, encoded, pieces, warn_of_unknown
from trainer.errors import UserError
from trainer.files import flush, read_json, write_json
from trainer.terminal import work

_CHARACTERS_AT_ONCE = 2**22
"""Characters of documents between two commits: a million tokens, which take seconds."""
_CHARACTERS_PER_TOKEN = 5
"""An own BPE is trained on no more text than is read, about."""
_OTHERS = 10
"""Validation and test splits are read to this fraction of ``max_tokens``."""
STATE, META = "state.json", "meta.json"

log = logging.getLogger("mantissa")


@dataclass
class Streams:
    """What is read: the rows of splits, from their beginning."""

    splits: Mapping[str, Any]
    """IterableDataset of each part: ``train``, perhaps ``valid`` and ``test``; without ``valid``, some of the training
    documents are held out."""
    column: str
    name: str
    """Name of the dataset, for messages."""
    origin: str
    """What the validation part is, for the start block."""
    held_out: float
    """Fraction of the training documents for validation; 0: it has a split of its own."""

    def documents(self, part: str, state: Any = None) -> Iterator[str]:
        """Yield the text of the rows of a split, from where its ``state_dict`` was returned.

        Raises:
            UserError: a row has something else, or they cannot be read on.
        """
        dataset, rows = self.splits[part], 0
        if state is not None:
            dataset.load_state_dict(state)
        again = "start again, which goes on where this one ended"
        with opening(self.name, f"data.name={self.name}", "could not be read on", again):
            for rows, row in enumerate(dataset):
                text = row[self.column]
                if not isinstance(text, str | None):
                    raise UserError(
                        f"data.name={self.name}: {self.column} has {text!r:.60} after {rows:,} rows; a text is wanted"
                    )
                yield text or ""

    def is_held_out(self, number: int) -> bool:
        """Return whether the training document of this number is for validation: always the same ones are."""
        hashed = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
        return int.from_bytes(hashed) < self.held_out * 2**64


def revision_of(name: str) -> str | None:
    """Return what changes whenever the dataset's files do; None: the hub does not answer.

    Raises:
        UserError: there is no such dataset.
    """
    path = local_path(name, f"data.name={name}", "give a hub id, or one that exists")
    if path:
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return digest(stats)
    from huggingface_hub import HfApi

    with opening(name, f"data.name={name}", "cannot be opened", "give an id that opens") as place:
        if place["local_files_only"]:
            return None
        commit = HfApi().dataset_info(place["pretrained_model_name_or_path"], revision=place["revision"]).sha
        return str(commit)[:16]


def open_or_stream(
    cache: Path, name: str, settings: Any, choice: TokenizerChoice, tokens: int, open_streams: Callable[[], Streams]
) -> TokenData:
    """Return the first ``tokens`` of a dataset, in whole documents, memory-mapped.

    They are read on the first call, which goes on where an earlier one was killed, and opened on later ones; without
    the hub, those that were read last.

    Args:
        cache: the folder of the cache.
        name: hub id, or file or folder.
        settings: JSON of the options that decide what is read.
        choice: the tokenizer; an own BPE is trained on the beginning.
        tokens: as many for training; a tenth of it for each other part with a split of its own.
        open_streams: opens the dataset.

    Raises:
        UserError: the cache cannot be written, the dataset cannot be read, or a part has no text.
    """
    parent, key = cache / "stream", digest([FORMAT, name, settings, tokens, choice.identity()])
    revision = revision_of(name)
    kept = sorted(parent.glob(f"{key}-*/{META}"), key=lambda file: file.stat().st_mtime)
    folder = kept[-1].parent if revision is None and kept else parent / f"{key}-{revision}"
    with building(cache, folder):
        if not folder.exists():
            log.info("reading %s; later runs load its tokens from %s", name, folder)
            _build(folder, open_streams(), choice, tokens)
    meta, opened = read_json(folder / META), choice.opened(folder)
    unknown, all_tokens = (sum(done[key] for done in meta["parts"].values()) for key in ("unknown", "tokens"))
    warn_of_unknown(unknown / all_tokens)
    parts = {
        part: TokenFiles([TokenFile.of(folder / f"{part}.bin", meta["dtype"], 0, done["tokens"])])
        for part, done in meta["parts"].items()
    }
    about = amounts(parts, meta["origin"])
    if meta["whole"]:
        about += f", all that there are: data.max_tokens={quantity(tokens)} was not reached"
    about += f", column {meta['column']}; each row a document, {opened.label}"
    sizes = {part: done["bytes"] for part, done in meta["parts"].items()}
    return TokenData(parts["train"], parts["valid"], opened, f"{name}: {about}", parts.get("test"), sizes)


def _build(folder: Path, streams: Streams, choice: TokenizerChoice, tokens: int) -> None:
    """Fill a folder beside ``folder``, which takes its name at the end; what a killed process left there is continued.

    One file a part grows: how long it is, and which rows are in it, is all that is to be known to go on.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    # The state is written after the tokenizer, so that this one is whole.
    if not (partial / STATE).exists():
        choice.made(_beginning(streams, _CHARACTERS_PER_TOKEN * tokens), partial)
        parts = {"train", "valid", *streams.splits}
        empty = {"tokens": 0, "bytes": 0, "unknown": 0}
        write_json(partial / STATE, {"parts": dict.fromkeys(sorted(parts), empty), "splits": {}})
    tokenizer = choice.opened(partial)
    state = read_json(partial / STATE)
    for split in streams.splits:
        limit = tokens if split == "train" else max(1, tokens // _OTHERS)
        _read(partial, state, split, streams, tokenizer, limit)
    for part, done in state["parts"].items():
        if not done["tokens"]:
            raise UserError(
                f"data.name={streams.name}: no text is left for the {part} part; set a larger data.max_tokens"
            )
    about = {"dtype": tokenizer.dtype.name, "column": streams.column, "origin": streams.origin}
    whole = state["parts"]["train"]["tokens"] < tokens
    write_json(partial / META, about | {"whole": whole, "parts": state["parts"]})
    partial.rename(folder)


def _beginning(streams: Streams, characters: int) -> Iterator[str]:
    """Yield pieces of the first training documents, which have about so many characters."""
    for number, text in enumerate(streams.documents("train")):
        if characters <= 0:
            return
        if not streams.is_held_out(number):
            characters -= len(text)
            yield from pieces(text.splitlines(keepends=True))


def _read(partial: Path, state: dict[str, Any], split: str, streams: Streams, tokenizer: Tokenizer, limit: int) -> None:
    """Append the documents of a split to their parts, up to the first that reaches the limit."""
    at = state["splits"].setdefault(split, {"rows": 0, "stream": None, "ended": False})
    if at["ended"]:
        return
    parts = [split, "valid"] if split == "train" and streams.held_out else [split]
    for part in parts:  # cut off what came after the last commit
        with (partial / f"{part}.bin").open("ab") as file:
            file.truncate(state["parts"][part]["tokens"] * tokenizer.dtype.itemsize)
    documents = streams.documents(split, at["stream"])
    with work(f"streaming the {split} text", limit / 1e6, "M tokens") as advance:
        while not at["ended"]:
            # Take so few documents that only the last can reach the limit: UTF-8 has at most 4 bytes a character, and a
            # token at least one.
            room = min(_CHARACTERS_AT_ONCE, (limit - state["parts"][split]["tokens"]) / 5)
            texts: dict[str, list[str]] = {part: [] for part in parts}
            taken = 0
            while taken < room:
                text = next(documents, None)
                if text is None:
                    at["ended"] = True
                    break
                texts["valid" if len(parts) > 1 and streams.is_held_out(at["rows"]) else split].append(text)
                at["rows"] += 1
                taken += len(text) + 1
            for part in parts:
                _append(partial / f"{part}.bin", state["parts"][part], texts[part], tokenizer)
            at["stream"] = streams.splits[split].state_dict()
            at["ended"] = at["ended"] or state["parts"][split]["tokens"] >= limit
            write_json(partial / STATE, state)
            advance(state["parts"][split]["tokens"] / 1e6)


def _append(path: Path, done: dict[str, int], texts: list[str], tokenizer: Tokenizer) -> None:
    """Append the tokens of documents to a file, and count them."""
    with path.open("ab") as file:
        for ids, size in encoded((text.splitlines(keepends=True) for text in texts), tokenizer):
            if done["tokens"] and texts:  # before the first of these documents
                np.array(tokenizer.separator, tokenizer.dtype).tofile(file)
                done["tokens"] += len(tokenizer.separator)
            texts = []
            ids.astype(tokenizer.dtype).tofile(file)
            done["tokens"] += len(ids)
            done["bytes"] += size
            done["unknown"] += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
    flush(path)
