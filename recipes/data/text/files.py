"""Files that a choice of ``data=`` does not read, by their names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
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
_OTHERS = (
    *(".npz", "-ubyte", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".mat", ".h5", ".hdf5"),
    *(".pdf", ".doc", ".docx", ".odt", ".epub", ".xls", ".xlsx", ".tfrecord", ".lmdb", ".dcm", ".nii", ".heic", ".svg"),
)
"""Arrays, documents and images that nothing here decodes."""


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


def _files(path: Path) -> Iterator[Path]:
    """Yield the file; or those of a folder and below it that are not hidden."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    yield from (file for file in files if file.is_file() and not file.name.startswith("."))
