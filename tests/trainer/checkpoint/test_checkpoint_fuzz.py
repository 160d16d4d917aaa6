"""Mutations of a real checkpoint: each is refused in one sentence that names its folder, or it loads the same bits.

Nothing in a checkpoint runs code, hangs, or ends in a traceback. What has a valid hash is trusted, but for its names,
shapes and types.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers import copied, same_bits
from trainer import files
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import Snapshot
from trainer.determinism import random_state
from trainer.errors import UserError
from trainer.optim.state import training_state
from trainer.parallel.world import World

NAME = "step-00000006"
LEARNT = ("model.safetensors", "optimizer.safetensors")
TENSORS = (*LEARNT, "rng.safetensors")
JSONS = ("manifest.json", "state.json")
HASHED = (*TENSORS, "state.json")
ALL = (*TENSORS, *JSONS)

Draw = random.Random
Mutation = Callable[[Draw, Path], None]
MUTATIONS: list[Mutation] = []


def mutation(function: Mutation) -> Mutation:
    MUTATIONS.append(function)
    return function


def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the checkpoints of steps 3 and 6, and what the last one holds."""
    folder = tmp_path_factory.mktemp("saved")
    model, optimizer = job(0)
    for step in range(1, 7):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            state = training_state(step, model, optimizer, None, {"scale": 1.0}, random_state(torch.device("cpu")))
            checkpoint.write(folder, Snapshot.of(state, {"losses": [step]}, World()), 0.5, World(), files.flush)
    return folder, copied((dict(model.state_dict()), optimizer.state_dict()))


