"""Files that no choice of ``data=`` reads: what they are, by their names, and what to do about them."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.config.command_line import as_typed
from trainer.errors import UserError, nearest

TABLES = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv")
"""What ``data=hub`` opens as rows."""
TRIED_BYTES = 2**26
"""Of a file that is not in the expected encoding: others are tried on so much of it."""
_PROGRAM = "or train from a Python program, with trainer.Recipe.of"
_ARRAYS = f"write images as PNG files, one folder per class (data=imagefolder), {_PROGRAM}"
_TEXT = "save it as plain text, in UTF-8 (data=text)"
_ROWS = "save it as CSV (data=hub)"
_PICTURES = "write the images as PNG or JPEG"
_RECORDS = f"write it as parquet or JSON lines (data=hub), {_PROGRAM}"


class _Kind(NamedTuple):
    names: str
    """A pattern of its lower-case file names."""
    what: str
    to_do: str
    """What to do about it; ``{0}`` is the file, quoted for the shell."""


_KINDS = (
    _Kind(r".*idx\d[-.]ubyte(\.gz)?", "an idx file, as of MNIST", _ARRAYS),
    _Kind(r".*\.(tar(\.\w+)?|tgz|tbz2?|txz)", "an archive", "unpack it: tar -xf {0}"),
    _Kind(r".*\.zip", "an archive", "unpack it: unzip {0}"),
    _Kind(r".*\.(7z|rar)", "an archive", "unpack it: 7z x {0}"),
    _Kind(r".*\.nii(\.gz)?|.*\.(dcm|dicom)", "a medical image", _PICTURES),
    _Kind(r".*\.gz", "a compressed file", "unpack it: gunzip -k {0}"),
    _Kind(r".*\.zst", "a compressed file", "unpack it: zstd -d {0}"),
    _Kind(r".*\.xz", "a compressed file", "unpack it: xz -dk {0}"),
    _Kind(r".*\.bz2", "a compressed file", "unpack it: bunzip2 -k {0}"),
    _Kind(r".*\.np[yz]", "an array of NumPy", _ARRAYS),
    _Kind(r".*\.(pkl|pickle|joblib)|(data|test)_batch(_\d)?", "a pickle of Python", _ARRAYS),
    _Kind(r".*\.(pt|pth|ckpt|safetensors)", "a file of tensors", _ARRAYS),
    _Kind(r".*\.(mat|h5|hdf5?|nc|zarr)", "a file of arrays", _ARRAYS),
    _Kind(r".*\.bin", "binary, perhaps tokens of another trainer", "give the text itself (data=text)"),
    _Kind(r".*\.(pdf|docx?|odt|rtf|epub|mobi|pptx?)", "a document with a layout", _TEXT),
    _Kind(r".*\.(xlsx?|ods)", "a spreadsheet", _ROWS),
    _Kind(r".*\.(heic|heif|svg|raw|cr2|cr3|nef|arw|dng|psd)", "an image in a format that is not decoded", _PICTURES),
    _Kind(r".*\.(tfrecords?|rec|mdb|lmdb|beton|feather|orc|avro|db|sqlite3?)", "a file of records", _RECORDS),
)


def typed(key: str, value: str) -> str:
    """Return an override as it is typed in a shell."""
    return shlex.quote(f"{key}={as_typed(value)}")


def missing(given: str) -> UserError:
    """Return what is wrong with an option whose value names no file and no folder."""
    key, _, name = given.partition("=")
    path = Path(name).expanduser()
    near = nearest(path.name, [file.name for file in path.parent.glob("*")])
    problem = f"{given}: there is no such file or folder{near}; if it was moved, set {key}=… to its new place"
    return UserError(problem, mistake=typed(key, name))


def not_read(given: str, path: Path, *reads: str) -> UserError | None:
    """Return why a file, or the first such file of a folder, is not read; None: it is of no kind that is known.

    Args:
        given: the option that names the data, with its value.
        path: the file or folder, which may be within the data.
        reads: suffixes of other files that the caller reads, such as ``.csv``.
    """
    key, _, name = given.partition("=")
    mistake = typed(key, name)
    for file in _files(path):
        where = given + (f": {file.name}" if path.is_dir() else "")
        lower = file.name.lower()
        if lower.endswith(reads):
            continue
        if lower.endswith(TABLES):
            return UserError(f"{where} is a file of rows", f"data=hub {typed('data.name', name)}", mistake=mistake)
        kind = next((kind for kind in _KINDS if re.fullmatch(kind.names, lower)), None)
        if kind is None:
            continue
        if kind.names.startswith(".*idx"):
            digits = ("data=hub data.name=ylecun/mnist", "data=digits")
            return UserError(f"{where} is {kind.what}, which is not read here; {kind.to_do}", *digits, mistake=mistake)
        if lower.endswith(".tar") and (columns := _columns_of_shard(file)):
            folder = typed("data.name", str(Path(name) if path.is_dir() else Path(name).parent))
            label = " data.label_column=cls" if "cls" in columns else ""
            return UserError(f"{where} is a shard of webdataset", f"data=hub {folder}{label}", mistake=mistake)
        return UserError(f"{where} is {kind.what}, which is not read here; {kind.to_do.format(shlex.quote(str(file)))}")
    return None


def is_text(path: Path) -> bool:
    """Return whether the beginning of a file is text in UTF-8."""
    with path.open("rb") as file:
        return encoding_of(file.read(2**16)) == "utf-8"


def in_utf8(file: Path, encoding: str, to: Path) -> str:
    """Return the command that writes a file anew in UTF-8."""
    return shlex.join(["iconv", "-f", encoding, "-t", "utf-8", str(file), "-o", str(to)])


def read_alike(file: Path, encoding: str) -> bool:
    """Return whether the beginning of a file is text in an encoding, and not in another one that is likelier."""
    with file.open("rb") as opened:
        content = opened.read(TRIED_BYTES // 2**10)
    return encoding_of(content) == encoding or (content.isascii() and not encoding.startswith("utf-16"))


def encoding_of(content: bytes) -> str | None:
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
    """Yield the file; or those of a folder and below it that are not hidden, the first few hundred."""
    if not path.is_dir():
        yield path
        return
    seen = 0
    for place, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(name for name in names if not name.startswith(".")):
            seen += 1
            yield Path(place, name)
        if seen > 500:
            return


def _columns_of_shard(path: Path) -> set[str]:
    """Return the suffixes of the first sample of an archive, of webdataset's form; empty: it is not."""
    with suppress(tarfile.TarError, OSError), tarfile.open(path, "r:") as archive:
        members = [member.name for member in (archive.next() for _ in range(2)) if member is not None]
        stems = {name.partition(".")[0] for name in members}
        if len(members) == 2 and len(stems) == 1:
            return {name.rpartition(".")[2] for name in members}
    return set()
