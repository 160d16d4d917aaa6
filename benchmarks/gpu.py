"""Measure on a GPU what is worth most, within a limit of time: ``benchmarks/gpu.sh [key=value …]``.

  seconds=480          a stage begins only if what an H200 should need for it is left of these, and ends with them
  only=gate,doctor     these stages alone, whether they have passed or not; default: all that have not
  out=FOLDER           where all of it but weights is copied to, after each stage, with results/
Logs and runs are in outputs/gpu, with gpu.json, what every stage found. Every stage is a process of its own, and one
that fails does not stop the others. What they measure goes into results/MACHINE.json as soon as it is known, if the
gate has passed: its tests say whether any number means something.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import results
from mantissa.display import size
from mantissa.verdict import shell
from trainer.config.options import parse, run
from trainer.errors import UserError, nearest
from trainer.files import PROJECT, read_json, write_text
from trainer.hardware import Hardware, detect
from trainer.run.provenance import versions
from trainer.run.summary import summary_lines

Measured = dict[str, dict[str, Any]]
"""What results/ keeps, see ``results.keep``."""
PASSED, FAILED = "passed", "failed"
GATE = "bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32"
"""The tests of tests/gpu that come first; none compiles."""
DIVERGED, FOUND = 3, 7
"""The exit codes of a training whose gradients are not finite, and of a doctor that found why."""
LARGE = ("*.safetensors", "*.pt", "*.bin", "*.pickle")
"""Files that are not copied."""
STOPPING_S = 8.0
"""Seconds for ending a stage at its limit, and for copying."""
GIB = 2**30
COMPILED = "compile=default"


@dataclass
class GpuOptions:
    """Options of the command line."""

    seconds: float = 480
    only: list[str] = field(default_factory=list)
    out: str = ""


@dataclass(frozen=True)
class Stage:
    """Commands that answer one question."""

    name: str
    expected_s: float
    """What an H200 should need. They are ended after twice as long."""
    commands: list[list[str]]
    """The words after ``python`` of each."""
    read: Callable[[Path], tuple[str, Measured]]
    """Returns the answer, in a line and as results/ keeps it; the argument is the folder of logs and runs."""
    codes: tuple[int, ...] = (0, 0)
    """The exit code of each command where all is well."""


def train(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the words of a training whose run folder is called like its stage."""
    own = [f"output_dir={folder}", f"run_name={name}", "tracking=local"]
    return ["scripts/train.py", *own, "checkpoint=none", "data=synthetic", *overrides]


def timed(folder: Path, name: str, steps: int, *overrides: str) -> list[str]:
    """Return the words of a training whose speed and memory are the answer."""
    # Eight samples are less than a microbatch, so that evaluation is not compiled, too.
    fixed = ["loader=synthetic-on-device", f"steps={steps}", f"eval_every={steps}", "eval_samples=8", "log_every=5"]
    return train(folder, name, *fixed, *overrides)


