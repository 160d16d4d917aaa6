"""What the library's messages say to do is done, as in the programs of users, and ends well."""

from __future__ import annotations

import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mantissa
from mantissa.__main__ import main
from mantissa.errors import FormatError, NotFiniteError, UsageError

START = """
batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
"""
LOOP = f"""{START}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = None
watch = mantissa.Watch(model, optimizer, scaler, every=1, say=said.append, folder=folder)
for batch in batches:
    loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    watch.step(loss)
watch.close()
"""
EXAMINE = f"""{START}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss(model, batch):
    return model(batch).square().mean()
report = mantissa.examine(model, loss, batches, "bf16", optimizer, checks=["formats"])
"""
GATE = """
def train(precision, seed):
    return 2 + 0.01 * (seed * 7 % 5) + 1e-5 * (len(precision) * seed % 3)
mantissa.precision_gate(train, ("fp32", "bf16"), report=folder)
"""
SCALED = "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)"
HALF = "with torch.autocast('cpu', torch.float16):\n        loss = model(batch).float().square().mean()"
FORWARD = "loss = model(batch).float().square().mean()"
Edits = dict[str, str]

PROGRAMS: list[tuple[str, Edits, str, Edits]] = [
    # the arguments of examine
    (EXAMINE, {"batches, ": "batches[0], "}, "such as a DataLoader or [batch]", {"batches[0], ": "[batches[0]], "}),
    (EXAMINE, {"batches, ": "[], "}, "give at least one step's batches", {"[], ": "batches, "}),
    (EXAMINE, {".mean()": ""}, "must return a scalar tensor, the mean loss", {".square()": ".square().mean()"}),
    (EXAMINE, {".mean()": ".mean().detach()"}, "detach nothing", {".detach()": ""}),
    (EXAMINE, {".mean()": ".mean().item()"}, "must return a scalar tensor", {".item()": ""}),
    (
        EXAMINE,
        {
            "    return model(batch).square().mean()": "    found = model(batch).square().mean()\n"
            "    found.backward()\n    return found"
        },
        "let it only return the loss",
        {"    found.backward()\n": ""},
    ),
    (EXAMINE, {"return model(": "return given("}, "let it use the model that it is called with", {"given(": "model("}),
    (
        EXAMINE,
        {"optimizer =": "model.requires_grad_(False)\noptimizer ="},
        "leave requires_grad of some parameters on",
        {"False": "True"},
    ),
    (
        EXAMINE,
        {"(model.parameters()": "(nn.Linear(4, 1).parameters()"},
        "make it after the model is moved or cast",
        {"nn.Linear(4, 1).": "model."},
    ),
    *[
        (
            EXAMINE,
            {"def loss": "own = torch.Generator()\ndef loss", ".mean()": ".mean() * torch.rand((), generator=own)"},
            f"let the loss draw from {advice}",
            cure,
        )
        for advice, cure in {
            "global generators": {", generator=own": ""},
            "global generators, or from generators that are attributes of modules": {
                "own = ": "model.own = ",
                "generator=own": "generator=model.own",
            },
        }.items()
    ],
    (
        EXAMINE,
        {"def loss": "model.log = (each for each in ())\ndef loss"},
        "give a model that copy.deepcopy can copy",
        {"model.log = ": "log = "},
    ),
    # the arguments of Watch
    (
        LOOP,
        {"say=": "loss=lambda model, batch: model(batch).square().mean(), say="},
        "call watch.keep(batch) before each forward pass",
        {"    loss = model": "    watch.keep(batch)\n    loss = model"},
    ),
    (LOOP, {"Watch(model, ": "Watch(batches, "}, "model must be a module", {"Watch(batches, ": "Watch(model, "}),
    (
        LOOP,
        {"Watch(model, optimizer": "Watch(model, model"},
        "an optimizer of torch",
        {"model, model": "model, optimizer"},
    ),
    (
        LOOP,
        {"scaler, every": "'bf16', every"},
        "scaler must be the loop's GradScaler",
        {"'bf16', every": "scaler, every"},
    ),
    # what Watch finds in a loop
    *[
        (LOOP, {"optimizer =": f"model.to(torch.{dtype})\noptimizer ="} | cast, advice, cure)
        for dtype in ("bfloat16", "float16")
        for cast in [{"model(batch)": f"model(batch.to(torch.{dtype}))"}]
        for advice, cure in {
            "call model.float() before the optimizer is made": {
                "optimizer =": "model.float()\noptimizer =",
                f".to(torch.{dtype}))": ")",
            },
            f"or state precision='{'bf16' if dtype == 'bfloat16' else 'fp16'}_pure'": {
                "every=1": f"every=1, precision='{'bf16' if dtype == 'bfloat16' else 'fp16'}_pure'"
            },
        }.items()
        if dtype == "bfloat16"
    ],
    (
        LOOP,
        {"every=1": "every=1, precision='bf16_pure'"},
        "call model.to(bfloat16)",
        {"optimizer =": "model.to(torch.bfloat16)\noptimizer =", "model(batch)": "model(batch.bfloat16())"},
    ),
    (
        LOOP,
        {"optimizer.step()": "optimizer.step()\n    optimizer.step()"},
        "call it after each optimizer.step",
        {"optimizer.step()\n    optimizer.step()": "optimizer.step()\n    watch.step(loss)\n    optimizer.step()"},
    ),
    (
        LOOP,
        {"every=1": "every=1, precision='bf16'"},
        'enter torch.autocast("cpu", dtype=torch.bfloat16) around it',
        {FORWARD: f'with torch.autocast("cpu", dtype=torch.bfloat16):\n        {FORWARD}'},
    ),
    (
        LOOP,
        {
            "every=1": "every=1, precision='fp32'",
            FORWARD: f'with torch.autocast("cpu", dtype=torch.bfloat16):\n        {FORWARD}',
        },
        "leave it out",
        {'with torch.autocast("cpu", dtype=torch.bfloat16):\n        ': ""},
    ),
    (
        LOOP,
        {"    optimizer.step()": "    with torch.autocast('cpu', torch.bfloat16):\n        optimizer.step()"},
        "leave it before",
        {"    with torch.autocast('cpu', torch.bfloat16):\n    ": ""},
    ),
    (
        LOOP,
        {FORWARD: HALF},
        "use a GradScaler, and give it to Watch",
        {
            "scaler = None": SCALED,
            "loss.backward()": "scaler.scale(loss).backward()",
            "optimizer.step()": "scaler.step(optimizer)\n    scaler.update()",
        },
    ),
    (
        LOOP,
        {
            "scaler = None": SCALED,
            FORWARD: HALF.replace("float16", "bfloat16"),
            "loss.backward()": "scaler.scale(loss).backward()",
            "optimizer.step()": "scaler.step(optimizer)\n    scaler.update()",
        },
        "leave it out",
        {
            SCALED: "scaler = None",
            "scaler.scale(loss)": "loss",
            "scaler.step(optimizer)\n    scaler.update()": "optimizer.step()",
        },
    ),
    (
        LOOP,
        {"scaler = None": SCALED, FORWARD: HALF},
        "call scaler.scale(loss).backward() and scaler.step(optimizer)",
        {
            "loss.backward()": "scaler.scale(loss).backward()",
            "optimizer.step()": "scaler.step(optimizer)\n    scaler.update()",
        },
    ),
    (
        LOOP,
        {"scaler = None": SCALED, FORWARD: HALF, "loss.backward()": "scaler.scale(loss).backward()"},
        "call scaler.step(optimizer) instead of optimizer.step()",
        {"optimizer.step()": "scaler.step(optimizer)\n    scaler.update()"},
    ),
    (
        LOOP,
        {
            "scaler = None": SCALED,
            FORWARD: HALF,
            "loss.backward()": "scaler.scale(loss).backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "optimizer.step()": "scaler.step(optimizer)\n    scaler.update()",
        },
        "call scaler.unscale_(optimizer) before the clipping",
        {"    nn.utils": "    scaler.unscale_(optimizer)\n    nn.utils"},
    ),
    (
        LOOP,
        {
            "optimizer =": "model.half()\noptimizer =",
            "SGD(": "AdamW(",
            "model(batch)": "model(batch.half())",
            "every=1": "every=1, precision='fp16_pure'",
        },
        "or set eps=1e-4",
        {"lr=0.01": "lr=0.01, eps=1e-4"},
    ),
    (
        LOOP,
        {
            "optimizer =": "model.half()\noptimizer =",
            "SGD(": "AdamW(",
            "model(batch)": "model(batch.half())",
            "every=1": "every=1, precision='fp16_pure'",
        },
        "keep fp32 weights",
        {"model.half()\n": "", "batch.half()": "batch", "'fp16_pure'": "'fp32'"},
    ),
    (
        LOOP,
        {
            "scaler = None": "other = nn.Linear(4, 1)\n"
            "optimizer.add_param_group({'params': other.parameters()})\nscaler = None",
            "model(batch)": "(model(batch) + other(batch))",
        },
        "make the optimizer after the model is cast, moved, wrapped and sharded",
        {
            "other = nn.Linear(4, 1)\n": "",
            "optimizer.add_param_group({'params': other.parameters()})\n": "",
            " + other(batch)": "",
        },
    ),
    *[
        (LOOP, {"(model.parameters()": "(model[0].parameters()"}, advice, cure)
        for advice, cure in {
            "add them": {"model[0].parameters()": "model.parameters()"},
            "call requires_grad_(False)": {"scaler = None": "model[1].requires_grad_(False)\nscaler = None"},
        }.items()
    ],
    (
        LOOP,
        {
            "every=1": "every=1, precision='fp32'",
            "scaler = None": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'\nscaler = None",
        },
        "set torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
        {"scaler = None": "torch.backends.mkldnn.matmul.fp32_precision = 'ieee'\nscaler = None"},
    ),
    # the gate
    (GATE, {"return 2": "found = 2"}, "let it return the final loss", {"found = 2": "return 2"}),
]
"""A program, the mistake in it, what the message says to do, and that done."""


