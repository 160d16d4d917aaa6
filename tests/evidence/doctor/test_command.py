"""The command: runs that failed and runs that did not, and what a user can get wrong."""

from __future__ import annotations

import itertools
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evidence.doctor.command import main
from evidence.doctor.replay import _go_to
from evidence.doctor.step import Overrides
from evidence.runs import merge_overrides
from mantissa.doctor import budget
from mantissa.doctor.checks import COMPILES, HALF_WEIGHTS, TABLE
from recipes.bignet import BigNet
from tests.helpers import compose
from trainer.config.compose import compose as compose_typed
from trainer.data.contract import Batch
from trainer.errors import NonFiniteError, UserError
from trainer.files import read_object, write_json
from trainer.optim.optimizer import Optimizer
from trainer.precision.modes import Precision
from trainer.recipe import LossOutput
from trainer.run.start import train

BIGNET = (
    *("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "steps=4", "profiler=none", "device=cpu"),
    *("tracking=local", "schedule=constant", "optimizer=sgd", "log_every=1"),
)
STATIC = ("precision=fp16", "scaler=static", "scaler.scale=1024", "scaler.max_consecutive_skips=1")
"""The second overflow in a row ends the run."""


Said = Callable[..., tuple[int, list[str]]]


def failed(folder: Path, *overrides: str) -> Path:
    with pytest.raises(NonFiniteError):
        train(compose(*BIGNET, *overrides, f"output_dir={folder}", "run_name=it"))
    return folder / "it"


@pytest.fixture(scope="module")
def overflows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gradients overflow in fp16 at steps 2 and 3; its only checkpoint is that of its failure."""
    return failed(tmp_path_factory.mktemp("overflows"), *STATIC, "optimizer.lr=10", "checkpoint=none")


@pytest.fixture(scope="module")
def finishes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finishes")
    train(compose(*BIGNET, "precision=bf16", "steps=2", f"output_dir={folder}", "run_name=it"))
    return folder / "it"


@pytest.fixture
def failing(overflows: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(overflows, tmp_path / "it"))


@pytest.fixture
def finished(finishes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finishes, tmp_path / "it"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Returns the exit code, and the lines."""

    def of(*arguments: object) -> tuple[int, list[str]]:
        capsys.readouterr()  # of the training before
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out.splitlines()

    return of


def test_a_failed_step_is_reproduced_and_its_cause_found(failing: Path, said: Said) -> None:
    before = {file: file.read_bytes() for file in failing.rglob("*") if file.is_file()}
    code, lines = said(failing, "check=formats,manifest,islands")
    assert code == 7
    assert lines[0].startswith("step 3 reproduced (loss ")
    assert lines[0].endswith(", skipped) from step-00000002")
    assert "fp32 ok" in lines[1]
    assert "fp16+scaler 1024 BREAKS" in lines[1]
    assert any(line.startswith("FOUND overflow, ") for line in lines)
    assert lines[-1] == f"report {failing}/doctor/step-3-formats-manifest-islands/report.html"
    assert read_object(failing / "doctor" / "step-3-formats-manifest-islands" / "verdict.json")["verdict"] == "FOUND"
    assert {file: file.read_bytes() for file in before} == before  # nothing of the run is changed


def test_a_scaler_that_skips_too_often_fails_at_its_scale(tmp_path: Path, said: Said) -> None:
    """At a lower one, to which it would go on, the step is finite."""
    scaler = ("precision=fp16", "scaler=dynamic", "scaler.init=1073741824", "scaler.max_consecutive_skips=1")
    typed = [*merge_overrides(BIGNET, scaler, ["checkpoint=none"]), f"output_dir={tmp_path}"]
    with pytest.raises(NonFiniteError):
        train(compose_typed(typed))
    code, lines = said(tmp_path / "bignet-fp16-s0", "check=formats,range,islands")
    assert lines[0].startswith("step 2 reproduced")
    assert (code, "fp16+scaler 536870912 ok at " in lines[1]) == (7, True), lines
    assert any(line.startswith("FOUND overflow, backward") for line in lines), lines
    # The whole command of a new run with the cure is printed, and trains.
    words = shlex.split(lines[lines.index("train with the cure:") + 1])[2:]
    assert {*typed} - {*words} <= {"scaler.init=1073741824"}
    train(compose_typed(words))


def test_without_a_checkpoint_it_is_replayed_from_the_beginning(failing: Path, said: Said) -> None:
    shutil.rmtree(failing / "failure")
    code, lines = said(f"resume={failing}", "check=formats")
    assert code == 7
    assert lines[0] == "replaying 2 steps from the beginning …"
    assert lines[1].startswith("step 3 reproduced")
    assert lines[1].endswith("from the beginning")


def test_a_run_that_finished_is_healthy_at_its_last_step(finished: Path, said: Said) -> None:
    code, lines = said(f"resume={finished}", "check=formats,manifest,range,modules,updates")
    assert code == 0
    assert lines[0].startswith("one more step (3) after the last, taken from step-00000002 (loss ")
    assert "HEALTHY at the last step, 2" in lines
    code, lines = said(f"resume={finished}", "check=formats", "step=1")
    assert code == 0
    assert lines[0].startswith("step 1 taken from the beginning")
    assert "HEALTHY at step 1" in lines


def test_a_failure_that_does_not_come_again_and_with_other_software(finished: Path, said: Said) -> None:
    summary = read_object(finished / "summary.json")
    other = {"failure": {"step": 2, "loss_scale": 1.0}, "versions": summary["versions"] | {"torch": "2.1.0"}}
    write_json(finished / "summary.json", summary | other)
    code, lines = said(f"resume={finished}", "check=formats")
    assert code == 8
    assert lines[1].startswith("step 2 replayed and finite")
    assert "NOT REPRODUCED" in lines
    assert any(line.startswith("note: ") and line.endswith("train with deterministic=true") for line in lines)
    assert any(line.startswith("note: torch: 2.1.0 in the run, ") for line in lines)


def test_what_there_is_no_time_for_is_named(finished: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    clock = itertools.count()
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))  # a second a look
    code, lines = said(f"resume={finished}", "time_budget=1s")
    assert code == 3
    assert "INCOMPLETE at the last step, 2: no fault in what was examined" in lines
    assert lines[1] == "fp64 left out · fp32 ok · bf16 ok"
    left_out = [line.removeprefix("left out: ") for line in lines if line.startswith("left out: ")]
    of_bf16 = [check.part or check.name for check in TABLE if not check.needs & {COMPILES, HALF_WEIGHTS}]
    assert [each.partition(" (")[0] for each in left_out] == ["fp64", *of_bf16]
    assert left_out[0] == "fp64 (no time left; set more than time_budget=1s)"


