"""Weights that no run wrote: the file or the folder of named tensors, and which of them are a model's."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mantissa.display import shortened
from trainer.errors import UserError, first_line
from trainer.files import read_object

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Suffixes of files of weights."""
_WANTED = 'give what torch.save(model.state_dict(), "weights.pth") writes, or a .safetensors file'
_ONE = 'save the one that you want by torch.save(…, "weights.pth"), and give that'


def read_weights(path: Path, names: Collection[str], key: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file, or of a folder, by a model's names, and which they are, in words.

    The file is a dict of named tensors, or has one as its entry. The prefix without which most names are the model's
    is removed. What is not under it, or is of no part of the model, such as the loss, is left out. ``fill`` checks the
    rest.

    Args:
        path: exists.
        names: of the model's weights.
        key: the option that named it, for messages.

    Raises:
        UserError: it cannot be opened, it has no dict of named tensors, or several, or no name is one of the model's.
    """
    files = _files(path, key)
    content = {name: value for file in files for name, value in open_file(file, key).items()}
    states = {"": content} if _is_state(content) else {name: each for name, each in content.items() if _is_state(each)}
    if not states:
        entries = shortened(list(map(str, content)), 5) or "no dict"
        raise UserError(f"{key} holds no dict of named tensors ({entries}); {_WANTED}")
    entry, state = next(iter(states.items()))
    if len(states) > 1:
        raise UserError(f"{key} holds several dicts of named tensors ({', '.join(map(str, states))}); {_ONE}")
    found = _prefixes(state, names)
    if len(found) > 1:
        raise UserError(f"{key} holds the weights of this model more than once ({', '.join(found)}); {_ONE}")
    if not found:
        theirs, ours = (
            shortened([name for name in some if name not in others], 3)
            for some, others in ((state, names), (names, state))
        )
        raise UserError(
            f"{key}: the weights are of another model, with other names ({theirs}) than those of this one ({ours})"
        )
    (prefix,) = found
    parts = {name.partition(".")[0] for name in names}
    bare = {name: name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    taken = {name: bare[name] for name in bare if bare[name].partition(".")[0] in parts}
    left_out = [name for name in state if name not in taken]
    words = [f"its {entry}"] if entry else []
    words += [f"the prefix {prefix} removed"] if prefix else []
    words += [f"without {left_out[0]}" + ", …" * (len(left_out) > 1)] if left_out else []
    return {taken[name]: state[name] for name in taken}, ", ".join(words)


def _is_state(content: Any) -> bool:
    """Return whether this is a dict of named tensors."""
    items = content.items() if isinstance(content, Mapping) else ()
    return bool(items) and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in items)


def _prefixes(there: Collection[str], names: Collection[str]) -> list[str]:
    """Return the prefixes without which most of the names in a file are ``names``; the empty one alone if it is one.

    None where they are less than half of either: parts of a model, such as its blocks, have names of their own.
    """
    fits: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        fits.update(name.removesuffix(end) for end in ends if end in names)
    most = max(fits.values(), default=0)
    best = [prefix for prefix in fits if fits[prefix] == most and 2 * most >= min(len(names), len(there))]
    return [""] if "" in best else best


def defect(file: Path) -> str:
    """Return what is wrong with a file of weights or JSON, as a predicate; empty: it opens, or is of another kind."""
    if not file.exists():
        return "is a link to nothing" if file.is_symlink() else "is missing"
    if re.fullmatch(r"(pytorch_)?model.*\.(safetensors|bin)", file.name) and file.is_file():
        try:
            _open(file)
        except Exception as error:  # of the system, pickle, torch or safetensors
            return _why(file, error)
    if re.fullmatch(r"(\w+_)?config\.json|tokenizer\.json", file.name):
        try:
            json.loads(file.read_text(encoding="utf-8"))  # a mark of Windows at its beginning is too much
        except (OSError, ValueError) as error:
            return f"cannot be read as JSON ({error}); save it as plain UTF-8"
    return ""


def _is_safetensors(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(9)[8:] == b"{"  # of its header, after the length


def _why(file: Path, error: Exception) -> str:
    """Return why a file cannot be opened, as a predicate."""
    # Keep only the reason, the first sentence: torch's next ones advise to run the file's code.
    why = re.split(r"(?<=\S)\.(?: |$)", first_line(error.__context__ or error))[0]
    return f"cannot be read as safetensors or torch's ({file.stat().st_size:,} bytes: {why}); {_WANTED}"


def _files(path: Path, key: str) -> list[Path]:
    """Return the file of weights, or in a folder that file, or the shards that transformers' index names.

    Raises:
        UserError: there is none, or one of several.
    """
    if not path.is_dir():
        return [path]
    for index in sorted(path.glob("*.index.json")):
        shards = sorted({path / name for name in read_object(index).get("weight_map", {}).values()})
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise UserError(f"{key} lacks {shortened(missing, 3)}, which {index.name} names; copy what is left there")
        return shards
    files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and file.is_file()]
    # Beside a file of these names, transformers and accelerate keep the optimizer's state.
    files = [file for file in files if file.name in ("model.safetensors", "pytorch_model.bin")][:1] or files
    if len(files) != 1:
        count, holds = ("several files", files) if files else ("no file", sorted(path.iterdir()))
        listed = ", ".join(file.name for file in holds) or "it is empty"
        raise UserError(f"{key} holds {count} of weights ({listed:.200}); give the file")
    return files


def open_file(file: Path, key: str) -> Mapping[Any, Any]:
    """Return the dict that a file holds; empty if it holds something else. No code of the file is run."""
    try:
        content = _open(file)
    except Exception as error:  # of the system, pickle, torch or safetensors
        raise UserError(f"{key} cannot be opened as weights: {file.name} {_why(file, error)}") from error
    return content if isinstance(content, Mapping) else {}


def _open(file: Path) -> Any:
    """Return what a file holds, mapped into memory where it can be."""
    if _is_safetensors(file):  # which may have any name
        return load_file(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript, which is then refused
        if file.suffix == ".safetensors":  # torch goes by the name, too
            with file.open("rb") as opened:
                return torch.load(opened, map_location="cpu", weights_only=True)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
