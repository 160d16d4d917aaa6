"""500 mutations of a real checkpoint: each is refused by name, or the run resumes bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.gpt2_model import SHAPES, Shape
from tests.helpers import compose, copied, same_bits
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.generators import random_state
from trainer.checkpoint.reader import CheckpointReader
from trainer.data.contract import Batch
from trainer.errors import UserError
from trainer.run.run import Run
from trainer.run.start import train

STEP = 6
NAME = f"step-{STEP:08d}"
TENSORS = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
JSONS = ("manifest.json", "state.json")
COUNT = 250  # for each of two runs
RUNS = {
    "fp16, adamw": ["precision=fp16", "scaler.interval=3", "optimizer=adamw"],
    "bf16_master, sgd": ["precision=bf16_master", "optimizer=sgd", "optimizer.lr=0.01"],
}

Draw = random.Random
Mutation = Callable[[Draw, Path], None]


class Held(Run):
    """A run that is set up and not begun."""

    def train(self) -> dict[str, Any]:
        return {"run": self}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of six steps whose last checkpoint is ``good/step-00000006``, and another, of step 3, beside it."""
    folder = tmp_path_factory.mktemp("fuzz")
    patch = pytest.MonkeyPatch()
    patch.setitem(SHAPES, "tiny", Shape(1, 2, 16, 8))
    common = [
        "recipe=gpt2", "recipe.size=tiny", "recipe.context=8", "recipe.dropout=0.1", "data=synthetic",
        "data.vocab_size=40", "batch_size=2", "micro_batch_size=1", "eval_every=3", "eval_samples=2", "log_every=4",
        "deterministic=true", "tracking=local", "device=cpu", "checkpoint.keep=9", f"output_dir={folder}",
        "run_name=run", *RUNS[request.param],
    ]  # fmt: skip
    train(compose(*common, f"steps={STEP}"))
    held: Run = train(compose(*common, f"steps={STEP + 4}", "resume=auto"), run_class=Held)["run"]
    assert held.trainer.step == STEP
    yield held
    assert held.tracker
    held.tracker.close("KILLED", {})
    patch.undo()
    torch.use_deterministic_algorithms(False)


