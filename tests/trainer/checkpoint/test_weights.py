"""Weights that no run wrote: what is taken of a file or a folder, or what is wrong with it."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers import same_bits
from trainer.checkpoint.reader import fill
from trainer.checkpoint.weights import read_weights
from trainer.errors import UserError

State = dict[str, Any]
Write = Callable[[Path], object]
NET = nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), fc=nn.Linear(4, 2)))
STATE: State = dict(NET.state_dict())
LONE = torch.ones(2)
ADAM: State = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 1e-3}]}


class Ran:
    """Would run a command when it is unpickled as usual."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it-ran",)


def under(prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in STATE.items()}


def saved(content: Any, older: bool = False, share: float = 1.0) -> Write:
    def write(path: Path) -> None:
        torch.save(content, path, _use_new_zipfile_serialization=not older)
        os.truncate(path, int(share * path.stat().st_size))

    return write


def text(content: str) -> Write:
    return lambda path: path.write_text(content)


def folder(files: dict[str, Write]) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        for name, file in files.items():
            file(path / name)

    return write


def cut_safetensors(share: float) -> Write:
    def write(path: Path) -> None:
        save_file(STATE, path)
        os.truncate(path, int(share * path.stat().st_size))

    return write


def script(path: Path) -> None:
    with pytest.warns((FutureWarning, DeprecationWarning)):  # of torch 2.15, of 2.11
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)


LIGHTNING: State = {
    "epoch": 1, "state_dict": under("net._orig_mod.") | {"criterion.weight": LONE}, "optimizer_states": [ADAM],
    "callbacks": {"ModelCheckpoint": {"best_model_score": LONE}}, "hyper_parameters": {"lr": 0.1},
}  # fmt: skip
PLACES = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(STATE)}
SHARDS: dict[str, Write] = {
    "model.safetensors.index.json": text(json.dumps({"weight_map": PLACES})),
    PLACES["stem.weight"]: partial(save_file, {name: STATE[name] for name in list(STATE)[::2]}),
    PLACES["stem.bias"]: partial(save_file, {name: STATE[name] for name in list(STATE)[1::2]}),
}
"""As transformers' save_pretrained writes them."""

