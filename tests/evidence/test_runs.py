"""Runs of train.py: their command lines, and the numbers that are read from what they leave."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.runs import Arm, Runner, _last_error, code_digest, cpu_share_of_others, gpu_shares_of_others
from mantissa.verdict.runs import Run
from mantissa.verdict.shell import Ended

BF16 = Arm("bf16", ("precision=bf16",))
SUMMARY = {
    "status": "FINISHED",
    "final": {"valid/loss": 2.0},
    "best": {"value": 1.5, "step": 10},
    "unit": "samples",
    "units_per_s": 1234.5,
    "step_time_s": 0.1,
    "peak_memory_bytes": 4_000,
    "skipped_steps": 2,
    "hardware": {"device": "cpu"},
    "not_timed": None,
    "best_metric": "valid/loss",
}
VALUES = {
    "speed": 1234.5,
    "step_s": 0.1,
    "memory": 4_000,
    "minutes": 0.5,
    "skipped": 2,
    "loss": 2.0,
    "best_loss": 1.5,
    "others_cpu": 0.25,
}


def test_a_run_is_train_py_with_overrides_in_a_fresh_process(tmp_path: Path) -> None:
    """Nothing is added to what is trained: the same script, and every difference is on its command line."""
    runner = Runner(tmp_path / "it's", ["steps=20", "precision=fp32", "checkpoint=none"])
    command = runner.command(Arm("bf16-2", ("precision=bf16",), 1000), 3)
    assert command[1] == str(Path(__file__).parents[2] / "scripts" / "train.py")
    assert command[2:] == [
        *("steps=20", "precision=bf16", "checkpoint=none", "seed=1003", "run_name=bf16-2-s3"),
        f"output_dir='{tmp_path}/it\\'s/runs'",
    ]


def read(
    folder: Path,
    patch: pytest.MonkeyPatch,
    code: int = 0,
    losses: tuple[float | None, ...] = (3.0, 2.0),
    **summary: Any,
) -> Run:
    """Return a run of a process that leaves these losses, and changes in its summary."""

    def launch(command: list[str], log: Path, stop_s: float) -> Ended:
        run = log.with_suffix("")
        run.mkdir(parents=True)
        lines = [{"step": 10 * step, "time": 0.0, "valid/loss": loss} for step, loss in enumerate(losses, 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "summary.json").write_text(json.dumps(SUMMARY | summary))
        return Ended(code, 30.0, "error: the disk is full\n" if code else "")

    patch.setattr("evidence.runs.shell.run", launch)
    patch.setattr("evidence.runs.cpu_share_of_others", lambda: 0.25)
    patch.setattr("evidence.runs.gpu_shares_of_others", lambda: {"cuda:0": 0.5})
    return Runner(folder).run(BF16, 0)


@pytest.mark.parametrize(
    ("summary", "changed", "left_out"),
    [
        ({}, {}, ()),
        ({"units_per_s": None, "peak_memory_bytes": None}, {}, ("speed", "memory")),  # never 0
        ({"hardware": {"device": "cuda:0"}}, {"others_gpu": 0.5}, ("others_cpu",)),  # of a GPU the CPUs say little
        ({"hardware": {"device": "cuda:1"}}, {}, ("others_cpu",)),
        ({"final": {"valid/loss": None}, "best": None}, {"loss": None, "best_loss": None}, ()),  # not finite
        ({"final": {"valid/top1": 0.9}}, {}, ("loss",)),
        ({"best_metric": "valid/top1"}, {"best_loss": 2.0}, ()),  # the best checkpoint is that of another metric
    ],
)
def test_the_numbers_of_a_run_are_those_of_its_files(
    summary: dict[str, Any],
    changed: dict[str, float | None],
    left_out: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = read(tmp_path, monkeypatch, **summary)
    expected = {name: value for name, value in (VALUES | changed).items() if name not in left_out}
    assert (run.values, run.failure, run.seconds) == (expected, "", 30.0)
    assert run.curve == ([10, 20], [3.0, 2.0])


@pytest.mark.parametrize(
    ("losses", "curve"), [((3.0, None, 2.0), ([10, 30], [3.0, 2.0])), ((3.0, 2.0, None), ([], []))]
)
def test_what_is_kept_of_losses_that_are_not_finite_is_json(
    losses: tuple[float | None, ...],
    curve: tuple[list[int], list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run that ends in one there is no curve, which would end at another loss than the run."""
    run = read(tmp_path, monkeypatch, losses=losses, final={"valid/loss": losses[-1]})
    assert run.curve == curve
    json.dumps(asdict(run), allow_nan=False)


@pytest.mark.parametrize("why", ["bf16 matmuls: fp32 arithmetic", "emulated: quality only, no speed"])
def test_a_run_says_in_which_arithmetic_it_was_computed(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read(tmp_path, monkeypatch, not_timed=why)
    assert (run.arithmetic, run.emulated) == (why, why.startswith("emulated"))
    assert run.shown == "loss 2.0000  1,234 samples/s"


@pytest.mark.parametrize(
    ("code", "diverged", "deterministic"), [(1, False, False), (2, False, True), (3, True, False), (4, False, True)]
)
def test_a_run_that_failed_has_no_numbers_and_one_that_diverged_has_a_loss_that_is_not_finite(
    code: int, diverged: bool, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read(tmp_path, monkeypatch, code, status="FAILED")
    assert (run.failure, run.shown) == ("the disk is full", f"failed with exit code {code}: the disk is full")
    assert (run.ended, run.deterministic) == (diverged, deterministic)
    assert run.values == ({"loss": None, "best_loss": None} if diverged else {})


def test_a_run_that_was_interrupted_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        read(tmp_path, monkeypatch, 130)


def test_an_edit_of_what_runs_are_made_of_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.runs.PROJECT", tmp_path)
    own = tmp_path / "own"
    files = [tmp_path / folder / "a.py" for folder in ("mantissa", "trainer", "recipes", "scripts")]
    files += [tmp_path / "conf" / "b.yaml", own / "mine.py", own / "conf" / "c.yaml"]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    seen = {code_digest(str(own))}
    for path in files:
        path.write_text("edited")
        seen.add(code_digest(str(own)))
    assert len(seen) == 1 + len(files)
    (tmp_path / "README.md").write_text("edited")
    assert code_digest(str(own)) in seen


def test_the_load_of_others_is_that_of_the_cpus_that_runs_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.runs.psutil.cpu_percent", lambda *_, **__: [90.0, 10.0, 30.0])
    monkeypatch.setattr("evidence.runs.os.sched_getaffinity", lambda _: {1, 2})
    assert cpu_share_of_others() == pytest.approx(0.2)


def test_the_load_of_others_on_gpus_is_read_where_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "utilization", [0, 75].__getitem__)
    assert gpu_shares_of_others() == {"cuda:0": 0.0, "cuda:1": 0.75}
    monkeypatch.setattr(torch.cuda, "utilization", [0].__getitem__)  # raises
    assert gpu_shares_of_others() == {}


def test_an_error_is_found_behind_what_was_still_buffered() -> None:
    assert _last_error(Ended(1, 1.0, "step 1  loss 2\nstep 2  loerror: the gradients are not finite\nss 3\n")) == (
        "the gradients are not finite"
    )
    assert _last_error(Ended(1, 1.0, "one\n\ntwo\nthree\nfour\n")) == "two / three / four"