def stages(folder: Path) -> list[Stage]:
    """Return all stages, most worth first."""

    def speed(name: str, words: str, expected_s: float, steps: int, *overrides: str) -> Stage:
        return Stage(
            name, expected_s, [timed(folder, name, steps, *overrides)], lambda at: throughput(at / name, words)
        )

    # The models and their batches.
    sized, bf16, compiled = ["recipe=gpt2", "recipe.context=1024", "recipe.size=124M"], "precision=bf16", COMPILED
    long, gpt2 = [*sized, "batch_size=480"], [*sized, "batch_size=64"]
    misfit = ["recipe=gpt2", "recipe.context=1024", "recipe.size=774M", "batch_size=64"]
    images = ["recipe=resnet", "recipe.arch=resnet50", "recipe.image_size=224", "data.samples=1024", "optimizer=sgd"]
    # T5 overflows in fp16 at this rate, as in docs/doctor.md.
    overflow = ["recipe=t5", "data.vocab_size=90", "recipe.context=16", "batch_size=4", "steps=30", "optimizer.lr=3"]
    overflow += ["schedule=constant", "clip=none", "precision=fp16", "scaler.max_consecutive_skips=3"]
    overflows = train(folder, "overflow", *overflow, "checkpoint=default")
    diagnose = ["scripts/doctor.py", f"resume={folder}/overflow", "time_budget=40s"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
    parallel = [[*torchrun, *timed(folder, kind, 10, *gpt2, bf16, f"parallel={kind}")] for kind in ("ddp", "fsdp")]
    tests = ["-m", "pytest", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "-k"]
    at_once = ["-n", "6"] if find_spec("xdist") else []
    return [
        # The first call.
        speed("alive", "", 15, 20, "recipe=bignet", "precision=auto"),
        Stage("gate", 45, [[*tests, GATE]], last_line("gate")),
        speed("gpt2_compiled", "GPT-2 124M, bf16, compiled", 95, 25, *long, bf16, compiled),
        Stage(
            "gpt2_profile",
            25,
            [timed(folder, "gpt2_profile", 12, *gpt2, bf16, compiled, "profiler=torch")],
            profile,
        ),
        speed("gpt2_bf16", "GPT-2 124M, bf16", 25, 15, *gpt2, bf16),
        *(
            speed(f"gpt2_{mode}", f"GPT-2 124M, {mode}", 25, 15, *gpt2, f"precision={mode}")
            for mode in ("fp32", "tf32", "fp16")
        ),
        speed("resnet50_compiled", "ResNet-50, bf16, compiled", 85, 40, *images, "batch_size=512", bf16, compiled),
        Stage("doctor", 50, [overflows, diagnose], finding, (DIVERGED, FOUND)),
        Stage("memory", 15, [["scripts/memory.py", *gpt2, bf16, "data=synthetic"]], forecast),
        Stage("halving", 40, [train(folder, "halving", *misfit, bf16, "steps=2", "eval_samples=8")], microbatch),
        # The second.
        Stage("tests", 95, [[*tests, "not compiled", *at_once]], last_line("tests")),
        Stage("parallel", 40, parallel, both_rates),
        speed("resnet50_eager", "ResNet-50, bf16", 25, 20, *images, "batch_size=256", bf16),
        # Later ones.
        speed("gpt2_master", "GPT-2 124M, bf16_master, compiled", 80, 15, *long, "precision=bf16_master", compiled),
        Stage("compiled_tests", 90, [[*tests, "compiled", *at_once]], last_line("compiled_tests")),
    ]


def throughput(run_folder: Path, words: str) -> tuple[str, Measured]:
    """Return a training's speed, MFU and memory: as its own last line has them, and by these words."""
    summary = read_json(run_folder / "summary.json")
    values = [
        ("throughput", summary["units_per_s"], f"{summary['unit']}/s"),
        ("MFU of the data sheet", (summary["utilisation"]["mfu_of_data_sheet"] or 0) * 100, "%"),
        ("peak memory", (summary["peak_memory_bytes"] or 0) / GIB, "GiB"),
    ]
    measured = {f"{words}: {what}": (value, unit) for what, value, unit in values if words and value}
    return summary_lines(summary)[-1], {name: one(*found) for name, found in measured.items()}


def forecast(folder: Path) -> tuple[str, Measured]:
    """Return how far the forecast of a step's peak is from what the stage ``gpt2_bf16`` measured."""
    *_, names, row = [line.split() for line in log_of(folder, "memory") if line.strip()]
    forecast_bytes = float(row[names.index("peak")]) * 2**20
    summary = read_json(folder / "gpt2_bf16" / "summary.json")
    peak = summary["peak_memory_bytes"] or summary["process_memory_bytes"]  # of a CPU
    words = f"forecast {size(forecast_bytes)}, measured {size(peak)}"
    return words, {"GPT-2 124M, bf16: forecast peak over measured": one(forecast_bytes / peak, "x")}


def microbatch(folder: Path) -> tuple[str, Measured]:
    """Return the microbatch that fits, and the peak with it."""
    run_folder = folder / "halving"
    settled = json.loads((run_folder / "config.json").read_text())
    return f"micro_batch_size={settled['micro_batch_size']}: {throughput(run_folder, '')[0]}", {}


def finding(folder: Path) -> tuple[str, Measured]:
    """Return the doctor's line of formats and its first finding."""
    lines = [line for line in log_of(folder, "doctor") if "BREAKS" in line or line.startswith("FOUND")]
    return " / ".join(lines[:2]), {}


def profile(folder: Path) -> tuple[str, Measured]:
    """Return the operators that take longest, and the kernel of attention."""
    (shares,) = [line.strip() for line in log_of(folder, "gpt2_profile") if "operator time on" in line]
    table = (folder / "gpt2_profile" / "profile" / "operators.txt").read_text().splitlines()
    kernels = [line.split()[0] for line in table if "aten::_scaled_dot_product" in line]
    return f"{shares}; {kernels[0] if kernels else 'no kernel of attention'}", {}


def both_rates(folder: Path) -> tuple[str, Measured]:
    """Return the speed of DDP and of FSDP."""
    return "; ".join(f"{kind}: {throughput(folder / kind, '')[0]}" for kind in ("ddp", "fsdp")), {}


def log_of(folder: Path, name: str) -> list[str]:
    """Return the lines that a stage's last command printed."""
    return (folder / f"{name}.log").read_text().splitlines()


def last_line(name: str) -> Callable[[Path], tuple[str, Measured]]:
    """Return what reads the last line of a stage's log."""
    return lambda folder: (log_of(folder, name)[-1], {})


def one(value: float, unit: str) -> dict[str, Any]:
    """Return one measurement as results/ keeps it."""
    return {"value": value, "low": value, "high": value, "unit": unit}


def take(stage: Stage, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a stage within these seconds, and return what gpu.json has of it."""
    began = time.monotonic()
    found: dict[str, Any] = {"state": FAILED, "commands": [" ".join(["python", *words]) for words in stage.commands]}
    words = [word for words in stage.commands for word in words]
    for name in [word.removeprefix("run_name=") for word in words if word.startswith("run_name=")]:
        shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier call, in which it failed
    last = len(stage.commands) - 1
    for number, (words, code) in enumerate(zip(stage.commands, stage.codes, strict=False)):
        log = folder / (f"{stage.name}.log" if number == last else f"{stage.name}-{number}.log")
        left = limit_s - (time.monotonic() - began)
        ended = shell.run([sys.executable, *words], log, limit_s=left, stop_s=5, cwd=PROJECT)
        if ended.code != code:
            how = f"exit code {ended.code}" if ended.code is not None else f"no end within {limit_s:.0f} s"
            found["answer"] = f"{how}: {ended.last_lines()}"
            break
    else:
        try:
            found["answer"], found["measured"] = stage.read(folder)
            found["state"] = PASSED
        except (OSError, LookupError, ValueError, TypeError) as error:  # the runs left something else than expected
            found["answer"] = f"{type(error).__name__}: {error}"
    return found | {"seconds": round(time.monotonic() - began, 1)}


def measure(every: list[Stage], folder: Path, options: GpuOptions, hardware: Hardware) -> dict[str, Any]:
    """Run the stages that are wanted and fit; return what gpu.json holds, which is written after each."""
    until = time.monotonic() + options.seconds
    report = folder / "gpu.json"
    whole: dict[str, Any] = {
        "hardware": hardware.name,
        "commit": results.here(hardware).git.get("commit"),
        "versions": versions(),
    }
    before = read_json(report) if report.exists() else {}
    known = whole["stages"] = before["stages"] if whole.items() <= before.items() else {}
    if before and not known:
        print(f"{report} is of another GPU, commit or package: begun anew", flush=True)

    def passed(name: str) -> bool:
        return bool(known.get(name, {}).get("state") == PASSED)

    # Those that have failed come again, after all that have not begun.
    wanted = [stage for stage in every if (stage.name in options.only if options.only else not passed(stage.name))]
    for stage in sorted(wanted, key=lambda stage: not options.only and stage.name in known):
        left = until - time.monotonic() - STOPPING_S
        if stage.expected_s > left:
            print(
                f"{stage.name}: not begun: it may take {stage.expected_s:.0f} s, {max(0, left):.0f} s are left",
                flush=True,
            )
            continue
        known[stage.name] = found = take(stage, folder, min(2 * stage.expected_s, left))
        print(f"{stage.name}: {found['state']} in {found['seconds']:.0f} s: {found['answer']}", flush=True)
        try:
            write_text(report, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
            if passed("gate"):
                measured = {name: one for each in known.values() for name, one in each.get("measured", {}).items()}
                print(f"  {results.keep(results.here(hardware), 'benchmarks/gpu.sh', measured)}", flush=True)
            if options.out:
                small = shutil.ignore_patterns(*LARGE)
                shutil.copytree(folder, options.out, ignore=small, dirs_exist_ok=True)
                shutil.copytree(results.RESULTS, Path(options.out, "results"), dirs_exist_ok=True)
        except OSError as error:  # what is measured is printed, and the next stage may be worth more
            print(f"  not written: {error}", flush=True)
    return whole


def main(arguments: list[str]) -> int:
    """Run the stages, print what each found; return 1 where one failed."""
    options, _ = parse(arguments, GpuOptions)
    needed = {"pytest": "pytest", "pynvml": "nvidia-ml-py", "torchmetrics": "torchmetrics"}
    if lacking := [package for module, package in needed.items() if find_spec(module) is None]:
        raise UserError(f"the stages need what is not installed (pip install {' '.join(lacking)})")
    folder = PROJECT / "outputs" / "gpu"
    every = stages(folder)
    if unknown := [name for name in options.only if name not in (names := [stage.name for stage in every])]:
        raise UserError(f"only={unknown[0]} is unknown{nearest(unknown[0], names)} ({', '.join(names)})")
    hardware = detect("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{hardware.name}, {size(hardware.memory_bytes)}, torch {versions()['torch']}", flush=True)
    whole = measure(every, folder, options, hardware)
    return int(any(each["state"] == FAILED for each in whole["stages"].values()))


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