TAKEN: dict[str, tuple[Write, str]] = {
    "weights.pth": (saved(STATE), ""),
    "older.pth": (saved(STATE, older=True), ""),
    "weights.safetensors": (partial(save_file, STATE), ""),
    "ddp.tar": (saved({"state_dict": under("module."), "best": LONE}), "its state_dict, the prefix module. removed"),
    "of.ckpt": (saved(LIGHTNING), "its state_dict, the prefix net._orig_mod. removed, without criterion.weight"),
    "auxiliary.pth": (saved(STATE | under("aux.")), "without aux.stem.weight, …"),
    "encoder.pth": (saved(under("encoder.") | {"fc.bias": LONE}), "the prefix encoder. removed, without fc.bias"),
    "safetensors.pth": (partial(save_file, STATE), ""),
    "of torch.safetensors": (saved(STATE), ""),
    "sharded": (folder(SHARDS), ""),
    "one file": (folder({"last.ckpt": saved(STATE), "notes.txt": text("")}), ""),
    "checkpoint-9": (folder({"pytorch_model.bin": saved(STATE), "optimizer.pt": saved(ADAM)}), ""),
    "both forms": (folder({"model.safetensors": partial(save_file, STATE), "pytorch_model.bin": saved(ADAM)}), ""),
}
CLOSED = r"cannot be opened as weights: {} cannot be read .*\((?!.*safe_globals).+\); give what torch"
REFUSED: dict[str, tuple[Write, str]] = {
    "code.pth": (saved({"model": STATE, "x": Ran()}), CLOSED),
    "arguments.pth": (saved({"model": STATE, "args": argparse.Namespace(a=1)}), CLOSED),
    "script.pt": (script, CLOSED),
    "cut.pth": (saved(STATE, share=0.5), r"{} cannot be read .*\([\d,]+ bytes: "),
    "cut.safetensors": (cut_safetensors(0.9), r"{} cannot be read .*\([\d,]+ bytes: "),
    "cut shard": (folder(SHARDS | {PLACES["stem.bias"]: cut_safetensors(0.9)}), "00002.safetensors cannot be read"),
    "empty.pth": (text(""), r"{} cannot be read .*\(0 bytes: "),
    "optimizer.pt": (saved(ADAM), r"holds no dict of named tensors \(state, param_groups\); give what torch.save"),
    "two.pth": (saved({"model": STATE, "ema": STATE}), r"holds several dicts of named tensors \(model, ema\); save"),
    "twins.pth": (saved(under("q.") | under("k.")), r"holds the weights of this model more than once \(q\., k\.\)"),
    "blocks.pth": (
        saved({f"net.{index}.norm.{name}": LONE for index in range(3) for name in ("weight", "bias")}),
        r"of another model, with other names \(net\.0\.norm\.weight, .*\) than those of this one \(stem\.weight, ",
    ),
    "nothing": (folder({"config.json": text("{}")}), r"holds no file of weights \(config.json\)"),
    "several": (folder({"a.pt": saved(STATE), "b.pt": saved(STATE)}), r"holds several files of weights \(a.pt, b.pt\)"),
    "part": (folder(dict([*SHARDS.items()][:2])), r"lacks model-00002-of-00002.safetensors, which model"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_the_weights_of_the_model_are_taken(name: str, tmp_path: Path) -> None:
    write, words = TAKEN[name]
    write(tmp_path / name)
    weights, note = read_weights(tmp_path / name, list(STATE), "init_from")
    assert same_bits(weights, STATE)
    assert note == words


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named_and_no_code_is_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write, message = REFUSED[name]
    write(Path(name))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match=f"^init_from={name}.*{message.replace('{}', name)}"):
            read_weights(Path(name), list(STATE), f"init_from={name}")
    assert not warned
    assert not Path("it-ran").exists()


def changed(**tensors: Any) -> State:
    return STATE | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


MISFITS: dict[str, tuple[State, str]] = {
    "too few": (
        {name: STATE[name] for name in STATE if "running" not in name},
        r"2 of 9 .* \(norm.running_mean, norm.r",
    ),
    "too many": (changed(fc2__bias=LONE), r"1 tensor \(fc2.bias\) too many"),
    "grey": (changed(stem__weight=torch.ones(4, 1, 3, 3)), "stem.weight is 4 × 1 × 3 × 3, not 4 × 3 × 3 × 3"),
    "infinite": (
        changed(norm__running_var=torch.tensor([1.0, math.inf, 1, 1])),
        r"\(norm.running_var\) with NaN",
    ),
    "NaN": (changed(fc__bias=torch.tensor([0.0, math.nan]).half()), r"1 tensor \(fc.bias\) with NaN"),
    "int8": (changed(fc__weight=torch.ones(2, 4, dtype=torch.int8)), r"\(fc.weight\) of torch.int8"),
    "fp8": (changed(fc__weight=torch.ones(2, 4).to(torch.float8_e4m3fn)), r"\(fc.weight\) of torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_loaded(name: str) -> None:
    state, message = MISFITS[name]
    net = copy.deepcopy(NET)
    with pytest.raises(UserError, match=f"^here: .*{message}"):
        fill(net, state, "here")
    assert same_bits(dict(net.state_dict()), STATE)


def test_a_mask_of_infinities_that_the_model_itself_begins_with_is_no_fault() -> None:
    net = nn.Module()
    net.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    fill(net, {"mask": net.state_dict()["mask"].half()}, "here")
    with pytest.raises(UserError, match="NaN or infinities"):
        fill(net, {"mask": -net.state_dict()["mask"]}, "here")
