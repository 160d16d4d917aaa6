"""Weights that other programs wrote: their files and folders, and which of the tensors in them are a model's."""

from __future__ import annotations

import pickle
import re
import shlex
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.files import read_object

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Of files of weights."""
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What DDP, torch.compile, FSDP and activation checkpointing insert into names."""
_AVERAGED = re.compile(r"(^|[._])ema|ema($|[._])|averag|shadow|swa|teacher")
_ELSE = {
    b"version https://git-lfs": "is a pointer of Git LFS; get the file itself with git lfs pull",
    b"<": "is a web page; download the file itself (on the hub its address has /resolve/, not /blob/)",
    b"\x89HDF": "is HDF5, as Keras and TensorFlow write it; give weights of PyTorch",
}
"""How files begin that are no weights of PyTorch."""
_SAVE = 'write the weights with torch.save(model.state_dict(), "weights.pth")'


class _Inert(dict[Any, Any]):
    """What an object of an unknown class becomes: its items and attributes. No code of the file is run."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.update(part if isinstance(part, dict) else {})

    def append(self, *items: Any) -> None:
        """Ignore the items of a list or a set."""

    extend = add = append
    dump_patches = False  # which torch asks a module's class of, in a file older than 1.6
    __hash__ = object.__hash__  # type: ignore[assignment]


class _Unpickler(pickle.Unpickler):
    """Makes tensors and containers, and of all else ``_Inert``."""

    made = {
        f"{each.__module__}.{each.__name__}": each
        for each in (
            *(OrderedDict, torch.Size, torch.device, Tensor, nn.Parameter, torch.storage.UntypedStorage),
            *(torch._utils._rebuild_tensor, torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3),
            *(torch._utils._rebuild_parameter, torch._utils._rebuild_parameter_with_state),
        )
    } | {"__builtin__.set": set, "builtins.set": set}

    def find_class(self, module: str, name: str) -> Any:
        """Return what the file calls by this name."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return self.made.get(f"{module}.{name}", _Inert)


class _Reading(NamedTuple):
    """One way to take a file's tensors for a model's."""

    fits: int
    """How many of the model's names it has."""
    averaged: bool
    """Whether it is a moving average of the weights, which programs keep beside them."""
    label: str
    """Which entry of the file, and how its names begin; empty: the names as they are."""
    weights: dict[str, Tensor]
    left_out: list[str]
    """Names of what belongs to no part of the model, such as the loss."""


