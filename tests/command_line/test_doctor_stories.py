"""The two stories of docs/doctor.md: their commands find what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from evidence.doctor.command import main
from tests.command_line.conftest import Train
from tests.command_line.test_docs import commands
from tests.helpers import PROJECT

PAGE = PROJECT / "docs/doctor.md"


def story(named: str) -> tuple[list[str], list[str]]:
    """The arguments of the training and of the doctor for the run of this name."""
    found = commands(PAGE)
    last = next(number for number, command in enumerate(found) if f"resume=outputs/{named}" in command)
    return shlex.split(found[last - 1])[2:], shlex.split(found[last])[2:]


def printed(pattern: str) -> str:
    match = re.search(pattern, PAGE.read_text(encoding="utf-8"))
    assert match is not None
    return match[0]


def test_an_overflow_in_t5(train: Train, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, doctor = story("t5-fp16-s0")
    failed = train(*training, "tracking=local")
    assert failed.code == 3
    assert failed.err.splitlines()[-1].endswith("scripts/doctor.py resume=outputs/t5-fp16-s0")
    assert main([*doctor, "check=formats"]) == 7
    said = capsys.readouterr().out
    assert re.search(printed(r"fp64 ok .* fp16 BREAKS").replace(".", r"\."), said)
    # Which of these products is the first one depends on the last bits, so on the processor.
    assert re.search(r"FOUND overflow, forward: \S+\.DenseReluDense\.wo\n  aten\.mm float16", said)


def test_norm_weights_that_never_move(
    train: Train, succeed: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, doctor = story("llama-bf16_pure-s0")
    fewer = [word for word in training if word.partition("=")[0] not in ("steps", "diagnostics.every")]
    trained = train(*fewer, "steps=4", "diagnostics.every=2", "tracking=local")
    assert trained.code == 0
    assert "lost by rounding" in trained.err + trained.out
    assert main(doctor) == 7
    assert printed(r"FOUND lost updates, update: \S+layernorm\n") in capsys.readouterr().out
    cured = [word.replace("bf16_pure", "bf16_master") for word in fewer]
    succeed(*cured, "steps=2", "tracking=local")
    assert main([doctor[0].replace("bf16_pure", "bf16_master"), "check=updates"]) == 0