def edited(program: str, edits: Edits) -> str:
    for old, new in edits.items():
        assert old in program, old
        program = program.replace(old, new)
    return program


def said_by(program: str, folder: Path) -> list[str]:
    """What a program is told, by an error or by Watch."""
    said: list[str] = []
    given = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    torch.manual_seed(0)
    try:
        exec(program, {"torch": torch, "nn": nn, "mantissa": mantissa, "said": said, "given": given, "folder": folder})
    except (UsageError, FormatError, NotFiniteError) as error:
        said.append(f"DIFFERS: {error}")
    return [line for text in said for line in text.split("\n") if line.startswith("DIFFERS")]


@pytest.fixture(autouse=True)
def own_flags() -> Any:
    """What a program sets of torch is undone."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("row", range(len(PROGRAMS)))
def test_what_a_message_says_to_do_ends_well(row: int, tmp_path: Path) -> None:
    program, mistake, advice, cure = PROGRAMS[row]
    wrong = edited(program, mistake)
    assert not said_by(program, tmp_path)
    said = said_by(wrong, tmp_path)
    assert any(advice in line for line in said), said
    right = edited(wrong, cure)
    left = said_by(right, tmp_path)  # maybe what it was told beside that
    assert {*left} < {*said}, f"{said}\n{right}\n{left}"
    assert not any(advice in line for line in left)


LOOPS = "fp32, tf32, bf16, fp16, bf16_pure, bf16_sr, bf16_master, fp16_pure, fp16_master, fp8, mxfp8, nvfp4"
EXAMINED = "fp32, tf32, bf16, fp16, bf16_pure, fp16_pure"
CHECKS = "formats, manifest, gradients, range, data, modules, updates, state, divergence, islands"
# A program, the place of an argument in it, a wrong value, and the values that the message names.
VALUES: list[tuple[str, str, str, list[str]]] = [
    (LOOP, "every=1", "every=0", ["50"]),
    (LOOP, "say=", "precision='bf8', say=", [repr(name) for name in LOOPS.split(", ")]),
    (LOOP, "say=", "on_failure='stop', say=", ["'raise'", "'warn'"]),
    (EXAMINE, '"bf16"', "precision='quarter'", [repr(name) for name in EXAMINED.split(", ")]),
    (EXAMINE, '"bf16"', "precision=16", [repr(name) for name in EXAMINED.split(", ")]),
    (EXAMINE, 'checks=["formats"]', "checks=['pear']", [f"['{name}']" for name in CHECKS.split(", ")]),
    (EXAMINE, "checks=", "time_budget_s=0, checks=", ["60"]),
    (EXAMINE, "checks=", "accumulate=0, checks=", ["1"]),
    (GATE, '("fp32", "bf16")', "arms='bf16'", ["('fp32', 'bf16')"]),
    (GATE, '("fp32", "bf16")', "arms=('bf16', 'bf16')", ["('fp32', 'bf16')"]),
    (GATE, "report=", "margin=3, report=", ["0.003"]),
    (GATE, "report=", "margin=0, report=", ["0.003"]),
    (GATE, "report=", "seeds=2, report=", ["4"]),
]


@pytest.mark.parametrize(("program", "place", "wrong", "values"), VALUES)
def test_every_value_that_a_message_names_is_accepted(
    program: str, place: str, wrong: str, values: list[str], tmp_path: Path
) -> None:
    program = edited(program, {place: wrong}).replace("optimizer, checks", "optimizer=optimizer, checks")
    argument = wrong.removesuffix(f", {place}")
    said = "\n".join(said_by(program, tmp_path))
    for value in values:
        assert value.strip("[]'") in said
        right = f"{argument.partition('=')[0]}={value}"
        after = "\n".join(said_by(program.replace(argument, right), tmp_path))
        assert said not in after, f"{value}: {after}"
        assert not re.search("must be|unknown|too few", after), f"{value}: {after}"


SAME = "echo loss 2.$((10 + {seed} % 7))31"
OTHER = "echo loss 2.$((10 + {seed} % 7))32"
METRIC = "--metric loss"
SAME_OTHER = f"compare '{SAME}' '{OTHER}' {METRIC}"
COMMANDS: list[tuple[str, str, str]] = [
    (f"compare '{SAME}' {METRIC}", "give two commands or more", SAME_OTHER),
    (f"compare '{SAME}' 'echo loss 2.1' {METRIC}", "write {seed} where it takes the seed", SAME_OTHER),
    (
        f"compare '{SAME}' '{OTHER}' --metric ' '",
        "the text that is printed before the number, such as 'loss'",
        SAME_OTHER,
    ),
    (f"compare '{SAME}' '{OTHER}' --metric Loss", "lines that are close: loss 2.", SAME_OTHER),
    (f"compare '{SAME}' '{OTHER}' --metric 'loss ([0-9.]+)'", "its last lines: loss 2.", SAME_OTHER),
    (
        f"compare 'echo loss 1,{{seed}}23.5' 'echo loss 1,{{seed}}23.6' {METRIC}",
        "print digits and a decimal point",
        f"compare 'echo loss 1{{seed}}23.5' 'echo loss 1{{seed}}23.6' {METRIC}",
    ),
    (f"{SAME_OTHER} --seeds 2", "use 4 or more", f"{SAME_OTHER} --seeds 4"),
    (f"{SAME_OTHER} --margin 3", "such as 0.003", f"{SAME_OTHER} --margin 0.003"),
    *[
        (f"compare 'echo loss 2.{{seed}}' 'echo loss 2.{{seed}}' {METRIC}", advice, f"{right} --report another")
        for advice, right in {
            "print 4 decimals": f"compare 'echo loss 2.{{seed}}131' 'echo loss 2.{{seed}}132' {METRIC}",
            "or set a wider margin": f"compare 'echo loss 2.{{seed}}' 'echo loss 2.{{seed}}' {METRIC} --margin 0.1",
            "for a corrected comparison name another folder with --report": SAME_OTHER,
        }.items()
    ],
    *[
        (f"compare 'echo loss 2.5 && true {{seed}}' '{OTHER}' {METRIC}", advice, f"{SAME_OTHER} --report another")
        for advice in ("let the seed change the training", "or print more digits")
    ],
    (f"{SAME_OTHER} --report file/here", "give another folder", f"{SAME_OTHER} --report here"),
    *[
        (f"{SAME_OTHER} --report kept", advice, f"{SAME_OTHER} {right}")
        for advice, right in {
            "add --continue to go on with them": "--seeds 5 --report kept --continue",
            "or name another folder with --report": "--report another",
        }.items()
    ],
    (
        f"{SAME_OTHER} --margin 0.01 --report kept --continue",
        "name another folder with --report",
        f"{SAME_OTHER} --margin 0.01 --report another",
    ),
    (
        f"{SAME_OTHER} --seeds 4 --report kept --continue",
        "keep all seeds",
        f"{SAME_OTHER} --seeds 5 --report kept --continue",
    ),
    ("compere", "use one of doctor, compare, checkup", SAME_OTHER),
    ("doctor nowhere", "give module:function, importable from this folder", "doctor own_loop:step"),
    ("doctor own_loop:model", "must be a function that returns model, loss, batches", "doctor own_loop:step"),
    ("doctor own_loop:needs", "give a function that needs no arguments", "doctor own_loop:step"),
    ("doctor own_loop:nothing", "must be a function that returns model, loss, batches", "doctor own_loop:step"),
    ("doctor own_loop:step --report file/here", "give another folder", "doctor own_loop:step --report here"),
    *[
        (
            f"doctor own_loop:step --time-budget {wrong}",
            "write --time-budget 90s",
            "doctor own_loop:step --time-budget 90s",
        )
        for wrong in ("0s", "60", "long")
    ],
]
"""A mistake in a command of ``python -m mantissa``, what its message says to do, and that done."""
OWN_LOOP = f"""
import torch
from torch import nn
{START}
def step():
    return model, lambda model, batch: model(batch).square().mean(), batches
def needs(argument):
    return step()
def nothing():
    return model
"""


@pytest.mark.parametrize(("wrong", "advice", "right"), COMMANDS)
def test_what_a_command_says_to_do_ends_well(
    wrong: str,
    advice: str,
    right: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mantissa.commands.doctor.examine", partial(mantissa.examine, checks=["formats"]))
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    Path("own_loop.py").write_text(OWN_LOOP)
    Path("file").touch()
    if "kept" in wrong:
        main(shlex.split(f"{SAME_OTHER} --seeds 5 --report kept"))
    assert main(shlex.split(wrong)) == 2
    assert advice in capsys.readouterr().err
    assert main(shlex.split(right)) in (0, 1), capsys.readouterr().err
