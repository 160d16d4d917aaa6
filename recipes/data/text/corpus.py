"""Text for language models: where it is read from, and what of it is set aside for validation."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mantissa.display import quantity
from recipes.data.text.tokenizers import OWN_BPE, plan
from recipes.data.text.tokens import TextSource, TokenData, open_or_build
from trainer.cache import cache_folder
from trainer.data.overlap import check_no_overlap
from trainer.errors import UserError
from trainer.recipe import NO_OPTION

READINGS = ("auto", "lines", "documents")
"""What the rows of a dataset are; auto: what they look like, see ``joint_of``."""
SHORT = 500
"""Characters. Rows of a dataset with a median below this may be lines of longer texts."""
_HEADING = re.compile(r"= .* =")  # of an article or a section of wikitext
_TABLES = (".json", ".jsonl", ".csv", ".parquet")
_NOISE = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "encodings"}
_CHARACTERS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in any selection."""

    sizes: np.ndarray
    """Bytes of each document, about, int64: to set a fair share aside, and to show progress."""
    read: Callable[[Sequence[int]], Iterator[Iterable[str]]]
    """Yields these documents, in the order given, each as the parts of its text, which can be read again."""
    identity: Any
    """JSON that changes whenever the text does."""
    joint: str | None = None
    """What belongs between two of them where they are no documents but lines of one text; None: they are documents."""
    note: str = ""
    """How they are read, for the start block."""


@dataclass(frozen=True)
class Split:
    """Some documents of a corpus, whole or the same share of each."""

    corpus: Corpus
    rows: Sequence[int]
    start: float = 0.0
    end: float = 1.0
    origin: str = ""
    """Where it comes from, for the start block, such as ``whole documents``."""

    @classmethod
    def whole(cls, corpus: Corpus, origin: str = "") -> Split:
        """Return all documents."""
        return cls(corpus, range(len(corpus.sizes)), origin=origin)

    @property
    def megabytes(self) -> float:
        """Size of the selected text, about."""
        return float(self.corpus.sizes[list(self.rows)].sum()) * (self.end - self.start) / 1e6

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).tobytes()).hexdigest()
        return [self.corpus.identity, self.corpus.joint, rows, self.start, self.end]

    def __iter__(self) -> Iterator[Iterable[str]]:
        """Yield the documents, each as the parts of its text; lines are the one text that they make."""
        if self.corpus.joint is not None:
            yield self._joined(self.corpus.joint)
        elif (self.start, self.end) == (0.0, 1.0):
            yield from self.corpus.read(self.rows)
        else:
            for document in self.corpus.read(self.rows):
                length = sum(map(len, document))
                yield _between(document, int(length * self.start), int(length * self.end))

    def _joined(self, joint: str) -> Iterator[str]:
        """Yield the lines, each with what belongs before it: a line end where the one before has none of its own."""
        before = ""
        for document in self.corpus.read(self.rows):
            row = "".join(document)
            yield (before if row or joint else "") + row
            if joint:
                before = joint
            elif row:
                before = "" if row.endswith("\n") else "\n"


def _between(parts: Iterable[str], first: int, last: int) -> Iterator[str]:
    """Yield the characters ``first`` to ``last`` of a text that comes in parts."""
    for part in parts:
        yield part[max(0, first) : max(0, last)]
        first, last = first - len(part), last - len(part)


def split(corpus: Corpus, fraction: float) -> tuple[Split, Split]:
    """Divide into training and validation, always in the same way.

    Of many documents, whole ones are set aside, so that none is known in part. Where they are too few or
    too unequal for that (one file, for instance), the last part of each is, as in nanoGPT. Of lines the last ones are.
    """
    count = len(corpus.sizes)
    if corpus.joint is not None:
        first = count - round(count * fraction)
        origin = f"the last {count - first:,} of {count:,} rows"
        return Split(corpus, range(first)), Split(corpus, range(first, count), origin=origin)
    budget = fraction * corpus.sizes.sum()
    chosen, filled = set(), 0
    for row in np.random.default_rng(0).permutation(count).tolist():
        size = int(corpus.sizes[row])
        if size <= budget / 4 and filled + size <= budget:
            chosen.add(row)
            filled += size
    if filled < budget / 2:
        origin = f"the last {fraction:.3g} of each document"
        return Split(corpus, range(count), 0.0, 1 - fraction), Split(corpus, range(count), 1 - fraction, 1.0, origin)
    train = Split(corpus, [row for row in range(count) if row not in chosen])
    return train, Split(corpus, sorted(chosen), origin="whole documents")


