"""Weights that no run wrote: the file or the folder of named tensors, and which of them are a model's."""

from __future__ import annotations

import re
import shlex
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
_BEGINNINGS = {
    b"version https://git-lfs": "is a pointer of Git LFS; git lfs pull gets it",
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), "is compressed; unpack it"),
    b"GGUF": f"is a GGUF file, of llama.cpp; {_WANTED}",
    b"\x89HDF": f"is an HDF5 file, as of Keras; {_WANTED}",
    b"<": f"is a page of HTML or XML; {_WANTED}",
}
"""What a file is that begins so, and what to do."""
_OTHERS = {".onnx": "of ONNX", ".msgpack": "of Flax", ".tflite": "of TensorFlow", ".pb": "of TensorFlow"}
"""Suffixes of other programs' files, which begin in many ways."""
_WRAPPERS = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Modules that torch puts around a part of a model: compiled, sharded or recomputed."""
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)")


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
    loaded = f"torch.load({str(files[0])!r}, map_location='cpu', weights_only=True)"
    if files[0].suffix == ".safetensors":
        loaded = f"safetensors.torch.load_file({str(files[0])!r})"
    loaded += f"[{entry!r}]" if entry else ""
    one = "save the one that you want, and give that: torch.save({}, 'weights.pth')"
    if len(states) > 1:
        raise UserError(
            f"{key} holds several dicts of named tensors ({', '.join(map(str, states))}); {one.format(loaded)}"
        )
    if not any(map(_WRAPPERS.search, names)):
        state = {_WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    found = _prefixes(state, names)
    if len(found) > 1:
        part = f"{{name: each for name, each in {loaded}.items() if name.startswith({found[0]!r})}}"
        is_whole = len(files) == 1 and any(name.startswith(found[0]) for name in states[entry])  # no shards, no wrapper
        to_do = one.format(part) if is_whole else _WANTED
        raise UserError(f"{key} holds the weights of this model more than once ({', '.join(found)}); {to_do}")
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
    """Return what is wrong with a file, as a predicate; empty: nothing. What transformers calls weights is opened."""
    if not file.exists():
        return "is a link to nothing; copy it with cp -rL" if file.is_symlink() else "is missing"
    if file.is_dir():
        return ""
    with file.open("rb") as opened:
        head = opened.read(30)
    if head.startswith(b"version https://git-lfs"):
        return _BEGINNINGS[b"version https://git-lfs"]
    if head.startswith(b"GGUF"):
        return "is a GGUF file, of llama.cpp; give a folder that save_pretrained wrote"
    if not re.fullmatch(r"(pytorch_)?model.*\.(safetensors|bin)", file.name):
        return ""
    try:
        _open(file)
    except Exception as error:  # of the system, pickle, torch or safetensors
        return _why(file, head, error)
    return ""


def _why(file: Path, head: bytes, error: Exception) -> str:
    """Return why a file that begins with ``head`` cannot be opened, as a predicate."""
    if not head:
        return "is empty"
    if what := next((what for begins, what in _BEGINNINGS.items() if head.startswith(begins)), None):
        return what
    if file.suffix in _OTHERS:
        return f"is a file {_OTHERS[file.suffix]}; {_WANTED}"
    # A safetensors file begins with the length of its header, which is JSON.
    short = head[8:9] == b"{" and 8 + int.from_bytes(head[:8], "little") > file.stat().st_size
    if short or "not fully covered" in str(error) or (head.startswith(b"PK") and not zipfile.is_zipfile(file)):
        return f"is cut off, at {file.stat().st_size:,} bytes; copy it again"
    # Keep only the reason, the first sentence: torch's next ones advise to run the file's code.
    why = re.split(r"(?<=\S)\.(?: |$)", first_line(error.__context__ or error))[0]
    return f"cannot be read as safetensors or torch's ({why}); {_WANTED}"


def _files(path: Path, key: str) -> list[Path]:
    """Return the file of weights, or in a folder that file, or the shards that transformers' index, or a name, counts.

    Raises:
        UserError: there is none, or one of several, or they are in a form that cannot be read without running code.
    """
    if path.suffix == ".distcp" or any(path.glob("*.distcp")):
        folder = path if path.is_dir() else path.parent
        command = shlex.join(
            ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(folder), "weights.pth"]
        )
        raise UserError(
            f"{key} is a checkpoint of torch.distributed.checkpoint, whose .metadata may run code; if you trust it, "
            f"make a file of it, and give that: {command}"
        )
    if path.name.endswith(".index.json"):
        path = path.parent
    part = _SHARD.fullmatch(path.name)
    if path.is_file():
        if part is None:
            return [path]
        _files(path.parent, key)  # names what is missing there
        raise UserError(f"{key} is file {int(part[2])} of {int(part[3])}", f"init_from={shlex.quote(str(path.parent))}")
    for index in sorted(path.glob("*.index.json")):
        return _present([*read_object(index).get("weight_map", {}).values()], path, index.name, key)
    held = [file for file in sorted(path.iterdir()) if file.is_file()]
    files = [file for file in held if file.suffix in SUFFIXES]
    files = files or [file for file in held if file.suffix in (".gguf", *_OTHERS)]  # whose kind is said as it is opened
    for part in filter(None, (_SHARD.fullmatch(file.name) for file in files)):
        stem, _, count, suffix = part.groups()
        names = [f"{stem}-{number:0{len(count)}}-of-{count}{suffix}" for number in range(1, int(count) + 1)]
        return _present(names, path, part[0], key)
    # Beside a file of these names, transformers and accelerate keep the optimizer's state.
    files = [file for file in files if file.name in ("model.safetensors", "pytorch_model.bin")][:1] or files
    if len(files) != 1:
        count, holds = ("several files", files) if files else ("no file", sorted(path.iterdir()))
        listed = ", ".join(file.name for file in holds) or "it is empty"
        raise UserError(f"{key} holds {count} of weights ({listed:.200}); give the file")
    return files


def _present(names: Collection[str], folder: Path, named_by: str, key: str) -> list[Path]:
    """Return the shards of these names. Raises UserError where one is missing, which ``named_by`` speaks of."""
    shards = [folder / name for name in sorted({*names})]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        which = f"{missing[0]} is" if len(missing) == 1 else f"{len(missing)} files ({shortened(missing, 3)}) are"
        raise UserError(f"{key}: {which} missing, of the {len(shards)} files of {named_by}; copy what is left there")
    return shards


def open_file(file: Path, key: str) -> Mapping[Any, Any]:
    """Return the dict that a file holds; empty if it holds something else. No code of the file is run."""
    try:
        content = _open(file)
    except Exception as error:  # of the system, pickle, torch or safetensors
        with file.open("rb") as opened:
            why = _why(file, opened.read(30), error)
        raise UserError(f"{key} cannot be opened as weights: {file.name} {why}") from error
    return content if isinstance(content, Mapping) else {}


def _open(file: Path) -> Any:
    """Return what a file holds, mapped into memory where it can be."""
    if file.suffix == ".safetensors":
        return load_file(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript, which is then refused
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
