"""Text for language models: where it is read from."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import ClassVar

import numpy as np

from recipes.data.text.documents import Text, split
from recipes.data.text.files import missing, not_read, typed
from recipes.data.text.pretrained import open_tokenizer
from recipes.data.text.tokenizers import OF_TEXT, OWN_BPE, TokenizerChoice
from recipes.data.text.tokens import TextSource, TokenData, amounts, open_or_build
from trainer.cache import cache_folder
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_range
from trainer.recipe import NO_OPTION

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
        check_range("data.valid_fraction", self.valid_fraction, "(0, 0.5]")

    def splits(self) -> tuple[Text, Text]:
        """Return the text for training and the text for validation. Raises UserError if there is none."""
        raise NotImplementedError

    def test_split(self) -> Text | None:
        """Return the text for testing; None: there is none."""
        return None

    def title(self) -> str:
        """Return what the text is called in the start block."""
        return self.kind

    @property
    def cache_folder(self) -> Path:
        """The folder that ``cache_dir`` means."""
        return cache_folder(self.cache_dir)

    def chosen_tokenizer(self, given: str | None) -> TokenizerChoice:
        """Return the tokenizer that ``given`` (see ``tokens``) or the option names, or how it is made of the text."""
        known = None
        if given is not None or self.tokenizer not in OF_TEXT:
            key = f"data.tokenizer={self.tokenizer}" if given is None else f"init_from={given}"
            known = open_tokenizer(given or self.tokenizer, key)
        return TokenizerChoice(known, self.tokenizer, self.vocab_size)

    def tokens(self, tokenizer: str | None) -> TokenData:
        train, valid = self.splits()
        test = self.test_split()
        parts = {"train": train, "valid": valid} | ({"test": test} if test else {})
        if self.whole and train.source == valid.source:
            parts = {"train": replace(train, rows=range(len(train.sizes)), share=(0.0, 1.0))}
        choice = self.chosen_tokenizer(tokenizer)
        ids, text_bytes, opened = open_or_build(self.cache_folder, self.kind, parts, choice)
        note = f", {train.note}" if train.note else ""
        description = f"{self.title()}: {amounts(ids, valid.origin)}{note}, {opened.label}"
        return TokenData(ids["train"], ids.get("valid", ids["train"]), opened, description, ids.get("test"), text_bytes)


@dataclass
class PythonDocs(TokenizedText):
    """The sources of the running interpreter's standard library, including docstrings: always available."""

    kind: ClassVar[str] = "python_docs"

    def splits(self) -> tuple[Text, Text]:
        """Divide the modules, without tests, bundled applications and generated tables."""
        root = Path(sysconfig.get_path("stdlib"))
        paths = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _NOISE]
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        paths = sorted(path for path in paths if path.is_file())
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
    """Encoding of all the files, such as latin-1, cp1252 or utf-16."""
    test: str | None = None
    """Test text: another file or folder, evaluated once, at the end, with the best weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("missing required option: data.path; set a text file or a folder, such as notes.txt")
        try:
            "a".encode(self.encoding)  # codecs.lookup also accepts codecs that are not text encodings, such as base64
        except (LookupError, ValueError):
            raise UserError(
                f"data.encoding={self.encoding} is not a text encoding that Python knows; use utf-8, latin-1 or utf-16"
            ) from None
        for key, name in (("data.path", self.path), ("data.test", self.test)):
            path = Path(name or ".").expanduser()
            if not path.exists() and "*" in str(path):
                folder = next(each for each in path.parents if "*" not in str(each))
                remedy = f"{typed(key, str(folder))} data.pattern={shlex.quote(str(path.relative_to(folder)))}"
                raise UserError(f"{key}={name}: there is no such file or folder", remedy)
            if not path.exists():
                raise missing(f"{key}={name}")
            if path.is_file() and (error := not_read(f"{key}={name}", path)):
                raise error

    def title(self) -> str:
        """Return the name of the file or folder."""
        return Path(self.path).expanduser().resolve().name

    def splits(self) -> tuple[Text, Text]:
        """Divide the file, or the files of the folder."""
        return split(self._text(f"data.path={self.path}", self.path), self.valid_fraction)

    def test_split(self) -> Text | None:
        """Return the text of ``test``, whole."""
        if self.test is None:
            return None
        key = f"data.test={self.test}"
        files, others = (list(map(str, self._paths(key, name))) for name in (self.test, self.path))
        check_no_overlap(key, files, others, "training")
        return self._text(key, self.test)

    def _paths(self, key: str, name: str) -> list[Path]:
        path = Path(name).expanduser().resolve()
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.rglob("*") if file.is_file())
        pattern = self.pattern.lower().lstrip("/").replace("**.", "*.")
        paths = [file for file in files if Path(str(file).lower()).match(pattern or "*")]  # A.TXT, too
        if not paths:
            if error := not_read(key, path):
                raise error
            has = ", ".join(sorted({f"*{file.suffix}" for file in files})) or "no files"
            raise UserError(f"{key}: no file in it matches data.pattern={self.pattern} (it has {has}); set another")
        return paths

    def _text(self, key: str, name: str) -> Text:
        text = _files(self._paths(key, name), key, self.encoding)
        if not any(line.strip() for document in text for line in document):
            raise UserError(f"{key} is empty, or blank; set {key.partition('=')[0]} to a file or folder that has text")
        return text


def _files(paths: list[Path], key: str, encoding: str = "utf-8") -> Text:
    stats = [path.stat() for path in paths]
    return Text(
        sizes=np.array([stat.st_size for stat in stats], dtype=np.int64),
        read=lambda rows: (TextFile(paths[row], key, encoding) for row in rows),
        source=[[str(path), stat.st_size, stat.st_mtime_ns, encoding] for path, stat in zip(paths, stats, strict=True)],
        rows=range(len(paths)),
    )


@dataclass(frozen=True)
class TextFile:
    """A file's text as it is, line ends included, without a byte order mark; a line is in memory at a time."""

    path: Path
    key: str
    """The option that named it, for messages."""
    encoding: str

    def __iter__(self) -> Iterator[str]:
        """Yield the lines.

        Raises:
            UserError: the file cannot be read, or is not text in this encoding.
        """
        encoding = "utf-8-sig" if self._is_utf8 else self.encoding  # without a byte order mark
        number = 0
        try:
            with self.path.open("rb") as file, TextIOWrapper(file, encoding, newline="") as lines:
                try:
                    for number, line in enumerate(lines, 1):
                        if "\0" in line:
                            raise self._not_text(f"line {number:,} has a zero byte")
                        yield line
                except UnicodeDecodeError as error:  # error.object is the last chunk read, which ends at file.tell()
                    before = error.object[: error.start].decode(self.encoding, "ignore")
                    number += 1 + len(re.findall("\r\n?|\n", before))
                    offset = file.tell() - len(error.object) + error.start
                    byte = error.object[error.start]
                    raise self._not_text(f"line {number:,} has the byte 0x{byte:02x} at offset {offset:,}") from error
        except UnicodeError as error:
            raise self._not_text(str(error)) from error
        except OSError as error:
            raise UserError(f"{self.key}: {self.path} cannot be read ({error.strerror})") from None

    @property
    def _is_utf8(self) -> bool:
        return codecs.lookup(self.encoding).name == "utf-8"

    def _not_text(self, why: str) -> UserError:
        problem = f"{self.key}: {self.path} is not {self.encoding} text: {why}"
        return UserError(f"{problem}; write it anew in UTF-8, or set data.encoding=… to what all of the files are in")
