from __future__ import annotations

import json
import logging
import re
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mantissa.step.ledger import MemoryLedger
from trainer.profiling.profiler import MemoryProfiler, Profiler, ProfilerSession, TorchProfiler

CPU = torch.device("cpu")


def run(profiler: Profiler, folder: Path, steps: int, fail_at: int | None = None) -> ProfilerSession:
    """Train a small model under ``profiler``; steps are counted from 100, as after a resume."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    session = profiler.start(folder, CPU, partial(MemoryLedger, model, optimizer), steps)
    with suppress(InterruptedError):
        for count in range(1, steps + 1):
            with session.step(99 + count) or nullcontext():
                if count == fail_at:
                    raise InterruptedError
                model(torch.randn(16, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return session


def names_in_trace(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("profile/*"))


def test_none_writes_nothing(tmp_path: Path) -> None:
    session = run(Profiler(), tmp_path, 3)
    session.finish()
    assert (session.ledger, session.summary) == (None, None)
    assert list(tmp_path.iterdir()) == []
    assert session.step(1) is None


def test_torch_profiles_exactly_the_active_steps_before_the_run_ends(tmp_path: Path) -> None:
    session = run(TorchProfiler(wait=1, warmup=1, active=2), tmp_path, 6)
    assert written(tmp_path) == ["operators.txt", "trace.json"]
    names = names_in_trace(tmp_path / "profile/trace.json")
    assert names.count("aten::addmm") == 2 * 2  # two linear layers a step
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert "AddmmBackward0" in " ".join(names)
    assert "aten::addmm" in (tmp_path / "profile/operators.txt").read_text()
    assert re.match(r"profiled steps: 2; operator time on cpu: \w+ \d+%", session.summary)
    assert session.ledger is None


def test_kernels_that_no_operator_launched_have_their_share(tmp_path: Path) -> None:
    def row(key: str, device: str, time: float, note: bool = False) -> SimpleNamespace:
        kind = getattr(torch.autograd.DeviceType, device)
        return SimpleNamespace(key=key, device_type=kind, self_device_time_total=time, is_user_annotation=note)

    class Rows(list[SimpleNamespace]):
        def table(self, **_: object) -> str:
            return ""

    rows = Rows(
        [
            row("ProfilerStep*", "CUDA", 100, note=True),  # the time around everything
            row("aten::mm", "CPU", 30),
            row("sm90_gemm", "CUDA", 30),
            row("CompiledFunction", "CPU", 70),
            row("triton_poi_fused_add_0", "CUDA", 50),
            row("triton_red_fused_norm_1", "CUDA", 20),
        ]
    )
    profile = SimpleNamespace(export_chrome_trace=lambda path: None, key_averages=lambda: rows)
    session = TorchProfiler(active=2).start(tmp_path, torch.device("cuda"), MemoryLedger, 9)
    session._kept = 2
    session._write(profile)
    assert session.summary == "profiled steps: 2; operator time on cuda: compiled and other kernels 70%, mm 30%"


def test_no_kernel_of_another_step_lands_in_a_traced_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of a GPU: what it launched before is waited for, and what a step launched before it ends."""
    events: list[str] = []
    profile = SimpleNamespace(**{name: partial(events.append, name) for name in ("start", "step", "stop")})
    monkeypatch.setattr("trainer.profiling.profiler.new_profile", lambda *_, **__: profile)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append("wait"))
    session = TorchProfiler(wait=1, warmup=1, active=1).start(tmp_path, torch.device("cuda"), MemoryLedger, 4)
    for step in range(4):
        with session.step(step) or nullcontext():
            events.append(f"kernels {step}")
    traced = ["wait", "start", "kernels 1", "wait", "step", "kernels 2", "wait", "step", "stop"]
    assert events == ["kernels 0", *traced, "kernels 3"]


@pytest.mark.parametrize(
    ("profiler", "steps", "told", "files"),
    [
        (TorchProfiler(wait=1, warmup=1, active=5), 4, "this run made 4: 2 of 5 steps are in the profile", 2),
        (TorchProfiler(wait=1, warmup=1, active=5), 2, "needs 7 steps (wait, warmup and active together)", 0),
    ],
)
def test_a_run_that_was_too_short_is_told_what_is_missing(
    profiler: Profiler, steps: int, told: str, files: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = run(profiler, tmp_path, steps)
    with caplog.at_level(logging.WARNING, "mantissa"):
        session.finish()
    assert told in caplog.text
    assert len(written(tmp_path)) == files
    if files:
        assert names_in_trace(tmp_path / "profile/trace.json").count("Optimizer.step#AdamW.step") == 2


@pytest.mark.parametrize("fail_at", [2, 4])
def test_torch_profiler_can_be_finished_after_a_failed_step(fail_at: int, tmp_path: Path) -> None:
    session = run(TorchProfiler(wait=0, warmup=2, active=3), tmp_path, 5, fail_at)
    session.finish()
    assert bool(written(tmp_path)) == (fail_at > 3)
    run(TorchProfiler(wait=0, warmup=1, active=1), tmp_path / "again", 2).finish()  # the next profile is not disturbed
    assert written(tmp_path / "again")


@pytest.mark.parametrize(("at_step", "steps"), [(2, 4), (3, 2)])
def test_memory_writes_the_ledger_of_the_chosen_step_or_the_last(at_step: int, steps: int, tmp_path: Path) -> None:
    session = run(MemoryProfiler(at_step), tmp_path, steps)
    assert written(tmp_path) == ["ledger.json", "ledger.txt"]
    weights = 4 * (32 * 64 + 64 + 64 * 8 + 8)
    record = json.loads((tmp_path / "profile/ledger.json").read_text())
    assert session.ledger is not None
    assert record == {"step": 101} | asdict(session.ledger)
    assert record["highest"]["weights"] == weights
    assert (tmp_path / "profile/ledger.txt").read_text() == session.ledger.text()
