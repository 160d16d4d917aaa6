"""The advice of real training, on models of a few weights; what it tries for each recipe; the doctor's check-up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from evidence.advice import candidates, checkup, command, timing
from evidence.advice.candidates import Candidate, Space, in_words
from evidence.advice.timing import Times
from evidence.memory.fits import too_large
from mantissa.verdict.shell import Ended
from tests.helpers import CPU
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import RunError
from trainer.hardware import Hardware, detect

SMALL = ["recipe=bignet", "recipe.layers=2", "recipe.width=16", "batch_size=8", "data.samples=64", "device=cpu"]
FIXED = ["compile=off", "precision=fp32"]
HERE = detect("cpu")


def space_of(overrides: list[str], hardware: Hardware = HERE) -> Space:
    datasets = plan_of(compose(overrides), HERE).config.open_datasets()
    return candidates.space_of(overrides, hardware, datasets)[0]


def varied(*overrides: str) -> dict[str, list[str]]:
    choices_of = space_of([*overrides]).choices
    return {key: [in_words(override) for override in choices] for key, choices in choices_of.items()}


def test_only_options_that_a_recipe_has_are_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "evidence.advice.candidates.not_timed_here", lambda mode, *_: "slow" if mode == "fp16" else None
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert varied(*SMALL) == {
        "precision": ["bf16"],
        "compile": ["compile=default"],
        "micro_batch_size": ["micro_batch_size=4", "micro_batch_size=2", "micro_batch_size=1"],
    }


def test_formats_in_fp32_arithmetic_are_left_out_with_the_reason() -> None:
    why = "bf16 matmuls, convolutions, attention: fp32 arithmetic, this CPU has no bf16 instructions"
    space = space_of(SMALL, replace(HERE, cpu_flags=frozenset()))
    assert space.left_out["bf16"] == why


def test_bf16_is_tried_first() -> None:
    gpu = Hardware(torch.device("cuda"), "a GPU", 2**33, 2, (9, 0))
    tried = candidates._precisions(Space(), compose(SMALL), gpu, nn.Linear(2, 2))
    assert tried[0] == "bf16"
    assert len(tried) > 2


def test_what_the_user_or_the_environment_sets_is_not_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert varied(*SMALL, *FIXED, "micro_batch_size=4") == {}
    assert varied(*SMALL, "precision.mode=fp32", "compile.mode=off", "micro_batch_size=4") == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert varied(*SMALL, *FIXED, "micro_batch_size=4", "threads=1") == {}
    monkeypatch.setattr("evidence.advice.candidates.torch.get_num_threads", lambda: 8)
    space = space_of([*SMALL, *FIXED, "micro_batch_size=8"], replace(HERE, cpu_cores=8))
    assert space.choices == {"threads": ["threads=4", "threads=1"]}


def test_what_is_forecast_not_to_fit_is_refused_with_the_figures() -> None:
    datasets = plan_of(compose(SMALL), HERE).config.open_datasets()
    assert too_large([*SMALL, *FIXED], HERE, datasets, 2**40) == ""
    reason = too_large([*SMALL, *FIXED, "micro_batch_size=4"], HERE, datasets, 1000)
    assert reason.startswith("forecast to need")


def test_a_candidate_is_timed_in_a_fresh_process_and_its_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timing.time_candidate(Candidate(), 2, math.inf, [*SMALL, "recipe.width=64"], tmp_path)
    assert (0 < found.step_s < 60, found.compile_s) == (True, 0.0)
    # Weights, gradients and AdamW's two moments: four times 2 · (64² + 64) numbers of 4 bytes, and activations.
    steady = 4 * 2 * (64 * 64 + 64) * 4
    assert steady < found.memory_bytes < 2 * steady
    for ended, words in (
        (Ended(2, 1.0, "", "precision=bogus is not a choice\n"), "^precision=bogus is not a choice"),
        (Ended(None, 1.0, ""), "it did not end within 90 s"),
        (Ended(-9, 1.0, ""), "its process ended with signal SIGKILL"),
        (Ended(1, 1.0, "", "Traceback\nValueError: no\n"), "ValueError: no"),
    ):
        monkeypatch.setattr("evidence.isolated.shell.run", lambda *_, ended=ended, **__: ended)
        with pytest.raises(RunError, match=words):
            timing.time_candidate(Candidate(), 2, 90.0, SMALL, tmp_path)


def test_the_command_answers_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "check", lambda *_: {"faults": [], "missed": [], "healthy": True})
    monkeypatch.setattr(command, "time_candidate", lambda candidate, *_: Times(1.0 + len(candidate.label), 0.0, 1))
    monkeypatch.setattr(command, "cpu_share_of_others", lambda: 0.4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # no threads are varied, only the microbatch
    given = [*SMALL, *FIXED, "batch_size=2", f"output_dir={tmp_path}", "time_budget=9min"]
    assert command.main(given) == 0
    printed = capsys.readouterr().out
    assert "python scripts/train.py recipe=bignet " in printed
    assert "Note: other processes used 40% of the CPUs; measure again on a quiet machine." in printed
    folder = tmp_path / "advice" / "bignet"
    content = json.loads((folder / "advice.json").read_text())
    assert [entry["label"] for entry in content["entries"]] == ["the default", "micro_batch_size=1"]
    assert (folder / "report.html").is_file()


def test_a_setting_is_examined_by_the_doctor_with_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Config] = []

    def here(module: str, overrides: list[str], options: dict[str, object], **limit: float) -> dict[str, object]:
        trained.append(compose(overrides))
        return checkup.measure(trained[-1])

    monkeypatch.setattr(checkup, "measure_isolated", here)
    found = checkup.check([*SMALL, "micro_batch_size=4", "precision=bf16", "tracking=local"], CPU)
    assert (found["faults"], found["healthy"]) == ([], True)
    assert (trained[0].batch_size, trained[0].precision.mode) == (2, "bf16")
    overflow = [*SMALL, "precision=fp16", "recipe.loss_weight=1e9", "scaler=none", "scaler.force=true"]
    found = checkup.check(overflow, CPU)
    assert not found["healthy"]
    assert "overflow" in found["faults"][0]


def test_a_setting_is_examined_in_a_process_of_its_own_and_what_ends_that_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert checkup.check([*SMALL, "precision=bf16"], CPU) == {"faults": [], "missed": [], "healthy": True}
    monkeypatch.setattr("evidence.isolated.shell.run", lambda *_, **__: Ended(None, 1.0, ""))
    gone = {"faults": [], "missed": ["not examined: it did not end within 180 s"], "healthy": False}
    assert checkup.check([*SMALL, "precision=bf16"], CPU) == gone


def test_a_check_up_that_crashed_is_no_fault_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise TypeError("no")

    monkeypatch.setattr("mantissa.doctor.module_errors.harmful_errors", crash)
    found = checkup.measure(compose([*SMALL, "batch_size=2", "precision=bf16"]))
    assert (found["faults"], found["healthy"]) == ([], False)
    assert found["missed"] == ["crashed: modules"]
