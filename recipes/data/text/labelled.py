"""Texts with labels, for classifiers: what a source gives, tokenised once, and the batches made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mantissa.display import shortened
from recipes.data.text.documents import Rows, Text
from recipes.data.text.files import NAMES
from recipes.data.text.tokenizers import Tokenizer
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.errors import UserError
from trainer.files import add_run_facts
from trainer.recipe import DataSource

FORMAT = 1
"""Part of every cache key: raise it when the same text would become other tokens."""
MULTIPLE = 8
"""Batches are padded to a multiple of this, which 16-bit matmuls need for tensor cores."""


@dataclass(frozen=True)
class Encoding:
    """What a recipe wants texts to become."""

    pretrained: str | None
    """A hub id or folder that overrides the source's own tokenizer; None: a new model."""
    length: int
    """Tokens that a sample has at most, special ones among them."""
    special: Mapping[str, str]
    """Special tokens of a new model, see ``Tokenizer.with_special``."""
    template: str
    """Places of the special tokens of a new model, see ``Tokenizer.with_special``."""
    types: bool
    """Whether the model is told which of two texts a token is of."""
    vocabulary: int = 0
    """Number of token ids that a pretrained model knows."""


class LabelledRows(NamedTuple):
    """Labelled texts that are trained on, or validated, or tested."""

    dataset: Any
    """The split that they are rows of, of ``datasets``."""
    labels: Tensor
    """Label of each sample: int64 N; or labels, bool N × classes."""
    rows: np.ndarray
    """The row of each sample."""

    def part(self, samples: np.ndarray) -> LabelledRows:
        """Return some of the samples."""
        return LabelledRows(self.dataset, self.labels[samples], self.rows[samples])

    def documents(self, source: list[str], columns: Sequence[str]) -> Text:
        """Return the texts as documents, for a tokenizer to be made of them; ``source`` names the dataset."""
        selected = self.dataset.select_columns([*columns])

        def read(rows: Rows) -> Iterator[list[str]]:
            for batch in selected.select(rows).iter(1000):
                yield from ([f"{text}\n" for text in texts if text] for texts in zip(*batch.values(), strict=True))

        size = max(1, selected.data.nbytes // len(selected))
        return Text(np.full(len(selected), size), read, [*source, *columns, selected._fingerprint], self.rows)


@dataclass(kw_only=True)
class LabelledDatasets(Datasets):
    """Labelled texts: ``EncodedTexts``."""

    classes: list[str]
    multi_label: bool
    """Whether a text may have several classes, or none."""
    tokenizer: Tokenizer
    """Tokenizer of the texts, with the special tokens of the model."""
    pad: int
    """The id that fills a batch."""
    vocabulary: int
    """Number of token ids that the model knows: the tokenizer's, or more."""
    types: bool = False
    """Whether batches say which of two texts a token is of."""

    def facts(self) -> dict[str, str]:
        return super().facts() | {"classes": f"{len(self.classes):,} ({shortened(self.classes)})"}

    def keep(self, folder: Path) -> None:
        """Write the tokenizer to ``tokenizer/``, and the classes to run.json: a run that stops early exports none."""
        path = folder / "tokenizer"
        path.mkdir(exist_ok=True)
        self.tokenizer.save(path)
        add_run_facts(folder, texts={"classes": self.classes})


@dataclass
class LabelledSource(DataSource):
    """Data that can be read as labelled texts."""

    def labelled(self, encoding: Encoding) -> LabelledDatasets:
        """Open the texts, and tokenise them or take them from the cache.

        Raises:
            UserError: no texts, no labels, or fewer than two classes.
        """
        raise NotImplementedError


@dataclass
class EncodedTexts:
    """Rows of token ids, which ``datasets`` keeps on disk, and their labels."""

    encoded: Any
    """A dataset with a column ``ids``, and perhaps ``types``, lists of integers."""
    labels: Tensor
    """Label of each sample: int64 N; or labels, bool N × classes."""
    rows: np.ndarray
    """The row of each sample."""
    pad: int
    length: int
    """Tokens of the longest possible row."""

    def __post_init__(self) -> None:
        self.encoded = self.encoded.with_format("arrow")

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``tokens``, their ``mask`` (1: no padding) and perhaps ``types``, int64 B × T, and ``label``.

        T is that of the longest row, rounded up: padding to ``length`` would multiply the work on short texts. Labels
        are int64 B, or float32 B × classes of 0 and 1.
        """
        chosen = [sample.index for sample in samples]
        table = self.encoded[self.rows[chosen].tolist()]
        ids = table["ids"].combine_chunks()
        lengths = ids.value_lengths().to_numpy()
        width = min(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE, self.length)
        filled = np.arange(width) < lengths[:, None]
        tokens = np.full(filled.shape, self.pad)
        tokens[filled] = ids.flatten().to_numpy()
        arrays = {"tokens": tokens, "mask": filled.astype(np.int64)}
        if "types" in table.column_names:
            arrays["types"] = np.zeros_like(tokens)
            arrays["types"][filled] = table["types"].combine_chunks().flatten().to_numpy()
        labels = self.labels[chosen]
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return batch | {"label": labels.float() if labels.dtype == torch.bool else labels}

    @property
    def cut(self) -> int:
        """The number of samples whose text is longer than what is read of it."""
        return int(self.encoded["cut"].to_numpy()[self.rows].sum())

    def followed_by(self, other: Any) -> EncodedTexts:
        """Return these samples and others of the same classes."""
        from datasets import concatenate_datasets

        encoded = concatenate_datasets([self.encoded, other.encoded])
        rows = np.concatenate([self.rows, len(self.encoded) + other.rows])
        return EncodedTexts(encoded, torch.cat([self.labels, other.labels]), rows, self.pad, self.length)


def encode(dataset: Any, columns: Sequence[str], tokenizer: Tokenizer, pad: int, encoding: Encoding) -> Any:
    """Return the token ids of texts as a dataset: ``ids``, ``types`` of pairs, and ``cut``, whether a text was longer.

    They are kept beside the texts, in the cache of ``datasets``, and read from the disk.

    Args:
        dataset: of ``datasets``.
        columns: names of one column of texts, or of two.
        tokenizer: with the special tokens of the model.
        pad: stands for a text without any token.
        encoding: what the model wants.
    """
    from datasets import Features, List, Value

    types, given = encoding.types and len(columns) == 2, tokenizer.for_transformers()
    features = Features({"ids": List(Value("int32")), "cut": Value("bool")})
    features |= {"types": List(Value("int8"))} if types else {}
    key = [FORMAT, dataset._fingerprint, list(columns), tokenizer.identity(), pad, encoding.length, types]
    fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def tokenised(rows: Mapping[str, list[str | None]]) -> dict[str, Any]:
        texts = [[text or "" for text in rows[name]] for name in columns]
        out = given(*texts, truncation=True, max_length=encoding.length, return_token_type_ids=types)
        ids = [row or [pad] for row in out["input_ids"]]
        kept = {"ids": ids, "cut": [bool(row.overflowing) for row in out.encodings]}
        return kept | ({"types": [row or [0] for row in out["token_type_ids"]]} if types else {})

    return dataset.select_columns([*columns]).map(
        tokenised,
        batched=True,
        remove_columns=[*columns],
        features=features,
        new_fingerprint=fingerprint,
        desc="tokenizing",
    )


def check_parts(where: str, parts: Mapping[str, LabelledRows], classes: Sequence[str]) -> None:
    """Raise UserError where there are too few classes, or nothing to validate on.

    Args:
        where: names the data, for messages.
        parts: by the names that ``opened`` takes.
        classes: their names.
    """
    labels = parts["train"].labels
    several = labels.dtype == torch.bool
    used = int(labels.any(0).sum() if several else len(labels.unique()))
    if used < (1 if several else 2):
        have = "none has a label" if several else f"all have the label {classes[int(labels[0])]}, and two are needed"
        raise UserError(f"{where}: of the training texts {have}")
    if not len(parts["valid"].rows):
        raise UserError(f"{where} has too few texts of each class: none can be kept for validation")


def opened(
    title: str,
    origin: str,
    parts: Mapping[str, LabelledRows],
    columns: Sequence[str],
    classes: list[str],
    tokenizer: Tokenizer,
    encoding: Encoding,
) -> LabelledDatasets:
    """Tokenise labelled texts, and say what they are.

    Args:
        title: begins the description.
        origin: of the texts to validate on, for the description.
        parts: ``train``, ``valid``, and perhaps ``test``.
        columns: of texts, one or two.
        classes: their names.
        tokenizer: of the texts.
        encoding: what the model wants.

    Raises:
        UserError: the tokenizer has nothing to pad with.
    """
    if not encoding.pretrained:
        tokenizer = tokenizer.with_special(dict(encoding.special), encoding.template)
    pad = tokenizer.token_id("pad_token")
    pad = tokenizer.token_id("eos_token") if pad is None else pad
    if pad is None:
        raise UserError(f"the {tokenizer.label} has neither a token for padding nor one that ends a text; give another")
    splits = {id(part.dataset): part.dataset for part in parts.values()}
    encoded = {key: encode(split, columns, tokenizer, pad, encoding) for key, split in splits.items()}
    made, counts = {}, []
    for name, part in parts.items():
        made[name] = EncodedTexts(encoded[id(part.dataset)], part.labels, part.rows, pad, encoding.length)
        cut = made[name].cut
        counts.append(f"{len(part.rows):,} {NAMES[name]}" + f" ({cut:,} cut to {encoding.length} tokens)" * bool(cut))
    multi_label = made["train"].labels.dtype == torch.bool
    texts = f"pairs of {columns[0]} and {columns[1]}" if len(columns) > 1 else f"texts of {columns[0]}"
    about = f"each with {'any number' if multi_label else 'one'} of {len(classes)} classes ({shortened(classes)})"
    added = {tokenizer.for_transformers().num_special_tokens_to_add(pair=is_pair) for is_pair in (False, True)}
    about += ", the texts of a pair joined with nothing between them" * (len(columns) > len(added))
    if missing := sum(split.data.column(name).null_count for split in splits.values() for name in columns):
        about += f", {missing:,} missing texts count as empty"
    return LabelledDatasets(
        made["train"],
        made["valid"],
        f"{title}: {', '.join(counts)} {texts} (validation: {origin}), {about}, {tokenizer.label}",
        test=made.get("test"),
        classes=classes,
        multi_label=multi_label,
        tokenizer=tokenizer,
        pad=pad,
        vocabulary=max(tokenizer.vocab_size, encoding.vocabulary),
        types=encoding.types and len(columns) == 2,
    )
