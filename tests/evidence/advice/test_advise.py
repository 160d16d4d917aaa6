"""The advice of real training, on models of a few weights; and what it tries for each recipe."""

from __future__ import annotations

import html
import json
import os
import re
import signal
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from evidence.advice import command
from evidence.advice.candidates import Candidate, space_of
from evidence.advice.schema import Advice, read
from evidence.advice.worker import Failed, Worker
from evidence.memory.fits import too_large
from tests.evidence.advice.made import advice
from trainer.config.compose import compose
from trainer.hardware import detect

SMALL = ["recipe=bignet", "recipe.layers=2", "recipe.width=16", "batch_size=8", "data.samples=64", "device=cpu"]
FIXED = ["compile=off", "precision=fp32", "optimizer.fused=auto"]


def varied(*overrides: str, goal: str = "speed") -> dict[str, list[str]]:
    space, _ = space_of(overrides, detect("cpu"), goal)
    return {key: [space.in_words(each) for each in choices] for key, choices in space.choices.items()}


def test_only_options_that_a_recipe_has_are_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.advice.candidates.slowdown", lambda mode, hardware: 9.0 if "fp16" in mode else 0.3)
    monkeypatch.setattr("evidence.advice.candidates.not_timed_here", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert varied(*SMALL) == {
        "precision": ["bf16"],
        "compile": ["compile=default"],
        "micro_batch_size": ["micro_batch_size=4", "micro_batch_size=2", "micro_batch_size=1"],
        "optimizer.fused": ["optimizer.fused=false"],
    }


def test_slow_formats_are_left_out_with_the_measured_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.advice.candidates.slowdown", lambda mode, hardware: 4.9)
    plain, native = (replace(detect("cpu"), cpu_flags=frozenset(flags)) for flags in ((), ("amx_bf16",)))
    for hardware, why in (
        (native, "bf16 matmuls are 4.9× slower than fp32 here"),
        (plain, "bf16 matmuls: fp32 arithmetic, this CPU has no bf16 instructions"),
    ):
        space, _ = space_of(SMALL, hardware)
        assert space.left_out["bf16"] == why
    space, _ = space_of(SMALL, plain, "memory")  # which is the format's; the time beside it is not
    assert space.candidate(["precision=bf16"]).label == "bf16 (fp32 arithmetic)"


def test_what_the_user_or_the_environment_sets_is_not_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert varied(*SMALL, *FIXED, "micro_batch_size=4") == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert varied(*SMALL, *FIXED, "micro_batch_size=4", "threads=1") == {}
    hardware = replace(detect("cpu"), cpu_cores=8)
    monkeypatch.setattr("evidence.advice.candidates.torch.get_num_threads", lambda: 8)
    space, _ = space_of([*SMALL, *FIXED, "micro_batch_size=8"], hardware)
    assert space.choices == {"threads": ["threads=4", "threads=1"]}
    assert space.candidate(["threads=1"]).label == "fp32, 1 thread"


def test_memory_adds_checkpointing() -> None:
    key = "activation_checkpointing"
    assert varied(*SMALL, goal="memory")[key] == [f"{key}=blocks", f"{key}=selective"]


def test_what_is_forecast_not_to_fit_is_refused_with_the_figures() -> None:
    hardware = detect("cpu")
    datasets = compose(SMALL).resolve(hardware).config.open_datasets()
    assert too_large([*SMALL, *FIXED], hardware, datasets, 2**40) == ""
    reason = too_large([*SMALL, *FIXED, "micro_batch_size=4"], hardware, datasets, 1000)
    assert reason.startswith("forecast to need")


def test_a_worker_takes_steps_counts_bytes_and_its_end_is_noticed(tmp_path: Path) -> None:
    with closing(Worker(Candidate("fp32"), [*SMALL, "recipe.width=64"], tmp_path, True)) as worker:
        _, warm_up_s, _ = worker.start(300)
        assert len(warm_up_s) >= 2
        assert 0 < worker.block(3, 60) < 60
        # Weights, gradients and AdamW's two moments: four times 2 · (64² + 64) numbers of 4 bytes, and activations.
        steady = 4 * 2 * (64 * 64 + 64) * 4
        assert steady < worker.memory(60) < 2 * steady
        os.kill(worker._process.pid, signal.SIGSTOP)
        with pytest.raises(Failed, match="its block did not end within 0 s"):
            worker.block(1, 0.05)
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="signal SIGKILL"):
            worker.block(1, 60)
    broken = Worker(Candidate("bad", ("precision=bogus",)), SMALL, tmp_path)
    with closing(broken), pytest.raises(Failed, match="precision=bogus is not a choice"):
        broken.start(300)