def rehash(folder: Path, *names: str) -> None:
    """Put the hashes of changed files into the manifest, as whoever changes them on purpose would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in names:
        manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / name).read_text())
    changed = change(content)
    (folder / name).write_text(json.dumps(content if changed is None else changed))
    if name != "manifest.json":
        rehash(folder, name)


def edit_tensors(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None], step: int = STEP) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / name, {"step": str(step)})
    rehash(folder, name)


# ---- what can happen to files


def truncate(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice([*TENSORS, *JSONS])
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    if draw.random() < 0.5 and path.name != "manifest.json":
        rehash(folder, path.name)


def flip_a_bit(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice([*TENSORS, *JSONS])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def flip_a_bit_of_the_header(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice(TENSORS)
    content = bytearray(path.read_bytes())
    content[draw.randrange(8)] ^= 1 << draw.randrange(8)  # its length
    path.write_bytes(content)
    rehash(folder, path.name)


def remove(draw: Draw, folder: Path) -> None:
    name = draw.choice([*TENSORS, *JSONS])
    (folder / name).unlink()
    if draw.random() < 0.5 and name != "manifest.json":
        edit(folder, "manifest.json", lambda manifest: manifest["sha256"].__delitem__(name))


def lengthen(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice([*TENSORS, *JSONS])
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))
    if path.name != "manifest.json":
        rehash(folder, path.name)


def exchange(draw: Draw, folder: Path) -> None:
    one, other = draw.sample(TENSORS, 2)
    (folder / one).rename(folder / "x")
    (folder / other).rename(folder / one)
    (folder / "x").rename(folder / other)
    rehash(folder, one, other)


def take_from_another_step(draw: Draw, folder: Path) -> None:
    name = draw.choice([*TENSORS, "state.json"])
    shutil.copy(folder.parents[1] / "other" / name, folder / name)
    rehash(folder, name)


def link(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice([*TENSORS, *JSONS])
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def put_a_pipe(draw: Draw, folder: Path) -> None:
    path = folder / draw.choice([*TENSORS, *JSONS[1:]])
    path.unlink()
    os.mkfifo(path) if draw.random() < 0.5 else path.mkdir()


def add_a_file(draw: Draw, folder: Path) -> None:
    name = draw.choice([
        "notes.txt", ".DS_Store", "model.pt", "model-00001-of-00002.safetensors", "state.json.bak",
        "optimizer-00002-of-00002.safetensors", "rng-00002-of-00002.safetensors", "model-2.safetensors",
    ])  # fmt: skip
    content = (folder / "model.safetensors").read_bytes() if "safetensors" in name else pickle.dumps(draw.random())
    (folder / name).write_bytes(content)
    if draw.random() < 0.5:
        rehash(folder, name)


def name_a_file_elsewhere(draw: Draw, folder: Path) -> None:
    name = draw.choice(["../run.json", "/etc/passwd", "a/b", "", ".", "..", "model.safetensors\0", "é" * 300])
    edit(folder, "manifest.json", lambda manifest: manifest["sha256"].update({name: "0" * 64}))


def add_a_folder(draw: Draw, folder: Path) -> None:
    """Beside the checkpoint: none of it is ours."""
    name = draw.choice(
        ["step-original", "step-00000099x", "step-٠٠٠٠٠٠٩٩", "step-1", "backup", ".step-00000099.partial"]
    )
    shutil.copytree(folder, folder.parent / name)


# ---- what can be planted, with the right hashes


def nest(draw: Draw, folder: Path) -> None:
    name, depth = draw.choice(JSONS), draw.choice([40, 1000, 100_000])
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
    deep = opening * depth + ("0" if opening != "[" else "") + closing * depth * draw.randrange(2)
    text = (folder / name).read_text()
    (folder / name).write_text(deep if draw.random() < 0.5 else text.replace('"step": 6', f'"step": {deep}', 1))
    if name != "manifest.json":
        rehash(folder, name)


def repeat_a_key(draw: Draw, folder: Path) -> None:
    name = draw.choice(JSONS)
    text = (folder / name).read_text()
    key = draw.choice(['"step"', '"format"'] if name == "manifest.json" else ['"step"', '"groups"', '"loss_scale"'])
    assert key in text
    (folder / name).write_text(text.replace(key, f"{key}: {draw.choice(['6', '7', 'null'])}, {key}", 1))
    if name != "manifest.json":
        rehash(folder, name)


BAD: list[Any] = [
    None,
    True,
    "6",
    "",
    [],
    {},
    [6],
    {"a": 1},
    -1,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    10**30,
    10**400,
]


def plant_a_value(draw: Draw, folder: Path) -> None:
    """Somewhere in the JSON files something of the wrong type, or out of range."""
    name, path, good = draw.choice([
        ("manifest.json", ["format"], []),
        ("manifest.json", ["step"], []),
        ("manifest.json", ["score"], [None, -1, 0.5, 1e308]),  # any number may have been the score
        ("manifest.json", ["sha256"], []),
        ("manifest.json", ["sha256", draw.choice(TENSORS)], []),
        ("state.json", ["step"], []),
        ("state.json", ["ties"], []),
        ("state.json", ["optimizer"], []),
        ("state.json", ["optimizer", "names"], []),
        ("state.json", ["optimizer", "groups"], []),
        ("state.json", ["optimizer", "groups", 0], [{}]),  # options are the config's
        ("state.json", ["optimizer", "scalars"], [{}]),
        ("state.json", ["progress"], []),
        ("state.json", ["progress", "best", "step"], []),
        ("state.json", ["progress", "best"], []),
        ("state.json", ["progress", "final"], [{}]),
        ("state.json", ["progress", "final", "valid/loss"], [-1, 0.5, 1e308, float("nan"), float("inf")]),
        ("state.json", ["progress", "loss_scale"], []),
        ("state.json", ["progress", "loss_scale", "scale"], [0.5]),
        ("state.json", ["progress", "monitor"], []),
        ("state.json", ["progress", "monitor", "skipped_steps"], []),
        ("state.json", ["progress", "monitor", "skipped_in_a_row"], []),
        ("state.json", ["progress", "monitor", "losses"], [[], [6]]),
        ("state.json", ["progress", "monitor", "last"], [{}]),
        ("state.json", ["progress", "data"], []),
    ])  # fmt: skip
    bad = draw.choice(
        [value for value in BAD if not any(same_bits(value, one) and type(value) is type(one) for one in good)]
    )

    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = bad

    edit(folder, name, change)


def add_or_drop_a_key(draw: Draw, folder: Path) -> None:
    name = draw.choice(JSONS)
    within = draw.choice([[], ["sha256"]] if name == "manifest.json" else [
        [], ["optimizer"], ["progress"], ["progress", "best"], ["progress", "loss_scale"], ["progress", "monitor"],
        ["progress", "monitor", "last"],
    ])  # fmt: skip

    def change(content: Any) -> None:
        for key in within:
            content = content[key]
        if draw.random() < 0.5 or within == ["progress", "monitor", "last"]:
            content["planted"] = draw.choice([1, None, [], {"a": 1}])
        else:
            del content[draw.choice(sorted(content.keys() - {"stateless"}))]

    edit(folder, name, change)


def plant_options(draw: Draw, folder: Path) -> None:
    def change(state: Any) -> None:
        group = draw.choice(state["optimizer"]["groups"])
        kind = "betas" in group
        planted = draw.choice([
            {"maximize": True}, {"betas": [1.5, 0.9]} if kind else {"momentum": 1.5}, {"weight_decay": 5.0},
            {"eps": 1.0} if kind else {"dampening": 0.5}, {"amsgrad": True} if kind else {"nesterov": True},
            {"capturable": True} if kind else {"momentum": "0.9"}, {"lr": float("nan")}, {"lr": -1.0}, {"lr": "1"},
            {"fused": "yes"}, {"foreach": 1}, {"differentiable": True}, {"params": [0]}, {"unknown": 1},
            {"weight_decay": None}, {"maximize": 0} if kind else {"maximize": 1},
        ])  # fmt: skip
        group |= planted

    edit(folder, "state.json", change)


def change_the_groups(draw: Draw, folder: Path) -> None:
    def change(state: Any) -> None:
        optimizer = state["optimizer"]
        which = draw.randrange(4)
        if which == 0:
            draw.shuffle(optimizer["names"])
        elif which == 1:
            del optimizer["groups"][0]
        elif which == 2:
            optimizer["names"].append("planted")
        else:
            optimizer["scalars"] = {draw.choice(optimizer["names"]): {"step": 3}}

    edit(folder, "state.json", change)


def change_the_ties(draw: Draw, folder: Path) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    one, other = draw.sample(names, 2)
    drop = draw.random() < 0.5
    edit(folder, "state.json", lambda state: state["ties"].update({one: other}))
    if drop:
        edit_tensors(folder, "model.safetensors", lambda tensors: tensors.__delitem__(one))


def pretend_another_step(draw: Draw, folder: Path) -> None:
    step = draw.choice([0, 5, 7, 10, 99_999_999])
    for name in JSONS[::-1]:
        edit(folder, name, lambda content: content.update(step=step))
    if draw.random() < 0.5:
        folder.rename(folder.with_name(f"step-{step:08d}"))


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool)


def swap_a_type(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(sorted(tensors))
        tensors[key] = tensors[key].to(draw.choice([dtype for dtype in DTYPES if dtype != tensors[key].dtype]))

    edit_tensors(folder, draw.choice(TENSORS), change)


def reshape(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(sorted(key for key in tensors if key != "python_gauss"))
        tensor = tensors[key]
        ways = [tensor.unsqueeze(0), torch.cat([tensor.flatten(), tensor.flatten()]), tensor.flatten()[:0]]
        tensors[key] = draw.choice(ways)

    edit_tensors(folder, draw.choice(TENSORS), change)


def lose_a_tensor(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[draw.choice(sorted(tensors))]

    edit_tensors(folder, draw.choice(TENSORS), change)


def lose_all_tensors(draw: Draw, folder: Path) -> None:
    edit_tensors(folder, draw.choice(TENSORS), lambda tensors: tensors.clear())


def add_a_tensor(draw: Draw, folder: Path) -> None:
    name = draw.choice(["planted", "planted.weight", "planted.exp_avg", "transformer.wte.weight.planted", ".", ""])
    edit_tensors(folder, draw.choice(TENSORS), lambda tensors: tensors.update({name: torch.zeros(3)}))


def plant_nan(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        key = draw.choice(
            sorted(key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
        )
        tensors[key].view(-1)[draw.randrange(tensors[key].numel())] = float("nan")

    edit_tensors(folder, draw.choice(TENSORS), change)


def change_the_counts(draw: Draw, folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            if key.endswith(".step"):
                tensors[key] = torch.tensor(wrong)
            elif key.endswith("momentum_buffer"):
                tensors[key].fill_(float("nan"))

    wrong = draw.choice([0.0, 5.0, 7.0, 2.5, -6.0, 1e9, float("inf"), float("nan")])
    edit_tensors(folder, "optimizer.safetensors", change)


def change_the_generators(draw: Draw, folder: Path) -> None:
    key, index, value = draw.choice([
        ("torch", slice(8, 16), 255), ("torch", slice(None), 255), ("numpy", 0, -1),
        ("numpy", 5, 2**32), ("numpy_rest", 0, 1e9), ("numpy_rest", 0, -1.0), ("numpy_rest", 0, 0.5),
        ("numpy_rest", 1, 7.0), ("numpy_rest", 2, float("inf")), ("python", 0, -1), ("python", 3, 2**40),
        ("python", 624, 625), ("python", 624, 2**31),
    ])  # fmt: skip

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[key][index] = value

    edit_tensors(folder, "rng.safetensors", change)


def change_the_format(draw: Draw, folder: Path) -> None:
    edit(folder, "manifest.json", lambda manifest: manifest.update(format=draw.choice([0, 1, 3, 99, -2, 10**40, "2"])))


def change_nothing(draw: Draw, folder: Path) -> None:
    """Written again by hand, with other white space and hashes: it means the same."""
    for name in JSONS[::-1]:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content, indent=draw.randrange(5)))
        if name == "state.json":
            rehash(folder, name)


MUTATIONS: list[Mutation] = [
    truncate, flip_a_bit, flip_a_bit_of_the_header, remove, lengthen, exchange, take_from_another_step, link,
    put_a_pipe, add_a_file, name_a_file_elsewhere, add_a_folder, nest, repeat_a_key, plant_a_value, plant_a_value,
    plant_a_value, add_or_drop_a_key, plant_options, plant_options, change_the_groups, change_the_ties,
    pretend_another_step, swap_a_type, reshape, lose_a_tensor, lose_all_tensors, add_a_tensor, plant_nan,
    change_the_counts, change_the_generators, change_the_format, change_nothing,
]  # fmt: skip


def test_every_mutation_is_refused_by_name_or_resumes_bit_for_bit(run: Run, tmp_path: Path) -> None:
    trainer, folder = run.trainer, run.folder.checkpoints
    shutil.copytree(folder / "step-00000003", tmp_path / "other")
    batches: list[list[Batch]] = []
    stream = trainer.batches()
    batches += [next(stream), next(stream)]

    def go_on() -> Any:
        for batch in batches:
            trainer.train_step(batch)
        state = dict(trainer.model.state_dict()), trainer.optimizer.state_dict(), trainer.loss_scale.state_dict()
        return copied(
            (*state, random_state(trainer.device), run.monitor.state_dict(), run.scores.best, run.scores.final)
        )

    def resume(checkpoints: Path) -> Any:
        # What stays of the mutation before would hide what is not restored.
        for parameter in trainer.model.parameters():
            parameter.data.fill_(7.0)
        trainer.optimizer.state.clear()
        trainer.step, run.scores.best, run.scores.final = 0, None, {}
        torch.manual_seed(13)
        run._restore(CheckpointReader(checkpoint.find_verified(checkpoints)))
        return go_on()

    expected = resume(folder)
    assert same_bits(resume(folder), expected)
    refused, resumed, wrong = 0, 0, []
    for number in range(COUNT):
        draw = random.Random(number)
        mutation = MUTATIONS[number % len(MUTATIONS)]
        place = tmp_path / "checkpoints"
        shutil.copytree(folder / NAME, place / NAME)
        mutation(draw, place / NAME)
        try:
            same = same_bits(resume(place), expected)
            resumed += 1
            if not same or mutation not in (add_a_folder, change_nothing):
                wrong.append(f"{number}, {mutation.__name__}: resumed, {'the same' if same else 'as another run'}")
        except UserError as error:
            refused += 1
            if not any(str(path) in str(error) for path in (place, run.folder.path)) or len(str(error)) > 1000:
                wrong.append(f"{number}, {mutation.__name__}: {error}")
        except BaseException as error:
            wrong.append(f"{number}, {mutation.__name__}: {error!r}")
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
    assert refused > 0.9 * COUNT
    assert resumed >= 10