def joint_of(rows: Sequence[str | None], reading: str = READINGS[0]) -> str | None:
    """Return what belongs between the rows of a dataset where they are lines of longer texts; None: they are documents.

    Lines are short, hold no line end but at their own end, and show that they were cut out of a text, as in wikitext,
    whose files are the rows one after the other: some are blank lines or headings, and nearly all end with the line's
    own end. Where the line ends were taken away, there must be both blank lines and headings: tweets may have either.
    All others are documents, also where some end with a line end and some do not.

    Args:
        rows: some of them, of all parts of the dataset; None: a missing value, which is no blank line.
        reading: one of ``READINGS``; other than ``auto`` it says what the rows are.
    """
    filled = [row for row in rows if row and row.strip()]
    ended = sum(row.endswith("\n") for row in filled) / max(1, len(filled))
    if reading != "auto":
        return None if reading == "documents" else "" if ended > 0.5 else "\n"
    inner = sum("\n" in row.strip() for row in filled)
    length = sorted(len(row or "") for row in rows)[len(rows) // 2]
    if length >= SHORT or 100 * inner >= len(filled):
        return None
    blank = sum(row is not None and not row.strip() for row in rows)
    headings = sum(_HEADING.fullmatch(row.strip()) is not None for row in filled)
    several = max(3, len(rows) / 100)
    if ended >= 0.95:
        return "" if blank + headings >= several else None
    return "\n" if ended <= 0.05 and min(blank, headings) >= several else None


@dataclass
class TokenizedText(TextSource):
    """What every source of text shares: how it is tokenised, split and cached. Subclasses define ``splits``."""

    tokenizer: str = OWN_BPE
    """bpe (trained once, on the training text), chars, bytes, or a hub id or folder that AutoTokenizer opens."""
    vocab_size: int = 4096
    """Vocabulary size of the BPE; a small text gives fewer tokens."""
    valid_fraction: float = 0.1
    """Fraction of the text held out for validation: its end, or whole files, rows or modules if there are many."""
    cache_dir: str | None = None
    """Cache of tokenised text; null: the environment variable ``MANTISSA_CACHE``, else ``~/.cache/mantissa``."""
    whole: bool = field(default=False, kw_only=True, metadata=NO_OPTION)
    """Whether no text is set aside for validation: training and validation text are then both all of it."""

    def __post_init__(self) -> None:
        if not self.tokenizer:
            raise UserError("data.tokenizer is empty; use bpe, chars, bytes, or a hub id or folder")
        if self.tokenizer == OWN_BPE and not 257 <= self.vocab_size <= 2**31:
            raise UserError(
                f"data.vocab_size={self.vocab_size}: a BPE starts with 256 bytes and an end-of-text "
                "token; use 1024 or more, or data.tokenizer=bytes"
            )
        if not 0 < self.valid_fraction <= 0.5:
            raise UserError(f"data.valid_fraction={self.valid_fraction} must be above 0 and at most 0.5, such as 0.1")

    def splits(self) -> tuple[Split, Split]:
        """Return the text for training and the text for validation. Raises UserError if there is none."""
        raise NotImplementedError

    def test_split(self) -> Split | None:
        """Return the text for testing; None: there is none."""
        return None

    def title(self) -> str:
        """Return what the text is called in the start block."""
        return self.kind

    @property
    def cache_folder(self) -> Path:
        """The folder that ``cache_dir`` means."""
        return cache_folder() if self.cache_dir is None else Path(self.cache_dir).expanduser()

    def tokens(self, tokenizer: str | None) -> TokenData:
        train, valid = self.splits()
        test = self.test_split()
        parts = {"train": train, "valid": valid} | ({"test": test} if test else {})
        one = self.whole and train.corpus is valid.corpus
        if one:
            parts = {"train": Split.whole(train.corpus)}
        key = f"data.tokenizer={self.tokenizer}" if tokenizer is None else f"init_from={tokenizer}"
        how = plan(tokenizer or self.tokenizer, key, self.vocab_size)
        ids, text_bytes, opened = open_or_build(self.cache_folder, self.kind, parts, how)
        counts = f"{quantity(len(ids['train']))} tokens"
        counts += "" if one else f" and {quantity(len(ids['valid']))} for validation ({valid.origin})"
        counts += f" and {quantity(len(ids['test']))} for testing" if "test" in ids else ""
        note = f", {train.corpus.note}" if train.corpus.note else ""
        description = f"{self.title()}: {counts}{note}, {opened.label}"
        return TokenData(ids["train"], ids.get("valid", ids["train"]), opened, description, ids.get("test"), text_bytes)


@dataclass
class PythonDocs(TokenizedText):
    """The sources of the running interpreter's standard library, including docstrings: always available."""

    kind: ClassVar[str] = "python_docs"

    def splits(self) -> tuple[Split, Split]:
        """Divide the modules, without tests, bundled applications and generated tables."""
        root = Path(sysconfig.get_path("stdlib"))
        paths = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _NOISE]
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        paths = sorted(path for path in paths if path.is_file())
        if not paths:
            raise UserError(
                f"data=python_docs: this Python has no sources of its standard library in {root}; "
                "use data=text data.path=<file or folder>"
            )
        return split(_files(paths, "data=python_docs"), self.valid_fraction)