def test_the_command_answers_writes_and_repeats_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evidence.advice.command.check", lambda *_: {"faults": [], "missed": [], "healthy": True})
    monkeypatch.setattr(command, "BLOCKS", 10**6)  # as short as they can be
    monkeypatch.setattr("evidence.advice.search.PAIRS", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # no threads are varied, only the microbatch
    given = [*SMALL, *FIXED, "batch_size=2", f"output_dir={tmp_path}", "tracking=local", "budget_minutes=3"]
    assert command.main(given) == 0
    assert "  python scripts/train.py recipe=bignet " in capsys.readouterr().out
    (path,) = tmp_path.glob("advice/bignet-*/advice.json")
    content = json.loads(path.read_text())
    labels = [entry["candidate"]["label"] for entry in content["entries"]]
    assert content["winner"] == labels[0]
    assert set(labels) >= {"fp32", "fp32, micro_batch_size=1"}
    assert json.dumps(asdict(read(path))) == json.dumps(content)
    assert command.main(given) == 0
    again = capsys.readouterr().out
    assert "Nothing has changed since the last measurement" in again
    assert "  python scripts/train.py recipe=bignet " in again
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize("winner", ["bf16 + compile", "fp32"])
def test_the_page_has_the_commands_that_are_printed(
    winner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = advice(winner=winner)

    def found(of: Advice, *_: object) -> None:
        of.entries, of.winner, of.baseline, of.stopped = made.entries, made.winner, made.baseline, made.stopped

    monkeypatch.setattr(command, "_search", found)
    assert command.main([*SMALL, f"output_dir={tmp_path}", "tracking=local"]) == 0
    (path,) = tmp_path.glob("advice/bignet-*/report.html")
    printed = capsys.readouterr().out
    commands = re.findall(r"\n(?:  |Does it train as well\? )(python scripts/\S+ .*)\n", printed)
    assert [command.split()[1] for command in commands] == ["scripts/train.py", "scripts/compare.py"][: len(commands)]
    assert len(commands) == 1 + (winner != "fp32")
    assert re.findall("<pre>(.*)</pre>", html.unescape(path.read_text()))[1:] == commands


def test_another_answer_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = compose(SMALL), detect("cpu")
    known = command._key(config, SMALL, "speed", cpu)
    assert command._key(config, [*SMALL[::-1], "tracking=local"], "speed", cpu) == known, "which change no time"
    (tmp_path / "trainer").mkdir()
    changed = {
        command._key(config, SMALL, "memory", cpu),
        command._key(config, [*SMALL, "precision=fp32"], "speed", cpu),
        command._key(compose([*SMALL, "data.samples=65"]), SMALL, "speed", cpu),
        command._key(replace(config, seed=9), SMALL, "speed", cpu),
        command._key(config, SMALL, "speed", replace(cpu, cpu_cores=99)),
    }
    monkeypatch.setattr(command, "PROJECT", tmp_path)
    for text in ("1", "2"):
        (tmp_path / "trainer" / "code.py").write_text(text)
        changed.add(command._key(config, SMALL, "speed", cpu))
    assert len(changed - {known}) == 7