def rehash(folder: Path, *names: str) -> None:
    """Put the hashes of changed files into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in names:
        manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    if name != "manifest.json":
        rehash(folder, name)


def edit_tensors(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / name)
    rehash(folder, name)


# ---- accidents: the hashes stay those of the run


@mutation
def truncate(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(ALL)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size - 1)])  # the last byte is a new line


@mutation
def flip_a_bit(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(HASHED)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@mutation
def remove(draw: Draw, folder: Path) -> None:
    name = draw.choice(HASHED)
    (folder / name).unlink()
    if draw.random() < 0.5:
        edit(folder, "manifest.json", lambda manifest: manifest["sha256"].__delitem__(name))


@mutation
def link(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(ALL)
    target = draw.choice([folder.parent / "elsewhere", Path("/dev/zero")])
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(target)


@mutation
def put_a_pipe(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(ALL)
    path.unlink()
    os.mkfifo(path)


@mutation
def make_it_huge(draw: Draw, folder: Path) -> None:
    """As many bytes as fill the memory of a reader that takes the whole file; none of them on the disk."""
    name = draw.choice(JSONS)
    os.truncate(folder / name, 2**36 if name == "manifest.json" else 2**26 + 1)
    if name != "manifest.json":
        rehash(folder, name)


@mutation
def add_a_file(draw: Draw, folder: Path) -> None:
    name = draw.choice(["notes.txt", "model.pt", "model-00001-of-00002.safetensors", "state.json.bak"])
    (folder / name).write_bytes(pickle.dumps(draw.random()))
    if draw.random() < 0.5:
        rehash(folder, name)


@mutation
def name_a_file_elsewhere(draw: Draw, folder: Path) -> None:
    name = draw.choice(["../run.json", "/etc/passwd", "a/b", "", ".", "..", "model.safetensors\0", "é" * 300])
    edit(folder, "manifest.json", lambda manifest: manifest["sha256"].update({name: "0" * 64}))


@mutation
def nest(draw: Draw, folder: Path) -> None:
    name, depth = draw.choice(JSONS), draw.choice([10_000, 100_000])
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
    (folder / name).write_text(opening * depth + "0" + closing * depth * draw.randrange(2))
    if name != "manifest.json":
        rehash(folder, name)


@mutation
def repeat_a_key(draw: Draw, folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    key = draw.choice(['"step"', '"format"'])
    (folder / "manifest.json").write_text(text.replace(key, f"{key}: {draw.choice(['6', '7', 'null'])}, {key}", 1))


@mutation
def change_the_manifest(draw: Draw, folder: Path) -> None:
    """No hash protects it."""
    key = draw.choice(["format", "step", "score", "sha256"])
    value = draw.choice([True, "6", "", [], {}, [6], {"a": 1}, float("nan"), 10**30])
    good = key == "score" and isinstance(value, int | float)

    def change(manifest: dict[str, Any]) -> None:
        if good or draw.random() < 0.2:
            del manifest[key]
        else:
            manifest[key] = value

    edit(folder, "manifest.json", change)


@mutation
def rename(draw: Draw, folder: Path) -> None:
    folder.rename(folder.with_name(f"step-{draw.choice([0, 5, 7, 99_999_999]):08d}"))


# ---- with valid hashes: another model, another optimizer, another version


@mutation
def plant_a_pickle(draw: Draw, folder: Path) -> None:
    name = draw.choice(TENSORS)
    (folder / name).write_bytes(pickle.dumps(Bomb(folder.parents[1] / "it ran")))
    rehash(folder, name)


@mutation
def spoil_the_header(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(TENSORS)
    content = bytearray(path.read_bytes())
    content[draw.randrange(8)] ^= 1 << draw.randrange(8)  # its length
    path.write_bytes(content)
    rehash(folder, path.name)


@mutation
def change_the_keys(draw: Draw, folder: Path) -> None:
    def change(state: Any) -> None:
        within = draw.choice([state, state["optimizer"]])
        if within is not state and draw.random() < 0.5:
            within["planted"] = 1
        else:
            del within[draw.choice(sorted(within))]

    edit(folder, "state.json", change)


@mutation
def change_the_groups(draw: Draw, folder: Path) -> None:
    def change(state: Any) -> None:
        optimizer = state["optimizer"]
        ways = [optimizer["names"].reverse, optimizer["groups"].clear, lambda: optimizer["names"].append("planted")]
        draw.choice(ways)()

    edit(folder, "state.json", change)


@mutation
def change_the_ties(draw: Draw, folder: Path) -> None:
    edit(folder, "state.json", lambda state: state["ties"].update({"0.bias": "1.bias"}))


@mutation
def swap_a_type(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(sorted(tensors))
        others = {torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8} - {tensors[key].dtype}
        tensors[key] = tensors[key].to(draw.choice(sorted(others, key=str)))

    edit_tensors(folder, draw.choice(LEARNT), change)


@mutation
def reshape(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(sorted(tensors))
        tensor = tensors[key]
        tensors[key] = draw.choice([tensor.unsqueeze(0), tensor.flatten().repeat(2), tensor.flatten()[:0]])

    edit_tensors(folder, draw.choice(LEARNT), change)


@mutation
def lose_tensors(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in sorted(tensors)[draw.randrange(len(tensors)) :]:
            del tensors[key]

    edit_tensors(folder, draw.choice(LEARNT), change)


@mutation
def add_a_tensor(draw: Draw, folder: Path) -> None:
    name = draw.choice(["planted", "0.planted", "0.weight.planted", ".", ""])
    edit_tensors(folder, draw.choice(LEARNT), lambda tensors: tensors.update({name: torch.zeros(3)}))


# ---- what changes nothing


@mutation
def plant_an_option(draw: Draw, folder: Path) -> None:
    """The options are the config's, which has to be the same."""
    planted = draw.choice([{"maximize": True}, {"betas": [0.5, 0.9]}, {"weight_decay": 5.0}, {"eps": None}])
    edit(folder, "state.json", lambda state: state["optimizer"]["groups"][0].update(planted))


@mutation
def change_nothing(draw: Draw, folder: Path) -> None:
    """Written again by hand, with other white space and hashes: it means the same."""
    for name in JSONS[::-1]:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content, indent=draw.randrange(5)))
        if name == "state.json":
            rehash(folder, name)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_a_mutation_is_refused_or_changes_nothing(mutation: Mutation, saved: tuple[Path, Any], tmp_path: Path) -> None:
    source, expected = saved
    place = tmp_path / "checkpoints"
    for number in range(12):
        shutil.copytree(source / NAME, place / NAME)
        mutation(random.Random(number), place / NAME)
        model, optimizer = job(1)
        before = copied(dict(model.state_dict()))
        if mutation in (plant_an_option, change_nothing):
            load(place).restore(model, optimizer)
            assert same_bits((dict(model.state_dict()), optimizer.state_dict()), expected)
        else:
            with pytest.raises(UserError) as refused:
                load(place).restore(model, optimizer)
            assert str(place) in str(refused.value)
            assert len(str(refused.value)) < 1000
            assert same_bits(dict(model.state_dict()), before)
        shutil.rmtree(place)
    assert not (tmp_path / "it ran").exists()
