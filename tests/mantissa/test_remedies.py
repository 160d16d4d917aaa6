"""What messages of examine, the gate and the commands say to do is done, as in users' programs, and ends well."""

from __future__ import annotations

import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import mantissa
from mantissa.__main__ import main
from mantissa.doctor.checks import CHECKS
from mantissa.errors import FormatError, UsageError

START = """
batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
"""
EXAMINE = f"""{START}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss(model, batch):
    return model(batch).square().mean()
report = mantissa.examine(model, loss, batches, "bf16", optimizer, checks=["formats"])
"""
GATE = """
def train(precision, seed):
    return 2 + 0.01 * (seed * 7 % 5) + 1e-5 * (seed % 3 + 1 + (precision == "bf16"))
mantissa.precision_gate(train, ("fp32", "bf16"), report=folder)
"""
Edits = dict[str, str]

PROGRAMS: list[tuple[str, Edits, str, Edits]] = [
    # the arguments of examine
    (EXAMINE, {"batches, ": "batches[0], "}, "such as a DataLoader or [batch]", {"batches[0], ": "[batches[0]], "}),
    (EXAMINE, {"batches, ": "[], "}, "give at least one step's batches", {"[], ": "batches, "}),
    (EXAMINE, {".mean()": ""}, "must return a scalar tensor, the mean loss", {".square()": ".square().mean()"}),
    (EXAMINE, {".mean()": ".mean().detach()"}, "detach nothing", {".detach()": ""}),
    (EXAMINE, {".mean()": ".mean().item()"}, "must return a scalar tensor", {".item()": ""}),
    *[
        (
            EXAMINE,
            {
                "    return model": "    found = model",
                ".mean()": f".mean()\n    found.backward()\n    return {returned}",
            },
            "calls backward itself; let it only return the loss",
            {"    found.backward()\n": "", f"return {returned}": "return found"},
        )
        for returned in ("found", "found.detach()", "found.item()")
    ],
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
    # the gate
    (GATE, {"return 2": "found = 2"}, "train must return the final loss", {"found = 2": "return 2"}),
]
"""A program, the mistake in it, what the message says to do, and that done."""


def edited(program: str, edits: Edits) -> str:
    for old, new in edits.items():
        assert old in program, old
        program = program.replace(old, new)
    return program


def said_by(program: str, folder: Path) -> str:
    """What a program is told by the error that ends it; empty: it ends well."""
    given = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    torch.manual_seed(0)
    try:
        exec(program, {"torch": torch, "nn": nn, "mantissa": mantissa, "given": given, "folder": folder})
    except (UsageError, FormatError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", range(len(PROGRAMS)))
def test_what_a_message_says_to_do_ends_well(row: int, tmp_path: Path) -> None:
    program, mistake, advice, cure = PROGRAMS[row]
    assert not said_by(program, tmp_path)
    wrong = edited(program, mistake)
    assert advice in said_by(wrong, tmp_path)
    assert not said_by(edited(wrong, cure), tmp_path)


EXAMINED = "fp32, tf32, bf16, fp16, bf16_pure, fp16_pure"
# A program, the place of an argument in it, a wrong value, and the values that the message names.
VALUES: list[tuple[str, str, str, list[str]]] = [
    (EXAMINE, '"bf16"', "precision='quarter'", [repr(name) for name in EXAMINED.split(", ")]),
    (EXAMINE, '"bf16"', "precision=16", [repr(name) for name in EXAMINED.split(", ")]),
    (EXAMINE, 'checks=["formats"]', "checks=['pear']", [f"['{name}']" for name in CHECKS]),
    (EXAMINE, "checks=", "time_budget_s=0, checks=", ["60"]),
    (EXAMINE, "checks=", "accumulate=0, checks=", ["1"]),
    *[
        (GATE, '("fp32", "bf16")', f"arms={arms}", ["('fp32', 'bf16')"])
        for arms in ("'bf16'", "('bf16',)", "('bf16', 'bf16')")
    ],
    (GATE, "report=", "margin=3, report=", ["0.003"]),
    (GATE, "report=", "margin=0, report=", ["0.003"]),
    (GATE, "report=", "seeds=2, report=", ["3"]),
]


@pytest.mark.parametrize(("program", "place", "wrong", "values"), VALUES)
def test_every_value_that_a_message_names_is_accepted(
    program: str, place: str, wrong: str, values: list[str], tmp_path: Path
) -> None:
    program = edited(program, {place: wrong}).replace("optimizer, checks", "optimizer=optimizer, checks")
    argument = wrong.removesuffix(f", {place}")
    said = said_by(program, tmp_path)
    for value in values:
        assert value.strip("[]'") in said
        right = f"{argument.partition('=')[0]}={value}"
        after = said_by(program.replace(argument, right), tmp_path)
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
    (f"{SAME_OTHER} --seeds 2", "use 3 or more", f"{SAME_OTHER} --seeds 3"),
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
    *[
        (f"doctor {wrong}", advice, "doctor own_loop:step")
        for advice, given in {
            "give module:function, importable from this folder": ("nowhere:step", "own_loop:missing", "own_loop"),
            "give a function that needs no arguments": ("own_loop:needs", "own_loop:batches"),
            "must be a function that returns model, loss, batches": ("own_loop:model", "own_loop:nothing"),
        }.items()
        for wrong in given
    ],
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
