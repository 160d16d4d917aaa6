"""Files that a choice of ``data=`` does not read, by their names, and the encoding of those of text."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.config.command_line import as_typed
from trainer.errors import UserError, most_like, nearest

NAMES = {"train": "training", "valid": "validation", "test": "test"}
"""What the parts of data are called for people."""
PART_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The part that files belong to, by a word in their names."""
TABLES = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv")
"""What ``data=hub`` opens as rows."""
_PACKED = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
PACKED_BYTES = (b"\x1f\x8b", b"PK\3\4", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!")
"""With what compressed files and archives begin, whatever their names."""
_OTHERS = (
    *(".npz", "-ubyte", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".mat", ".h5", ".hdf5"),
    *(".pdf", ".doc", ".docx", ".odt", ".epub", ".xls", ".xlsx", ".tfrecord", ".lmdb", ".dcm", ".nii", ".heic", ".svg"),
)
"""Arrays, documents and images that nothing here decodes."""
_TRIED_BYTES = 2**26
"""Of a file that is not in the expected encoding: others are tried on so much of it."""


def typed(key: str, value: str) -> str:
    """Return an override as it is typed in a shell."""
    text = f"{key}={as_typed(value)}"
    # shlex would leave the quotes of another shell in it, and write each as five characters: '"'"'
    return f'"{text}"' if "'" in text and not set('"$`\\!') & set(text) else shlex.quote(text)


def near_to(path: Path) -> str:
    """Return ``"; did you mean 'b.txt'?"`` of the name beside a path that is most like it; empty: none is."""
    folder = f"{path.parent}/" * (path.parent != Path())
    return nearest(path.name, [file.name for file in path.parent.glob("*")], folder)


def missing(given: str, wanted: str = "") -> UserError:
    """Return what is wrong with an option whose value names no file and no folder; ``wanted``: what to give instead."""
    key, _, name = given.partition("=")
    path, problem = Path(name).expanduser(), f"{given}: there is no such file or folder"
    if near := most_like(path.name, [file.name for file in path.parent.glob("*")]):
        return UserError(problem, typed(key, str(path.with_name(near))), mistake=typed(key, name))
    wanted = wanted or f"if it was moved, set {key}=… to its new place"
    return UserError(f"{problem}; {wanted}", mistake=typed(key, name))


def not_read(given: str, path: Path) -> UserError | None:
    """Return why a file, or the first such file of a folder, is not read; None: it is of no kind that is known.

    Args:
        given: the option that names the data, with its value.
        path: the file or folder, which may be within the data.
    """
    key, _, name = given.partition("=")
    for file in _files(path):
        where = given + (f": {file.name}" if path.is_dir() else "")
        lower = file.name.lower()
        if lower.endswith(TABLES):
            return UserError(
                f"{where} is a file of rows", f"data=hub {typed('data.name', name)}", mistake=typed(key, name)
            )
        if lower.endswith(_PACKED):
            return UserError(f"{where} is packed; unpack it, and give what was in it")
        if lower.endswith((".bin", ".npy")):
            problem = f"{where} is neither text nor images, but may be token ids"
            return UserError(problem, f"data=tokens {typed('data.path', name)}", mistake=typed(key, name))
        if lower.endswith(_OTHERS):
            return UserError(
                f"{where} is not read here; write text as UTF-8 (data=text), rows as CSV or parquet (data=hub), images "
                "as PNG or JPEG in one folder per class (data=imagefolder), or train from a Python program, with "
                "trainer.Recipe.of"
            )
    return None


def is_text(path: Path) -> bool:
    """Return whether the beginning of a file is text in UTF-8."""
    with path.open("rb") as file:
        return encoding_of_bytes(file.read(2**16)) == "utf-8"


def encoding_of(file: Path) -> str | None:
    """Return the encoding in which a file, as far as it is tried, is text; None: none of the usual ones."""
    with file.open("rb") as opened:
        return encoding_of_bytes(opened.read(_TRIED_BYTES))


def encoding_of_bytes(content: bytes) -> str | None:
    """Return the encoding with which bytes are text, without control characters; None: none of the usual ones.

    The last character may be cut off.
    """
    zeros = content.count(b"\0")
    wide = ("utf-16",) if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-16-le", "utf-16-be")
    for encoding in wide if zeros > len(content) / 10 else ("utf-8", "cp1252", "latin-1"):
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(content)
            if not re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x80-\x9f]", text):
                return encoding
    return None


def _files(path: Path) -> Iterator[Path]:
    """Yield the file; or those of a folder and below it that are not hidden."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    yield from (file for file in files if file.is_file() and not file.name.startswith("."))
