"""Mutations of a real checkpoint: each is refused in one sentence that names its folder, or it loads the same bits.

Nothing in a checkpoint runs code. What has a valid hash is trusted, but for its names, shapes and types.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import copied, same_bits
from tests.trainer.checkpoint.test_checkpoint import CPU, OPTIMIZERS, Net, save, steps
from trainer.checkpoint.reader import load
from trainer.checkpoint.schema import WEIGHTS_SINCE, damage, write_manifest
from trainer.errors import UserError
from trainer.files import read_json, sha256

NAME = "step-00000006"
LEARNT = ("model.safetensors", "optimizer.safetensors")
TENSORS = (*LEARNT, "rng.safetensors")
ALL = (*TENSORS, "state.json", "manifest.json")

Draw = random.Random


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a checkpoint, and what it holds."""
    folder, net = tmp_path_factory.mktemp("saved"), Net(0)
    optimizer = OPTIMIZERS["adamw"].build(net, CPU)
    steps(net, optimizer, 6)
    save(folder, 6, net, optimizer, {"losses": [6]}, 0.5)
    return folder, copied((dict(net.state_dict()), optimizer.state_dict()))


def write(folder: Path, name: str, content: bytes | str) -> None:
    """Write a file, and its hash into the manifest."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    manifest = read_json(folder / "manifest.json")
    manifest["sha256"][name] = sha256(folder / name)
    write_manifest(folder, manifest)


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    if name == "manifest.json":
        write_manifest(folder, content)
    else:
        write(folder, name, json.dumps(content))


def edit_tensors(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / name)
    write(folder, name, (folder / name).read_bytes())


# ---- accidents: the hashes stay those of the run


def truncate(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(ALL)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size - 1)])  # the last byte is a new line


def flip_a_bit(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(ALL)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def name_a_file_elsewhere(draw: Draw, folder: Path) -> None:
    name = draw.choice(["../run.json", "/etc/passwd", "a/b", "", ".", "..", "é" * 300])
    edit(folder, "manifest.json", lambda manifest: manifest["sha256"].update({name: "0" * 64}))


def rename(draw: Draw, folder: Path) -> None:
    folder.rename(folder.with_name(f"step-{draw.choice([0, 5, 7, 99_999_999]):08d}"))


# ---- with valid hashes: another model, another optimizer, another version


def change_the_state(draw: Draw, folder: Path) -> None:
    changes: list[Callable[[Any], object]] = [
        lambda state: state["optimizer"]["names"].reverse(),
        lambda state: state["optimizer"]["names"].append("planted"),
        lambda state: state["optimizer"]["groups"].clear(),
        lambda state: state["ties"].update({"conv.bias": "norm.bias"}),
    ]
    edit(folder, "state.json", draw.choice(changes))


def change_a_tensor(draw: Draw, folder: Path) -> None:
    """Its type, its shape, or its name."""

    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(sorted(tensors))
        tensor = tensors.pop(key)
        kind = draw.choice(sorted({torch.float64, torch.bfloat16, torch.int32} - {tensor.dtype}, key=str))
        others = [tensor.to(kind), tensor.unsqueeze(0), tensor.flatten().repeat(2), tensor.flatten()[:0]]
        tensors |= draw.choice([{}, {f"{key}.planted": tensor}, *({key: other} for other in others)])

    edit_tensors(folder, draw.choice(LEARNT), change)


# ---- what changes nothing


def plant_an_option(draw: Draw, folder: Path) -> None:
    """The options are the config's, which has to be the same."""
    planted = draw.choice([{"maximize": True}, {"betas": [0.5, 0.9]}, {"weight_decay": 5.0}, {"eps": None}])
    edit(folder, "state.json", lambda state: state["optimizer"]["groups"][0].update(planted))


HARMLESS = (plant_an_option,)
REFUSED = (*(truncate, flip_a_bit, name_a_file_elsewhere, rename, change_the_state, change_a_tensor),)


@pytest.mark.parametrize("mutation", [*REFUSED, *HARMLESS], ids=lambda each: each.__name__)
def test_a_mutation_is_refused_or_changes_nothing(
    mutation: Callable[[Draw, Path], None], saved: tuple[Path, Any], tmp_path: Path
) -> None:
    source, expected = saved
    place = tmp_path / "checkpoints"
    for number in range(8):
        shutil.copytree(source / NAME, place / NAME)
        mutation(random.Random(number), place / NAME)
        model = Net(1)
        optimizer, before = OPTIMIZERS["adamw"].build(model, CPU), copied(dict(model.state_dict()))
        if mutation in HARMLESS:
            load(place).restore(model, optimizer)
            assert same_bits((dict(model.state_dict()), optimizer.state_dict()), expected)
        else:
            with pytest.raises(UserError) as refused:
                load(place).restore(model, optimizer)
            assert str(place) in str(refused.value)
            assert len(str(refused.value)) < 1000
            assert same_bits(dict(model.state_dict()), before)
        shutil.rmtree(place)


def test_no_bit_of_a_manifest_flips_unseen(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / NAME
    shutil.copytree(saved[0] / NAME, folder)
    write_manifest(folder, read_json(folder / "manifest.json") | {"scores": {"best": 0.5}, "totals": {"steps": 6}})
    whole = (folder / "manifest.json").read_bytes()
    assert damage(folder, 6, WEIGHTS_SINCE) is None
    for bit in range(0, 8 * len(whole), 29):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / "manifest.json").write_bytes(flipped)
        assert damage(folder, 6, WEIGHTS_SINCE), bit


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.mark), "w")


def test_a_pickle_with_a_valid_hash_is_not_executed(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / NAME
    shutil.copytree(saved[0] / NAME, folder)
    for name in TENSORS:
        write(folder, name, pickle.dumps(Bomb(tmp_path / "it ran")))
    with pytest.raises(SafetensorError):
        load(folder.parent).rng(0)
    assert not (tmp_path / "it ran").exists()
