"""Weights that no run wrote: the file or the folder of named tensors, and which of them are a model's."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.errors import UserError, first_line
from trainer.files import read_object

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Suffixes of files of weights."""
_WANTED = 'give what torch.save(model.state_dict(), "weights.pth") writes, or a .safetensors file'


def read_weights(
    path: Path, names: Collection[str], key: str, remedy: str = "give the weights of this model"
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file, or of a folder, by a model's names, and which they are, in words.

    The file is a dict of named tensors, or has one as its entry. The prefix without which most names are the model's
    is removed. What is not under it, or is of no part of the model, such as the loss, is left out. ``fill`` checks the
    rest.

    Args:
        path: exists.
        names: of the model's weights.
        key: the option that named it, for messages.
        remedy: ends the message where they are of another model.

    Raises:
        UserError: it cannot be opened, it has no dict of named tensors, or several, or no name is one of the model's.
    """
    files = _files(path, key)
    content = {name: value for file in files for name, value in _content(file, key).items()}
    states = {"": content} if _is_state(content) else {name: each for name, each in content.items() if _is_state(each)}
    if not states:
        raise UserError(f"{key} holds no dict of named tensors; {_WANTED}")
    entry, state = next(iter(states.items()))
    if len(states) > 1:
        one = f"torch.load({str(files[0])!r}, map_location='cpu', weights_only=True)[{entry!r}]"
        raise UserError(
            f"{key} holds several dicts of named tensors ({', '.join(map(str, states))}); save the one that you want, "
            f"and give that: torch.save({one}, 'weights.pth')"
        )
    prefixes = _prefixes(state, names)
    if len(prefixes) > 1:
        raise UserError(f"{key} holds the weights of this model more than once ({', '.join(prefixes)}); {_WANTED}")
    if not prefixes:
        theirs, ours = (", ".join([*some][:3]) for some in (state, names))
        raise UserError(
            f"{key}: the weights are of another model: none of its names ({theirs}, …) is one of this model "
            f"({ours}, …); {remedy}"
        )
    (prefix,) = prefixes
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
    """Return the prefixes without which most of the names in a file are ``names``; the empty one alone if it is one."""
    fits: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        fits.update(name.removesuffix(end) for end in ends if end in names)
    most = max(fits.values(), default=0)
    best = [prefix for prefix in fits if fits[prefix] == most]
    return [""] if "" in best else best


def _files(path: Path, key: str) -> list[Path]:
    """Return the file of weights, or in a folder that file, or the shards that transformers' index names."""
    if not path.is_dir():
        return [path]
    for index in sorted(path.glob("*.index.json")):
        shards = sorted({path / name for name in read_object(index).get("weight_map", {}).values()})
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise UserError(f"{key}: {missing[0]} is missing, which {index.name} names; copy it there")
        return shards
    files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and file.is_file()]
    # Beside a file of these names, transformers and accelerate keep the optimizer's state.
    files = [file for file in files if file.name in ("model.safetensors", "pytorch_model.bin")][:1] or files
    if len(files) != 1:
        count, holds = ("several files", files) if files else ("no file", sorted(path.iterdir()))
        listed = ", ".join(file.name for file in holds) or "it is empty"
        raise UserError(f"{key} holds {count} of weights ({listed:.200}); give the file")
    return files


def _content(file: Path, key: str) -> Mapping[Any, Any]:
    """Return the dict that a file holds; empty if it holds something else. No code of the file is run."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # of the system, pickle, torch or safetensors
        # Keep only the reason, the first sentence: torch's next ones advise to run the file's code.
        why = re.split(r"(?<=\S)\.(?: |$)", first_line(error.__context__ or error))[0]
        size = f"{file.stat().st_size:,} bytes"
        raise UserError(f"{key} cannot be opened as weights ({file.name}, {size}: {why}); {_WANTED}") from error
    return content if isinstance(content, Mapping) else {}