def test_what_takes_too_long_says_how_much_time_to_give() -> None:
    remedies = Overrides(Optimizer(), Precision(), None)
    step: Any = SimpleNamespace(free_bytes=lambda: 1, remedies=remedies, device=torch.device("cpu"))
    parts = budget.Budget(60, step)
    parts.run("divergence", lambda: parts.expect(seconds=80))
    assert parts.left_out == ["divergence (it takes about 80 s; set time_budget=140s)"]


def test_a_check_up_before_a_run_writes_no_run(tmp_path: Path, said: Said) -> None:
    code, lines = said(*BIGNET, "precision=bf16", f"output_dir={tmp_path}", "check=formats,manifest", "step=2")
    assert code == 0
    assert lines[0] == "replaying 1 step from the beginning …"
    assert "HEALTHY at step 2" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["doctor"]
    assert lines[-1] == f"report {tmp_path}/doctor/bignet-bf16-step-2-formats-manifest/report.html"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("resume=RUN chekc=formats", "; set check=formats"),
        ("resume=RUN step=9", "step=9: RUN ends earlier; set step=2"),
        ("resume=FAILED step=4", "step=4: FAILED stopped at step 3; set step=3, or leave it out"),
        ("resume=RUN precision=fp32", "precision=fp32: a run is examined as it was trained; to examine another one"),
    ],
)
def test_mistakes(arguments: str, message: str, finishes: Path, overflows: Path) -> None:
    arguments, message = (
        text.replace("RUN", str(finishes)).replace("FAILED", str(overflows)) for text in (arguments, message)
    )
    with pytest.raises(UserError) as raised:
        main(arguments.split())
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_step_that_raises_while_it_is_replayed_is_the_one_that_is_examined() -> None:
    def raising(microbatches: list[Any]) -> None:
        raise RuntimeError("dtypes do not match")

    trainer: Any = SimpleNamespace(step=0, batches=lambda: iter([[]] * 5), train_step=raising)
    assert _go_to(trainer, 4, None) == ("the beginning", 1)


def test_a_format_that_raises_is_found_at_the_step_that_raises(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(self: BigNet, model: nn.Module, batch: Batch) -> LossOutput:
        masked = model(batch["x"]).masked_fill(batch["y"] > 99, -1e9)  # a number that fp16 does not have
        return LossOutput((masked.float() - batch["y"]).square().sum(), {})

    monkeypatch.setattr(BigNet, "loss", loss)
    given = (*BIGNET, "precision=fp16", f"output_dir={tmp_path}", "check=formats,islands", "step=3")
    code, lines = said(*given)
    assert code == 7
    assert any(line.startswith("FOUND exception, forward: ") for line in lines), lines
    assert any("masked_fill" in line and "test_command.py" in line for line in lines), lines
    assert any(line.startswith("  cure: ") for line in lines), lines
    assert any(line.startswith("note: step 1 already raises") for line in lines), lines
