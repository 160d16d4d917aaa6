"""What the bench's numbers mean: who takes turns, which ratio is taken, what is left out, and what is printed."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import bench, loops, overhead, peers, ratios, rows
from benchmarks import nanogpt as nanogpt_module
from benchmarks.jobs import BIGNET, MAX_NORM, TINY_MLP, BareLoop, Job, gpt2_job, resnet_job, shakespeare
from benchmarks.nanogpt import AGAIN, BLOCKS, DEFAULT, PLAIN, PlainLoop, PlainShape, _plain, nanogpt_steps
from benchmarks.rows import Bench, Row
from tests import forks
from trainer.config.compose import compose
from trainer.config.options import run
from trainer.config.settle import plan_of
from trainer.data.loader import OnDeviceLoader
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.hardware import Hardware, detect
from trainer.parallel.compile import Compile
from trainer.trainer import Trainer

CPU = detect("cpu")
SMALL = Job(
    "small",
    ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=64", "batch_size=4", "tracking=local"),
    steps=2,
    rounds=3,
)
TINY = replace(TINY_MLP, overrides=(*TINY_MLP.overrides, "tracking=local"), steps=2, rounds=2)
WHY = "fp16 products take 95 times as long as fp32's here"


def test_the_jobs_are_commands_that_resolve() -> None:
    for hardware in (CPU, Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))):
        for job in (gpt2_job(hardware), resnet_job(hardware), BIGNET, TINY_MLP):
            plan = plan_of(job.config("precision=bf16", "clip=norm"), hardware)
            assert plan.batching.accumulation == 1, "one microbatch, as the bare loop has it"


def test_rows_are_printed_and_kept_as_they_come_also_beside_a_measurement_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def broken(given: Bench) -> Iterator[Row]:
        yield Row("known before", "ms", [1.0, 3.0, 2.0], "a command")
        yield Row("not measured here", "ms", [], "why")
        seen.append(capsys.readouterr().out)
        raise ValueError("no such operator")

    def whole(given: Bench) -> Iterator[Row]:
        yield Row("of the others", "ms", [1.0], "a command")

    monkeypatch.setattr(bench, "MEASUREMENTS", {"broken": broken, "whole": whole})
    kept: dict[str, str] = {}
    monkeypatch.setattr(
        bench.results, "keep", lambda _, command, found: kept.update(dict.fromkeys(found, command)) or "kept"
    )
    assert run(bench.main, None, ["device=cpu"]) == 1
    assert "known before" in seen[0]
    output = capsys.readouterr().out
    assert "of the others" in output
    assert output.endswith("failed: broken: ValueError: no such operator\n")
    assert run(bench.main, None, ["device=cpu", "only=whole", "repeats=1"]) == 0  # a trial
    assert kept == dict.fromkeys(("known before", "of the others"), "python benchmarks/bench.py device=cpu")
    assert run(bench.main, None, ["only=hole"]) == 2


def test_the_first_repeat_is_not_kept_and_a_speedup_is_the_slower_over_the_faster() -> None:
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([7.0, 3.0, 5.0])}

    times = rows.interleave({"a": lambda: next(seconds["a"]), "b": lambda: next(seconds["b"])}, repeats=2)
    assert times == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert rows.ratios(times, "b", "a") == [3.0, 2.5]


def test_a_format_in_fp32_arithmetic_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"fp32": 4.0, "fp16": 1.0}
    monkeypatch.setattr(rows, "not_timed_here", lambda mode, _: WHY if mode in ("fp16", "bf16") else None)
    monkeypatch.setattr(ratios, "_training_block", lambda bench, job, precision: lambda: seconds[precision])
    none, asked = (Bench(CPU, 1, tmp_path, modes=frozenset(modes)) for modes in ((), ("fp16",)))
    assert {row.measured.partition(";")[0] for row in ratios.precision(none, (SMALL, SMALL))} == {f"left out: {WHY}"}
    found = {row.name: row.values for row in ratios.precision(asked, (SMALL, SMALL)) if row.values}
    assert found == {"small, throughput, fp16 / fp32": [4.0]}
    assert none.mode == "fp32"


def test_the_largest_batches_are_kept_beside_their_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(overrides: list[str], budget_bytes: int) -> SimpleNamespace:
        assert budget_bytes == 2**30
        return SimpleNamespace(micro_batch_size={"fp32": 4, "bf16": 8}[compose(overrides).precision.mode])

    monkeypatch.setattr(ratios, "largest_micro_batch", largest)
    found = {
        row.name.removeprefix("resnet50, largest batch in 1 GiB, "): row
        for row in ratios.max_batch(Bench(CPU, 5, tmp_path))
    }
    assert {name: (row.values, row.unit) for name, row in found.items()} == {
        "fp32": ([4], "images"),
        "bf16": ([8], "images"),
        "bf16 / fp32": ([2], "x"),
    }
    assert "4 images" in str(found["fp32"])


def test_a_run_pauses_while_the_bare_loop_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(loop: BareLoop, steps: int) -> None:
        now[0] += 10.0 * steps

    monkeypatch.setattr(BareLoop, "run", run)
    times = overhead.alternate(Bench(CPU, 2, tmp_path), SMALL, ("log_every=10",), clock=lambda: now[0])
    assert times == {"trainer": [0.0, 0.0], "bare": [60.0, 60.0]}
    assert len((tmp_path / "small" / "metrics.jsonl").read_text().splitlines()) == 4  # 1, 10, 19, evaluation


# --- other frameworks ---

GPT2 = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64")


def test_the_programs_of_a_job_have_samples_for_every_step() -> None:
    for hardware in (CPU, Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))):
        bench = Bench(hardware, 1, Path())
        for job in peers.peers_jobs(bench):
            plan = plan_of(job.config(*peers._options(bench, job, "bf16")), hardware)
            assert plan.batching.accumulation == 1
            assert not isinstance(plan.config.loader, OnDeviceLoader), "it takes one batch again and again"


@pytest.mark.parametrize(
    "overrides",
    [
        (*GPT2, "batch_size=4"),
        ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "batch_size=4"),
    ],
)
def test_the_bare_program_trains_what_the_trainer_trains(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The first loss of the plain model, from the file that the frameworks are given, is the recipe's."""
    options = ("precision=fp32", "schedule=constant", "device=cpu", "steps=5", "data.samples=12")  # over epochs
    job = Job("small", overrides)
    file = peers.write_workload(Bench(CPU, 1, tmp_path), job, options, tmp_path / "workload.pt")
    workload = loops.Workload(file)
    assert workload.steps == 5
    trainer = Trainer.from_config(job.config(*options), CPU)
    batch = next(trainer.batches())[0]
    ours = trainer.recipe.loss(trainer.model, batch).loss_sum / trainer.recipe.count_targets(batch)
    theirs = workload.model(*next(iter(workload.loader())))
    # transformers' loss leaves the last token of each sample out
    assert theirs.item() == pytest.approx(ours.item(), rel=0.02)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_bare_program_computes_in_the_precision_that_is_asked_for_and_clips(
    precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    bench, job = Bench(CPU, 1, tmp_path), Job("small", (*GPT2, "batch_size=4"), steps=2)
    file = peers.write_workload(bench, job, peers._options(bench, job, precision), tmp_path / "workload.pt")
    workload = loops.Workload(file)
    written, logits, norms = StringIO(), [], []
    workload.model.plain.lm_head.register_forward_hook(lambda *given: logits.append(given[-1].dtype))

    def see(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    handle = register_optimizer_step_pre_hook(see)
    try:
        loops.LOOPS["bare"](workload, loops.Meter(workload, written))
    finally:
        handle.remove()
    assert logits == [dtype] * workload.steps
    assert norms == pytest.approx([MAX_NORM] * workload.steps, rel=1e-4)  # those of new weights are larger
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, workload.steps + 1, 2))
    assert all(line["loss"] > 0 for line in lines)