def read_weights(
    path: Path, names: Collection[str], key: str, remedy: str = "give the weights of this model"
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file, or of a folder, by a model's names, and which they are, in words.

    Of several entries that fit equally, an average of the weights is taken, else the first. ``fill`` checks the rest.

    Args:
        path: exists.
        names: of the model's weights.
        key: the option that named it, for messages.
        remedy: ends the message where they are of another model.

    Raises:
        UserError: it cannot be read, or no name in it is one of the model's.
    """
    contents = [_content(file, key) for file in _files(path, key)]
    content = contents[0] if len(contents) == 1 else {name: each[name] for each in contents for name in each}
    states = dict(_states(content))
    readings = [reading for where, state in states.items() for reading in _readings(where, state, names)]
    if not any(states.values()):
        raise UserError(f"{key} holds no tensors with names; {_SAVE}")
    if not readings:
        there = max(states.values(), key=len)
        if any(name.endswith((".zero_point", ".qweight", ".absmax", ".SCB")) for name in there):
            raise UserError(f"{key} holds quantised weights; give those from before, in floating point")
        of = "an optimizer" if {"exp_avg", "momentum_buffer"} & {*there} else "another model"
        raise UserError(
            f"{key}: the weights are of {of}: none of its names ({', '.join([*there][:3])}, …) is one of this "
            f"model ({', '.join([*names][:3])}, …); {remedy}"
        )
    best = max(readings, key=lambda reading: (reading.fits, -len(reading.weights), reading.averaged))
    others = [reading.label for reading in readings if reading.fits == best.fits and reading is not best]
    parts = [f"its {best.label}"] if best.label else []
    parts += [f"not {label}" for label in others if label]
    parts += [f"not {label}, an average without names" for label in states if not states[label] and "shadow" in label]
    parts += [f"without {best.left_out[0]}" + ", …" * (len(best.left_out) > 1)] if best.left_out else []
    return best.weights, ", ".join(parts)


def _readings(where: str, state: dict[str, Tensor], names: Collection[str]) -> Iterator[_Reading]:
    """Yield the ways to take ``names``: of those that begin alike, or of a numbered body, as fastai's, in order."""
    wrappers = _WRAPPERS - {part for name in names for part in name.split(".")}
    bare = {".".join(part for part in name.split(".") if part not in wrappers): state[name] for name in state}
    starts: Counter[str] = Counter()
    for name in bare:
        parts = name.split(".")
        ends = [".".join(parts[first:]) for first in range(len(parts))]
        starts.update(name.removesuffix(end) for end in ends if end in names)
    tops = {name.partition(".")[0] for name in names}
    for start, fits in starts.most_common(3):
        found = {name.removeprefix(start): tensor for name, tensor in bare.items() if name.startswith(start)}
        weights = {name: tensor for name, tensor in found.items() if name.partition(".")[0] in tops}
        label = "/".join(filter(None, (where, start and f"{start}*")))
        left_out = [name for name in bare if name.removeprefix(start) not in weights]
        yield _Reading(fits, _AVERAGED.search(label.lower()) is not None, label, weights, left_out)
    body = [name for name in names if name.partition(".")[0] != [*names][-1].partition(".")[0]]
    for start in dict.fromkeys(re.sub(r"(^|(?<=\.))\d+\..*", "", name) for name in bare):
        same = [name for name in bare if name.startswith(start)][: len(body)]
        if body and [name.rpartition(".")[2] for name in same] == [name.rpartition(".")[2] for name in body]:
            weights = dict(zip(body, map(bare.__getitem__, same), strict=True))
            left_out = [name for name in bare if name not in same]
            yield _Reading(len(body), False, f"{where}/{start}*, in order".lstrip("/"), weights, left_out)


def _states(content: Any, where: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every mapping of names to tensors, of a list an empty one, in a file's content, and the keys to it."""
    whole = isinstance(content, _Inert) and "_parameters" in content
    found = _module_state(content) if whole else content
    if isinstance(found, Mapping):
        tensors = {name: each for name, each in found.items() if isinstance(name, str) and isinstance(each, Tensor)}
        if tensors:
            yield where, tensors
    if isinstance(content, list | tuple):
        yield where, {}
        content = dict(enumerate(content))
    inside = isinstance(content, Mapping) and not whole and where.count("/") < 3
    for name, each in content.items() if inside else ():
        if name != "average_model_state":  # of Lightning: not begun or without statistics, in the end the state_dict's
            yield from _states(each, f"{where}/{name}" if where else str(name))


def _module_state(module: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a whole module."""
    kept = {
        name: each for name, each in module["_buffers"].items() if name not in module["_non_persistent_buffers_set"]
    }
    state = module["_parameters"] | kept
    for name, child in module["_modules"].items():
        state |= {f"{name}.{key}": each for key, each in (_module_state(child) if child else {}).items()}
    return state


def _files(path: Path, key: str) -> list[Path]:
    """Return the file of weights, or in a folder that file, or the shards.

    Raises:
        UserError: there is none, or there are several, or some shards are missing.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and not re.search(r"-\d+-of-\d+\.|\.index\.json$", path.name):
        return [path]
    for index in sorted(folder.glob("*.index.json")):
        shards = sorted({folder / name for name in read_object(index).get("weight_map", {}).values()})
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise UserError(f"{key}: {missing[0]} is missing, which {index.name} names; copy it there")
        return shards
    tag = "./" + latest.read_text().strip("/ \n") if (latest := folder / "latest").is_file() else "."  # of DeepSpeed
    named = [file for name in ("model.safetensors", "pytorch_model.bin", f"{tag}/mp*.pt") for file in folder.glob(name)]
    found = named[:1] or [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES]
    if len(found) == 1:
        return found
    if (folder / ".metadata").is_file():
        tool = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {shlex.quote(str(folder))}"
        raise UserError(f"{key} is a checkpoint of torch.distributed; make one file of it: {tool} weights.pth")
    holds = ", ".join(file.name for file in found or sorted(folder.iterdir())) or "it is empty"
    raise UserError(f"{key} holds {'several files' if found else 'no file'} of weights ({holds:.200}); give the file")


def _content(file: Path, key: str) -> Any:
    """Return what a file holds: tensors in mappings and sequences.

    Raises:
        UserError: it is of another kind, is damaged, or cannot be read.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
        for beginning, what in _ELSE.items():
            if start.lstrip().startswith(beginning):
                raise UserError(f"{key} {what}")
        if start[8:9] == b"{":
            return load_file(file)
        parts = zipfile.ZipFile(file).namelist() if zipfile.is_zipfile(file) else []
        if any(name.endswith("/constants.pkl") for name in parts):
            raise UserError(f"{key} is a program of TorchScript; {_SAVE}, of torch.jit.load({file.name!r})")
        return _load(file)
    except OSError as error:
        raise UserError(f"{key} cannot be read ({error.strerror}); give a file of weights") from error
    except UserError:
        raise
    except Exception as error:  # of pickle, torch or safetensors
        size = f"{file.stat().st_size:,} bytes"
        raise UserError(
            f"{key} is no file of weights, or is damaged ({size}); copy or download it again, or {_SAVE}"
        ) from error


def _load(file: Path) -> Any:
    def load(*args: Any, **kwargs: Any) -> Any:
        return _Unpickler(*args, **kwargs).load()

    inert: Any = SimpleNamespace(__name__=__name__, Unpickler=_Unpickler, load=load)
    return torch.load(file, map_location="cpu", pickle_module=inert, weights_only=False)
