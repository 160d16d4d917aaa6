"""Weights that other programs wrote, in the ways they write them: what is taken, or what is wrong with the file."""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers import same_bits
from trainer.checkpoint.foreign import read_weights
from trainer.errors import UserError

State = dict[str, Any]
NET = nn.Sequential(
    collections.OrderedDict(stem=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), flat=nn.Flatten(), fc=nn.Linear(4, 2))
)
STATE: State = dict(NET.state_dict())
ZEROS: State = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
"""Of other weights with the same names, which are not to be taken."""
LONE = torch.ones(2)
ADAM: State = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 1e-3}]}
ARGS = argparse.Namespace(lr=1e-3, device=torch.device("cpu"), folder=Path("photos"), scale=np.float64(0.5))


class Ran:
    """Would run a command when it is unpickled as usual."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it-ran",)


def under(prefix: str, state: State = STATE) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def averaged(prefix: str = "module.") -> State:
    return {"n_averaged": torch.tensor(7)} | under(prefix)


HYPER = {
    "_content": functools.partial(nn.Linear, 3), "when": datetime.datetime(2026, 1, 2), "array": np.ones(3),
    "defaults": collections.defaultdict(list, {1: [2]}), "class": nn.GELU, "frozen": frozenset([1]),
    "queue": collections.deque([1, 2]),
}  # fmt: skip
CALLBACKS = {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(0.5), "best_k_models": {}}}

# What torch.save is given; what is said of it.
SAVED: dict[str, tuple[Any, str]] = {
    "a state dict": (STATE, ""),
    "torchvision's train.py": ({"model": STATE, "optimizer": ADAM, "epoch": 3, "args": ARGS}, "its model"),
    "the same with --model-ema": (
        {"model": under("module.", ZEROS), "model_ema": averaged(), "optimizer": ADAM, "args": ARGS, "scaler": {}},
        "its model_ema, not model, without n_averaged",
    ),
    "timm's CheckpointSaver": (
        {"epoch": 1, "arch": "x", "state_dict": ZEROS, "state_dict_ema": STATE, "optimizer": ADAM, "args": ARGS,
         "version": 2, "metric": np.float64(71.5)},
        "its state_dict_ema, not state_dict",
    ),
    "the ImageNet example": (
        {"epoch": 1, "arch": "x", "state_dict": under("module."), "best_acc1": torch.ones(())}, "its state_dict",
    ),
    "DataParallel inside": ({name.replace(".", ".module.", 1): STATE[name] for name in STATE}, ""),
    "DDP of a compiled model": (under("module._orig_mod."), ""),
    "a compiled part": ({name.replace("stem.", "stem._orig_mod."): STATE[name] for name in STATE}, ""),
    "Lightning": (
        {"epoch": 1, "global_step": 9, "pytorch-lightning_version": "2.5.0", "state_dict": under("model."), "loops": {},
         "callbacks": CALLBACKS, "optimizer_states": [ADAM], "lr_schedulers": [], "hyper_parameters": HYPER},
        "its state_dict/model.*",
    ),
    "Lightning of a compiled model with its own loss": (
        {"state_dict": under("net._orig_mod.") | {"criterion.weight": torch.ones(2)}, "hyper_parameters": ARGS},
        "its state_dict/net.*, without criterion.weight",
    ),
    "nanoGPT's form": ({"model": under("_orig_mod."), "optimizer": ADAM, "model_args": {"n": 1}}, "its model"),
    "a tutorial": (
        {"epoch": 1, "model_state_dict": STATE, "optimizer_state_dict": ADAM, "loss": 0.5}, "its model_state_dict",
    ),
    "net, by hand": ({"net": STATE, "acc": 93.2, "epoch": 3}, "its net"),
    "weights and params": ({"weights": STATE, "note": "x"}, "its weights"),
    "BasicSR": ({"params": ZEROS, "params_ema": STATE}, "its params_ema, not params"),
    "an average of parameters alone": ({"model": STATE, "ema": {"stem.weight": ZEROS["stem.weight"]}}, "its model"),
    "torch_ema, whose average has no names": (
        {"model": STATE, "ema": {"decay": 0.9, "shadow_params": [torch.ones(2), LONE], "collected_params": None}},
        "its model, not ema/shadow_params, an average without names",
    ),
    "DINO, whose teacher is the average": (
        {"student": under("module.backbone.", ZEROS), "teacher": under("backbone."), "args": ARGS},
        "its teacher/backbone.*, not student/backbone.*",
    ),
    "Lightning's StochasticWeightAveraging, whose average has no statistics": (
        {"state_dict": under("net."),
         "callbacks": {"StochasticWeightAveraging": {"n_averaged": 0, "average_model_state": under("net.", ZEROS)}}},
        "its state_dict/net.*",
    ),
    "distillation from a larger model": (
        {"state_dict": under("teacher.", ZEROS | {"stem.gate": LONE}) | under("student.")},
        "its state_dict/student.*, not state_dict/teacher.*, without teacher.stem.weight, …",
    ),
    "MoCo": (
        {"state_dict": under("module.encoder_q.") | under("module.encoder_k.", ZEROS) | {"module.queue": LONE}},
        "its state_dict/encoder_q.*, not state_dict/encoder_k.*, without encoder_k.stem.weight, …",
    ),
    "OpenMMLab": (
        {"meta": {"cfg": "x"}, "state_dict": under("backbone.") | {"head.w": torch.ones(1)}},
        "its state_dict/backbone.*, without head.w",
    ),
    "a segmentation model": (
        under("encoder.") | {"decoder.up.weight": torch.ones(2)}, "its encoder.*, without decoder.up.weight",
    ),
    "a tuple": ((STATE, ADAM), "its 0"),
    "a whole model": (NET, ""),
    "a whole model under DataParallel": ({"model": nn.DataParallel(NET), "epoch": 3}, "its model"),
    "a whole average": ({"ema": torch.optim.swa_utils.AveragedModel(NET)}, "its ema, without n_averaged"),
    "code that is not run": ({"model": STATE, "x": Ran()}, "its model"),
}  # fmt: skip


def read(path: Path) -> tuple[dict[str, Tensor], str]:
    return read_weights(path, list(STATE), f"init_from={path.name}")


@pytest.mark.parametrize("older", [False, True], ids=["", "in the form before torch 1.6"])
@pytest.mark.parametrize("case", SAVED)
@pytest.mark.filterwarnings("ignore::torch.serialization.SourceChangeWarning", "ignore:Couldn't retrieve source")
def test_the_weights_of_the_model_are_found(
    case: str, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, said = SAVED[case]
    torch.save(content, "weights.pth", _use_new_zipfile_serialization=not older)
    weights, note = read(Path("weights.pth"))
    assert same_bits(weights, STATE)
    assert note == said
    assert not Path("it-ran").exists()


def sharded(folder: Path) -> None:
    """As save_pretrained and accelerate's save_model write them."""
    for number, part in enumerate((list(STATE)[:3], list(STATE)[3:]), 1):
        save_file({name: STATE[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    places = {name: f"model-0000{1 + (name not in list(STATE)[:3])}-of-00002.safetensors" for name in STATE}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def accelerate(folder: Path) -> None:
    """As save_state writes it."""
    save_file(STATE, folder / "model.safetensors", {"format": "pt"})
    torch.save(ADAM, folder / "optimizer.bin")
    torch.save({"step": 1}, folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(pickle.dumps({"step": 0}))


def deepspeed(folder: Path) -> None:
    """As save_checkpoint writes it, twice."""
    for step in ("global_step5", "global_step10"):
        (folder / step).mkdir()
        state = STATE if step == "global_step10" else ZEROS
        torch.save({"module": state, "global_steps": 10}, folder / step / "mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": ADAM}, folder / step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step10")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "accelerate's save_state": (accelerate, ""),
    "shards with an index": (sharded, ""),
    "the index itself": (sharded, "model.safetensors.index.json"),
    "one of the shards": (sharded, "model-00001-of-00002.safetensors"),
    "pytorch_model.bin": (lambda folder: torch.save(STATE, folder / "pytorch_model.bin"), ""),
    "Lightning's checkpoints": (lambda folder: torch.save({"state_dict": STATE}, folder / "epoch=3.ckpt"), ""),
    "DeepSpeed": (deepspeed, ""),
    "one of its checkpoints": (deepspeed, "global_step10"),
    "DeepSpeed, made one file": (
        lambda folder: (
            deepspeed(folder),
            torch.save(STATE, folder / "pytorch_model.bin"),
            (folder / "latest").write_text("gone"),
        ),
        "",
    ),
    "safetensors of another name": (lambda folder: save_file(STATE, folder / "a.bin"), "a.bin"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_and_other_forms_of_files(case: str, tmp_path: Path) -> None:
    write, name = FOLDERS[case]
    write(tmp_path)
    assert same_bits(read(tmp_path / name)[0], STATE)


def test_16_bit_weights_stay_as_they_are(tmp_path: Path) -> None:
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in STATE.items()}
    torch.save(half, tmp_path / "half.pt")
    assert same_bits(read(tmp_path / "half.pt")[0], half)


BODY = {name: STATE[name] for name in STATE if not name.startswith("fc.")}
NUMBERED = {f"{'01'[name.startswith('norm')]}.{name.partition('.')[2]}": BODY[name] for name in BODY}
"""As in nn.Sequential(*model.children())."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"state_dict": under("backbone.", NUMBERED) | {"projection.weight": LONE}},
         "its state_dict/backbone.*, in order, without projection.weight"),
        ({"model": under("0.", NUMBERED) | {"1.8.weight": LONE, "1.9.weight": LONE}, "opt": ADAM},
         "its model/*, in order, without 1.8.weight, …"),
    ],
    ids=["lightly", "fastai"],
)  # fmt: skip
def test_a_numbered_body_is_taken_in_order(content: State, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pth")
    weights, note = read(tmp_path / "weights.pth")
    assert same_bits(weights, BODY)
    assert note == said


def test_numbers_of_another_order_are_of_another_model(tmp_path: Path) -> None:
    torch.save({f"0.{name}": NUMBERED[name] for name in reversed(NUMBERED)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="the weights are of another model: none of its names"):
        read(tmp_path / "weights.pth")


def saved(content: Any, share: float = 1.0) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        torch.save(content, path)
        os.truncate(path, int(share * path.stat().st_size))

    return write


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("cat.jpg", b"a cat")


def incomplete(path: Path) -> None:
    path.mkdir()
    sharded(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def folder(*names: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).touch()

    return write


def script(path: Path) -> None:
    with pytest.warns(FutureWarning):
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)


DAMAGED = r"is no file of weights, or is damaged \([\d,]+ bytes\); copy or download it again, or write"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (saved(STATE, 0.5), DAMAGED),
    "empty": (Path.touch, DAMAGED),
    "text": (lambda path: path.write_text("no weights"), DAMAGED),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), DAMAGED),
    "a web page": (lambda path: path.write_text("\n<!DOCTYPE html>"), "is a web page; download the file itself"),
    "Git LFS": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x"), "git lfs pull"),
    "Keras": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), "is HDF5, as Keras and TensorFlow write it; give"),
    "TorchScript": (script, r"is a program of TorchScript; write .* of torch.jit.load\('given'\)"),
    "a zip of photos": (zipped, DAMAGED),
    "no tensors": (saved({"a": 1}), "holds no tensors with names"),
    "only a tensor": (saved(torch.ones(3)), "holds no tensors with names"),
    "quantised": (
        saved({"conv.bias": LONE, "conv.scale": LONE, "conv.zero_point": LONE}),
        "holds quantised weights; give those from before",
    ),
    "another model": (saved({"wte": torch.ones(2)}), r"none of its names \(wte, …\) is one of this model \(stem"),
    "an optimizer": (saved(ADAM), r"the weights are of an optimizer: none of its names \(step, exp_avg, …\)"),
    "another optimizer": (saved({"opt": {"state": {0: {"momentum_buffer": LONE}}}}), "weights are of an optimizer"),
    "TensorFlow": (folder("checkpoint", "model.ckpt-9.index"), r"holds no file of weights \(checkpoint, model.ckpt"),
    "of no newest": (folder("latest", "notes"), "holds no file of weights .latest, notes."),
    "several": (folder("epoch=1.ckpt", "last.ckpt"), r"holds several files of weights \(epoch=1.ckpt, last.ckpt\)"),
    "an empty folder": (folder(), "holds no file of weights"),
    "a missing shard": (incomplete, "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json"),
    "torch.distributed": (folder(".metadata", "__0_0.distcp"), "format_utils dcp_to_torch .*given weights.pth"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_no_weights_of_the_model_is_named(case: str, tmp_path: Path) -> None:
    write, message = REFUSED[case]
    write(tmp_path / "given")
    with pytest.raises(UserError, match=f"^init_from=given.*{message}"):
        read(tmp_path / "given")
