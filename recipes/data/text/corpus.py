"""Text for language models: the standard library's sources, own files, and what all text has in common."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from mantissa.display import quantity
from recipes.data.text.cache import TokenizerPlan, open_or_build, watched
from recipes.data.text.pretrained import Pretrained
from recipes.data.text.source import TextSource, TokenData
from recipes.data.text.split import Corpus, Split, split
from recipes.data.text.tokenizers import OWN_BPE, BytePairs, Bytes, Characters
from trainer.cache import cache_folder
from trainer.data.apart import check_apart
from trainer.errors import UserError
from trainer.recipe import NO_OPTION

_TABLES = (".json", ".jsonl", ".csv", ".parquet")
_NOISE = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "encodings"}


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
        ids, text_bytes, opened = open_or_build(self.cache_folder, self.kind, parts, self._plan(tokenizer, parts))
        counts = f"{quantity(len(ids['train']))} tokens"
        counts += "" if one else f" and {quantity(len(ids['valid']))} for validation ({valid.origin})"
        counts += f" and {quantity(len(ids['test']))} for testing" if "test" in ids else ""
        note = f", {train.corpus.note}" if train.corpus.note else ""
        description = f"{self.title()}: {counts}{note}, {opened.label}"
        return TokenData(ids["train"], ids.get("valid", ids["train"]), opened, description, ids.get("test"), text_bytes)

    def _plan(self, override: str | None, parts: dict[str, Split]) -> TokenizerPlan:
        if override is None and self.tokenizer == OWN_BPE:
            from tokenizers import __version__

            identity, task = ["bpe", self.vocab_size, __version__], f"training a BPE of {self.vocab_size}"
            text = watched(task, parts["train"])
            return TokenizerPlan(identity, task, lambda: BytePairs.train(text, self.vocab_size), BytePairs.load)
        if override is None and self.tokenizer == "chars":
            task = "collecting its characters"
            text = chain.from_iterable(watched(task, part) for part in parts.values())
            return TokenizerPlan("chars", task, lambda: Characters.collect(text), Characters.load)
        if override is None and self.tokenizer == "bytes":
            return TokenizerPlan("bytes", "storing its bytes", Bytes, lambda folder: Bytes())
        name = override or self.tokenizer
        if (Path(name).expanduser() / Characters.file).is_file():
            known = Characters.load(Path(name).expanduser())
            return TokenizerPlan(
                ["chars", known.characters], f"encoding with {known.label}", lambda: known, Characters.load
            )
        opened = Pretrained.open(name, f"recipe.pretrained={name}" if override else f"data.tokenizer={name}")
        return TokenizerPlan(opened.identity(), f"encoding with {opened.label}", lambda: opened, lambda folder: opened)


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
        check_apart(key, files, others, "training")
        return Split.whole(self._corpus(key, self.test))

    def _paths(self, key: str, name: str) -> list[Path]:
        path = Path(name).expanduser().resolve()
        paths = [path]
        if path.is_dir():
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
        read=lambda rows: (_read(paths[row], key, encoding) for row in rows),
        identity=[
            [str(path), stat.st_size, stat.st_mtime_ns, encoding] for path, stat in zip(paths, stats, strict=True)
        ],
        megabytes=sum(stat.st_size for stat in stats) / 1e6,
    )


def _read(path: Path, key: str, encoding: str) -> str:
    """Return a file's text as it is, line ends included, without a byte order mark."""
    try:
        content = path.read_bytes()
        text = content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        likely = "utf-16" if b"\0" in content else "latin-1"
        raise UserError(
            f"{key}: {path} is not {encoding} text: the byte at offset {error.start} does not decode; set its "
            f"encoding, such as data.encoding={likely}, or convert it: iconv -f {likely} -t utf-8 {path.name} > new.txt"
        ) from None
    except LookupError:
        raise UserError(f"data.encoding={encoding} is unknown to Python; use utf-8, latin-1 or cp1252") from None
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror})") from None
    if "\0" in text:
        raise UserError(f"{key}: {path} is not text: it has a zero byte at offset {content.find(0)}")
    return text