@dataclass
class TextFiles(TokenizedText):
    """A text file, or the text files of a folder."""

    kind: ClassVar[str] = "text"
    path: str = ""
    """Text file, or folder of text files."""
    pattern: str = "*.txt"
    """Name pattern of the files to read in a folder and its subfolders."""
    encoding: str = "utf-8"
    """Encoding of the files, such as latin-1, cp1252 or utf-16."""
    test: str | None = None
    """Test text: another file or folder, evaluated once, at the end, with the best weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("missing required option: data.path; set a text file or a folder, such as notes.txt")
        _check_text("data.path", self.path)
        if self.test is not None:
            _check_text("data.test", self.test)

    def title(self) -> str:
        """Return the name of the file or folder."""
        return Path(self.path).expanduser().resolve().name

    def splits(self) -> tuple[Split, Split]:
        """Divide the file, or the files of the folder."""
        return split(self._corpus(f"data.path={self.path}", self.path), self.valid_fraction)

    def test_split(self) -> Split | None:
        """Return the text of ``test``, whole."""
        if self.test is None:
            return None
        key = f"data.test={self.test}"
        files, others = (list(map(str, self._paths(key, name))) for name in (self.test, self.path))
        check_no_overlap(key, files, others, "training")
        return Split.whole(self._corpus(key, self.test))

    def _paths(self, key: str, name: str) -> list[Path]:
        path = Path(name).expanduser().resolve()
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.rglob("*") if file.is_file())
        paths = [file for file in files if fnmatch(file.name, self.pattern)]
        if not paths:
            found = Counter(f"*{file.suffix}" for file in files).most_common(3)
            there = f"there are {', '.join(name for name, _ in found)}" if found else "it is empty"
            raise UserError(f"{key}: no file in it matches data.pattern={self.pattern} ({there})")
        return paths

    def _corpus(self, key: str, name: str) -> Corpus:
        corpus = _files(self._paths(key, name), key, self.encoding)
        if not corpus.sizes.sum():
            raise UserError(f"{key} is empty; set {key.partition('=')[0]} to a file or folder that has text")
        return corpus


def _check_text(key: str, name: str) -> None:
    """Refuse a path where there is nothing, and a file of rows."""
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{key}={name}: there is no such file or folder")
    if path.suffix.lower() in _TABLES and path.is_file():
        raise UserError(
            f"{key}={name} is a file of rows, not plain text; use data=hub data.name={name}, "
            "which reads its column of text"
        )


def _files(paths: list[Path], key: str, encoding: str = "utf-8") -> Corpus:
    stats = [path.stat() for path in paths]
    return Corpus(
        sizes=np.array([stat.st_size for stat in stats], dtype=np.int64),
        read=lambda rows: (TextFile(paths[row], key, encoding) for row in rows),
        identity=[
            [str(path), stat.st_size, stat.st_mtime_ns, encoding] for path, stat in zip(paths, stats, strict=True)
        ],
    )


@dataclass(frozen=True)
class TextFile:
    """A file's text as it is, line ends included, without a byte order mark; a megabyte is in memory at a time."""

    path: Path
    key: str
    """The option that named it, for messages."""
    encoding: str

    def __iter__(self) -> Iterator[str]:
        """Yield parts of the text.

        Raises:
            UserError: the file cannot be read, or is not text in this encoding.
        """
        try:
            with self.path.open(encoding=self.encoding, newline="") as file:
                mark = "\ufeff"
                while part := file.read(_CHARACTERS_AT_ONCE):
                    if "\0" in part:
                        raise self._no_text()
                    yield part.removeprefix(mark)
                    mark = ""
        except UnicodeError:
            raise self._no_text() from None
        except LookupError:
            raise UserError(
                f"data.encoding={self.encoding} is unknown to Python; use utf-8, latin-1 or cp1252"
            ) from None
        except OSError as error:
            raise UserError(f"{self.key}: {self.path} cannot be read ({error.strerror})") from None

    def _no_text(self) -> UserError:
        """Return the error of a file whose bytes are no text, with the offset of the first of them."""
        content = self.path.read_bytes()
        try:
            content.decode(self.encoding)
        except UnicodeDecodeError as error:
            likely = "utf-16" if b"\0" in content else "latin-1"
            return UserError(
                f"{self.key}: {self.path} is not {self.encoding} text: the byte at offset {error.start} does not "
                f"decode; set its encoding, such as data.encoding={likely}, or convert it: "
                f"iconv -f {likely} -t utf-8 {self.path.name} > new.txt"
            )
        return UserError(f"{self.key}: {self.path} is not text: it has a zero byte at offset {content.find(0)}")
