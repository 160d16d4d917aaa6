"""Measure on a GPU what is worth most, within a limit of time: ``benchmarks/gpu.sh [key=value …]``.

  seconds=480          a stage begins only if its own limit fits in what is left of these
  only=gate,doctor     these stages alone, also those that have run; default: all that have not
  folder=outputs/gpu   logs and runs; gpu.json: what every stage found; gpu.tar.gz: all but weights
  out=FOLDER           where these two are copied to, after each stage
  rehearse=cpu         every stage in small on a CPU, or rehearse=pretended: on the tests' pretended GPU
Every stage is a process of its own, and one that fails does not stop the others. What they measure goes into
results/MACHINE.json as soon as it is known, if the gate has passed: its tests say whether any number means something.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
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
from trainer.errors import UserError, check_choice, nearest
from trainer.files import PROJECT, read_json, write_text
from trainer.hardware import Hardware, detect
from trainer.run.provenance import versions
from trainer.run.summary import summary_lines

Measured = dict[str, dict[str, Any]]
"""What results/ keeps, see ``results.keep``."""
PASSED, FAILED = "passed", "failed"
GATE = "bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32 or (compiled_gradients and cuda)"
"""The tests of tests/gpu that come first."""
DIVERGED, FOUND = 3, 7
"""The exit codes of a training whose gradients are not finite, and of a doctor that found why."""
LARGE = (".safetensors", ".pt", ".bin", ".pickle")
"""Files that the tar is without."""
GIB = 2**30


@dataclass
class GpuOptions:
    """Options of the command line."""

    seconds: float = 480
    only: list[str] = field(default_factory=list)
    folder: str = "outputs/gpu"
    out: str = ""
    rehearse: str = "no"

    def __post_init__(self) -> None:
        check_choice("rehearse", self.rehearse, ("no", "cpu", "pretended"))


@dataclass(frozen=True)
class Stage:
    """Commands that answer one question."""

    name: str
    limit_s: float
    """They are ended after so long: about twice what an H200 should need."""
    commands: list[list[str]]
    """The words after ``python`` of each."""
    read: Callable[[Path], tuple[str, Measured]]
    """Returns the answer, in a line and as results/ keeps it; the argument is the folder of logs and runs."""
    codes: tuple[int, ...] = (0, 0)
    """The exit code of each command where all is well."""


@dataclass(frozen=True)
class Setting:
    """Where the stages run, and how large they are."""

    folder: Path
    rehearse: str

    @property
    def small(self) -> bool:
        """Whether this is a rehearsal."""
        return self.rehearse != "no"

    @property
    def device(self) -> str:
        """The device of the scripts."""
        return "cpu" if self.rehearse == "cpu" else "cuda"

    def script(self, name: str, *overrides: str) -> list[str]:
        """Return the words of a script's command."""
        through = ["-m", "tests.gpu.pretended"] if self.rehearse == "pretended" else []
        return [*through, f"scripts/{name}.py", f"device={self.device}", *overrides]

    def train(self, name: str, *overrides: str) -> list[str]:
        """Return the words of a training whose run folder is called like its stage."""
        own = [f"output_dir={self.folder}", f"run_name={name}", "tracking=local", "tracking.epilogue=false"]
        return self.script("train", *own, "checkpoint=none", "data=synthetic", *overrides)

    def speed(self, name: str, words: str, limit_s: float, steps: int, *overrides: str) -> Stage:
        """Return a training whose throughput and memory are the answer, both by these words."""
        # Eight samples are less than a microbatch, so that evaluation is not compiled, too.
        count = 8 if self.small else steps
        fixed = ["loader=synthetic-on-device", f"steps={count}", f"eval_every={count}", "eval_samples=8", "log_every=5"]
        return Stage(name, limit_s, [self.train(name, *fixed, *overrides)], lambda at: throughput(at / name, words))

    def stages(self) -> list[Stage]:
        """Return all stages, most worth first."""
        gpt2 = ["recipe=gpt2", "recipe.size=124M", "recipe.context=1024"]
        resnet = ["recipe=resnet", "recipe.arch=resnet50", "recipe.image_size=224", "data.samples=1024"]
        long, short = ["batch_size=480", "micro_batch_size=32"], ["batch_size=64", "micro_batch_size=32"]
        images, eager_images, misfit = ["batch_size=512"], ["batch_size=256"], ["recipe.size=1558M", "batch_size=64"]
        if self.small:
            gpt2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=32", "data.vocab_size=300"]
            resnet = ["recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data.samples=64"]
            long, short, misfit = ["batch_size=8", "micro_batch_size=4"], ["batch_size=4"], ["batch_size=4"]
            images = eager_images = ["batch_size=8"]
        bf16, resnet = "precision=bf16", [*resnet, "optimizer=sgd", "precision=bf16"]
        compiled = "compile=off" if self.rehearse == "pretended" else "compile=default"
        ladder = ("fp32", "tf32", "fp16") if self.device == "cuda" else ("fp32", "fp16")
        # T5 overflows in fp16 at this rate, as in docs/doctor.md.
        overflow = [
            "recipe=t5",
            "data.vocab_size=90",
            "recipe.context=16",
            "batch_size=4",
            "steps=30",
            "optimizer.lr=3",
        ]
        overflow += ["schedule=constant", "clip=none", "scaler.max_consecutive_skips=3", "precision=fp16"]
        overflow += ["checkpoint=default"]
        tests = ["-m", "pytest", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider"]
        at_once = ["-n", "6"] if find_spec("xdist") else []
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        # The pretended GPU has no NCCL, no profiler, no fake tensors and no peak of memory.
        plain = Setting(self.folder, "cpu") if self.small else self
        parallel = [
            [*torchrun, *plain.speed(kind, "", 0, 10, *gpt2, *short, bf16, f"parallel={kind}").commands[0]]
            for kind in ("ddp", "fsdp")
        ]
        return [
            self.speed("alive", "BigNet, bf16", 60, 20, "recipe=bignet", bf16),
            Stage("gate", 120, [[*tests, "-k", GATE]], last_line("gate")),
            self.speed("gpt2_compiled", "GPT-2 124M, bf16, compiled", 180, 25, *gpt2, *long, bf16, compiled),
            plain.speed("gpt2_profile", "", 70, 12, *gpt2, *short, bf16, compiled, "profiler=torch"),
            plain.speed("gpt2_bf16", "GPT-2 124M, bf16", 60, 15, *gpt2, *short, bf16),
            self.speed(
                "gpt2_master",
                "GPT-2 124M, bf16_master, compiled",
                130,
                15,
                *gpt2,
                *long,
                "precision=bf16_master",
                compiled,
            ),
            *(
                self.speed(f"gpt2_{mode}", f"GPT-2 124M, {mode}", 70, 15, *gpt2, *short, f"precision={mode}")
                for mode in ladder
            ),
            self.speed("resnet50_compiled", "ResNet-50, bf16, compiled", 130, 40, *resnet, *images, compiled),
            self.speed("resnet50_eager", "ResNet-50, bf16", 60, 20, *resnet, *eager_images),
            Stage("memory", 60, [plain.script("memory", *gpt2, *short, bf16, "data=synthetic")], forecast),
            Stage(
                "halving", 100, [self.train("halving", *gpt2, *misfit, bf16, "steps=2", "eval_samples=8")], microbatch
            ),
            Stage(
                "doctor",
                120,
                [
                    self.train("overflow", *overflow),
                    self.script("doctor", f"resume={self.folder}/overflow", "time_budget=40s"),
                ],
                finding,
                (DIVERGED, FOUND),
            ),
            Stage("parallel", 100, parallel, lambda at: (throughput(at / "fsdp", "")[0], {})),
            Stage("tests", 200, [[*tests, *at_once]], last_line("tests")),
            Stage("bench", 200, [["benchmarks/bench.py", "only=memory,trainer", "repeats=3"]], last_line("bench")),
            Stage(
                "claims",
                3600,
                [["scripts/reproduce.py", "all=true", f"output_dir={self.folder}/claims"]],
                last_line("claims"),
            ),
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
    *_, names, row = [line.split() for line in (folder / "memory.log").read_text().splitlines() if line.strip()]
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
    lines = (folder / "doctor.log").read_text().splitlines()
    return " / ".join([line for line in lines if "BREAKS" in line or line.startswith("FOUND")][:2]), {}


def last_line(name: str) -> Callable[[Path], tuple[str, Measured]]:
    """Return what reads the last line of a stage's log."""
    return lambda folder: ((folder / f"{name}.log").read_text().splitlines()[-1], {})


def one(value: float, unit: str) -> dict[str, Any]:
    """Return one measurement as results/ keeps it."""
    return {"value": value, "low": value, "high": value, "unit": unit}


def take(stage: Stage, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a stage within these seconds, and return what gpu.json has of it."""
    log, began = folder / f"{stage.name}.log", time.monotonic()
    found: dict[str, Any] = {"state": FAILED, "commands": [" ".join(["python", *words]) for words in stage.commands]}
    for run_name in {
        word.removeprefix("run_name=") for words in stage.commands for word in words if "run_name=" in word
    }:
        shutil.rmtree(folder / run_name, ignore_errors=True)  # of an earlier call that failed
    for words, code in zip(stage.commands, stage.codes, strict=False):
        left = seconds - (time.monotonic() - began)
        ended = shell.run([sys.executable, *words], log, limit_s=left, stop_s=5, cwd=PROJECT)
        if ended.code != code:
            how = f"exit code {ended.code}" if ended.code is not None else f"no end within {seconds:.0f} s"
            found["answer"] = f"{how}: {ended.last_lines()}"
            break
    else:
        try:
            found["answer"], found["measured"] = stage.read(folder)
            found["state"] = PASSED
        except (OSError, LookupError, ValueError, TypeError) as error:  # the runs left something else than expected
            found["answer"] = f"{type(error).__name__}: {error}"
    return found | {"seconds": round(time.monotonic() - began, 1)}


def pack(folder: Path, out: str) -> None:
    """Put logs, summaries and what results/ keeps into gpu.tar.gz; copy it and gpu.json to ``out``, if named."""
    with tarfile.open(folder / "gpu.tar.gz", "w:gz") as tar:
        for path in sorted([*folder.rglob("*"), *results.RESULTS.glob("*.json")]):
            if path.is_file() and path.suffix not in (*LARGE, ".gz"):
                inside = path.relative_to(folder) if path.is_relative_to(folder) else Path("results", path.name)
                tar.add(path, str(inside))
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        for name in ("gpu.json", "gpu.tar.gz"):
            shutil.copy(folder / name, out)


def measure(every: list[Stage], folder: Path, options: GpuOptions, hardware: Hardware) -> dict[str, Any]:
    """Run the stages that are wanted and fit; return what gpu.json holds, which is written after each."""
    until = time.monotonic() + options.seconds
    report = folder / "gpu.json"
    known = read_json(report)["stages"] if report.exists() else {}
    whole = {"hardware": hardware.facts(), "versions": versions(), "stages": known}
    for stage in every:
        if stage.name not in options.only if options.only else stage.name in known:
            continue
        if stage.limit_s > (left := until - time.monotonic()):
            print(f"{stage.name}: not begun: it may take {stage.limit_s:.0f} s, {max(0, left):.0f} s are left")
            continue
        known[stage.name] = found = take(stage, folder, stage.limit_s)
        print(f"{stage.name}: {found['state']} in {found['seconds']:.0f} s: {found['answer']}", flush=True)
        write_text(report, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        if options.rehearse == "no" and known.get("gate", {}).get("state") == PASSED:
            measured = {name: one for each in known.values() for name, one in each.get("measured", {}).items()}
            print(f"  {results.keep(hardware, 'benchmarks/gpu.sh', measured)}", flush=True)
        pack(folder, options.out)
    return whole


def main(arguments: list[str]) -> int:
    """Run the stages, print what each found; return 1 where one failed."""
    options, _ = parse(arguments, GpuOptions)
    folder = Path(options.folder).resolve()
    setting = Setting(folder, options.rehearse)
    every = setting.stages()
    if unknown := [name for name in options.only if name not in (names := [stage.name for stage in every])]:
        raise UserError(f"only={unknown[0]} is unknown{nearest(unknown[0], names)} ({', '.join(names)})")
    folder.mkdir(parents=True, exist_ok=True)
    hardware = detect("cpu" if setting.small else "cuda")
    print(f"{hardware.name}, {size(hardware.memory_bytes)}, torch {versions()['torch']}", flush=True)
    whole = measure(every, folder, options, hardware)
    return int(any(each["state"] == FAILED for each in whole["stages"].values()))


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