PROGRAM = """
import json, sys, time
for step in range(1, 1_000_000):
    with open(sys.argv[1], "a") as lines:
        print(json.dumps({"step": step, "step_time_s": step, "loss": 1.0}), file=lines)
    time.sleep(0.001)
"""


def test_a_program_stands_still_until_its_turn_and_its_pause_is_not_timed(tmp_path: Path) -> None:
    lines, errors = tmp_path / "lines.jsonl", tmp_path / "errors"
    program = peers.Program([sys.executable, "-c", PROGRAM, str(lines)], lines, errors)
    state = Path(f"/proc/{program.process.pid}/stat")
    try:
        program.turn()
        for _ in range(3):
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                assert len(program.rows()) < 100_000
            known = len(program.rows())
            assert program.turn() == known + 2  # in the first line is the pause
    finally:
        program.close()
    assert program.process.returncode == -signal.SIGKILL
    with pytest.raises(RunError, match="errors: no such device"):
        peers.Program([sys.executable, "-c", "exit('no such device')"], lines, errors).turn()


def test_a_bench_that_is_killed_leaves_no_program_standing(tmp_path: Path) -> None:
    bench = f"""
from benchmarks.peers import *
lines = Path({str(tmp_path / "lines.jsonl")!r})
program = Program([sys.executable, "-c", {PROGRAM!r}, str(lines)], lines, lines.with_suffix(".err"))
program.turn()
print(program.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = forks.run([sys.executable, "-c", bench], cwd=PROJECT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with suppress(ProcessLookupError):  # it has ended
        assert select.select([os.pidfd_open(int(killed.stdout))], [], [], 60)[0]


def test_programs_take_turns_and_one_that_trains_otherwise_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []
    seconds, losses = {"bare": 2.0, "other": 3.0, "Mantissa": 1.0}, {"bare": 1.0, "other": 1.1, "Mantissa": 1.001}

    class Made:
        def __init__(self, name: str, *_: object) -> None:
            self.name = name

        def turn(self) -> float:
            turns.append(self.name)
            if self.name == "broken":
                raise RunError("no such device")
            return seconds[self.name]

        def rows(self) -> list[dict[str, float]]:
            return [{"step": step, "loss": losses[self.name]} for step in range(turns.count(self.name))]

        def close(self) -> None:
            turns.append(f"{self.name} ends")

    monkeypatch.setattr(peers, "write_workload", lambda *given: tmp_path / "workload.pt")
    monkeypatch.setattr(peers, "_started", Made)
    made = [peers.Framework(name, ("torch",)) for name in ("other", "broken")]
    made.append(peers.Framework("absent", ("a-package-that-nobody-has",)))
    rows = {row.name: row for row in peers.side_by_side(Bench(CPU, 2, tmp_path), SMALL, "fp32", made)}
    known = version("torch")
    assert {name.partition("step of ")[2]: row.values for name, row in rows.items()} == {
        f"broken {known} / bare loop": [],
        "Mantissa / bare loop": [0.5, 0.5],
        f"other {known} / bare loop": [],
    }
    assert {peers.BARE, *(framework.name for framework in peers.FRAMEWORKS)} == set(loops.LOOPS)
    assert turns[4:13] == ["Mantissa", "bare", "other", "other", "bare", "Mantissa", "Mantissa", "bare", "other"]
    assert sorted(turns[13:]) == ["Mantissa ends", "bare ends", "broken ends", "other ends"]
    assert "NOT alike" in rows[f"small fp32, step of other {known} / bare loop"].measured
    assert "NOT" not in rows["small fp32, step of Mantissa / bare loop"].measured
    assert "absent: a-package-that-nobody-has is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("installed", "why"), [("2.5.6", ""), ("2.6.2", "2.6.2 is installed")])
def test_only_lightning_2_5_is_ever_imported(monkeypatch: pytest.MonkeyPatch, installed: str, why: str) -> None:
    monkeypatch.setattr(peers, "version", lambda package: installed)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    lightning = next(framework for framework in peers.FRAMEWORKS if framework.name == "Lightning")
    refused = lightning.installed()[1]
    assert (why in refused, bool(refused)) == (True, bool(why))
    assert "lightning" not in sys.modules


# --- beside nanoGPT's loop ---

KINDS = ("fp32", "fp32, compiled", "bf16", "bf16, compiled")


SHAPE = PlainShape(context=8, layers=2, heads=2, width=16, batch_size=4, steps=8, warmup=2)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    whole = shakespeare(str(text))
    small = ("recipe.context=8", "batch_size=4", "steps=8", "eval_samples=4")
    return replace(whole, overrides=(*whole.overrides, *small), steps=1)


def test_the_models_are_the_same_function(job: Job) -> None:
    trainer = Trainer.from_config(job.config("recipe.context=64"))
    plain = _plain(PlainShape(), trainer, 0, bf16=False, compiled=False).model
    ours = dict(trainer.model.named_parameters())
    biases = sum(parameter.numel() for name, parameter in ours.items() if name.endswith("bias"))
    assert sum(parameter.numel() for parameter in plain.parameters()) == sum(map(torch.numel, ours.values())) - biases
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # else all blocks add next to nothing
        _copy(plain, ours)
    batch = next(trainer.batches())[0]
    tokens = batch["tokens"]
    ours_loss = trainer.recipe.loss(trainer.model, batch).loss_sum / trainer.recipe.count_targets(batch)
    assert plain(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(ours_loss.item(), rel=1e-6)


def _copy(plain: nn.Module, ours: dict[str, nn.Parameter]) -> None:
    names = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "attended": "attn.c_proj"}
    names |= {"wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
    outer = {"tokens.weight": "wte.weight", "positions.weight": "wpe.weight", "norm.weight": "ln_f.weight"}
    for name, parameter in plain.named_parameters():
        if name in outer:
            own = ours[f"gpt2.transformer.{outer[name]}"]
        else:
            _, number, layer, _ = name.split(".")
            own = ours[f"gpt2.transformer.h.{number}.{names[layer]}.weight"]
        # transformers keeps weights of layers as inputs × outputs
        own.copy_(parameter.T if parameter.ndim == 2 and name not in outer else parameter)


def test_a_step_takes_turns_with_two_of_the_plain_loop(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[PlainLoop] = []

    def plain(*given: Any, **options: Any) -> PlainLoop:
        loops.append(_plain(*given, **options))
        return loops[-1]

    monkeypatch.setattr(nanogpt_module, "_plain", plain)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(Compile, "apply", lambda *given: None)
    found = list(nanogpt_steps(Bench(CPU, 1, tmp_path, modes=frozenset({"bf16"})), job, SHAPE))
    loops_of = [f"{other} / {PLAIN}, {kind}" for kind in KINDS for other in (DEFAULT, AGAIN)]
    assert [row.name for row in found] == [f"shakespeare, step, {each}" for each in loops_of]
    assert all(len(row.values) == BLOCKS and min(row.values) > 0 for row in found)
    assert [loop.bf16 for loop in loops] == [False] * 4 + [True] * 4
    assert {loop.step for loop in loops} == {1 + BLOCKS}


def test_the_plain_loop_computes_in_bf16_where_it_is_asked_to(job: Job) -> None:
    trainer = Trainer.from_config(job.config())
    seen: list[torch.dtype] = []
    for bf16 in (False, True):
        loop = _plain(SHAPE, trainer, 0, bf16, compiled=False)
        loop.model.head.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
        loop.run(1)
    assert seen == [torch.float32, torch.bfloat16]
