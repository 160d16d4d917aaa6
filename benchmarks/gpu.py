"""Measure on a GPU what is worth most, within a limit of time: ``benchmarks/gpu.sh [key=value …]``.

  seconds=480          a stage begins only if what an H200 should need for it is left of these, and ends with them
  only=gate,doctor     these stages alone, whether they have passed or not; default: all that have not
  out=FOLDER           where gpu.json and gpu.tar.gz are copied to, after each stage
  rehearse=cpu         every stage in small on a CPU, or rehearse=pretended: on the tests' pretended GPU
Logs and runs are in outputs/gpu (of a rehearsal in outputs/gpu-cpu), with gpu.json, what every stage found, and
gpu.tar.gz, all but weights. Every stage is a process of its own, and one that fails does not stop the others. What they
measure goes into results/MACHINE.json as soon as it is known, if the gate has passed: its tests say whether any number
means something.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
GATE = "bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32"
"""The tests of tests/gpu that come first; none compiles."""
DIVERGED, FOUND = 3, 7
"""The exit codes of a training whose gradients are not finite, and of a doctor that found why."""
LARGE = (".safetensors", ".pt", ".bin", ".pickle")
"""Files that the tar is without."""
STOPPING_S = 8.0
"""Seconds for ending a stage at its limit, and for packing."""
GIB = 2**30


@dataclass
class GpuOptions:
    """Options of the command line."""

    seconds: float = 480
    only: list[str] = field(default_factory=list)
    out: str = ""
    rehearse: str = "no"

    def __post_init__(self) -> None:
        check_choice("rehearse", self.rehearse, ("no", "cpu", "pretended"))


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
    keeps: bool = False
    """Whether they write into results/ themselves, and so wait for the gate."""


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
        own = [f"output_dir={self.folder}", f"run_name={name}", "tracking=local"]
        return self.script("train", *own, "checkpoint=none", "data=synthetic", *overrides)

    def speed(self, name: str, words: str, expected_s: float, steps: int, *overrides: str) -> Stage:
        """Return a training whose throughput and memory are the answer, both by these words."""
        # Eight samples are less than a microbatch, so that evaluation is not compiled, too.
        count = 8 if self.small else steps
        fixed = ["loader=synthetic-on-device", f"steps={count}", f"eval_every={count}", "eval_samples=8", "log_every=5"]
        return Stage(name, expected_s, [self.train(name, *fixed, *overrides)], lambda at: throughput(at / name, words))

    def stages(self) -> list[Stage]:
        """Return all stages, most worth first."""
        # The models and their batches.
        sized = ["recipe=gpt2", "recipe.context=1024", "recipe.size=124M"]
        large, misfit = ["recipe=gpt2", "recipe.context=1024", "recipe.size=774M"], ["batch_size=64"]
        resnet = ["recipe=resnet", "recipe.arch=resnet50", "recipe.image_size=224", "data.samples=1024"]
        long, short = ["batch_size=480"], ["batch_size=64"]
        images, eager_images = ["batch_size=512"], ["batch_size=256"]
        if self.small:
            sized = large = ["recipe=gpt2", "recipe.context=32", "recipe.size=nano", "data.vocab_size=300"]
            resnet = ["recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data.samples=64"]
            long, short, misfit = ["batch_size=8", "micro_batch_size=4"], ["batch_size=4"], ["batch_size=4"]
            images = eager_images = ["batch_size=8"]
        gpt2, resnet, bf16 = [*sized, *short], [*resnet, "optimizer=sgd", "precision=bf16"], "precision=bf16"
        compiled = "compile=off" if self.rehearse == "pretended" else "compile=default"
        ladder = ("fp32", "tf32", "fp16") if self.device == "cuda" else ("fp32", "fp16")
        # T5 overflows in fp16 at this rate, as in docs/doctor.md.
        overflow = [
            "recipe=t5",
            "data.vocab_size=90",
            "recipe.context=16",
            "batch_size=4",
            "steps=30",
            "schedule=constant",
        ]
        overflow += ["optimizer.lr=3", "clip=none", "precision=fp16", "scaler.max_consecutive_skips=3"]
        diagnose = self.script("doctor", f"resume={self.folder}/overflow", "time_budget=40s")
        # The pretended GPU has no NCCL, no profiler, no fake tensors and no peak of memory.
        plain = Setting(self.folder, "cpu") if self.small else self
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        parallel = [
            [*torchrun, *plain.speed(kind, "", 0, 10, *gpt2, bf16, f"parallel={kind}").commands[0]]
            for kind in ("ddp", "fsdp")
        ]
        tests = ["-m", "pytest", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "-k"]
        at_once = ["-n", "6"] if find_spec("xdist") else []
        bench = ["benchmarks/bench.py", "only=memory,trainer", f"repeats={1 if self.small else 3}"]
        claims = ["scripts/reproduce.py", "all=true", f"output_dir={self.folder}/claims"]
        return [
            # The first call.
            self.speed("alive", "", 15, 20, "recipe=bignet", "precision=auto"),
            Stage("gate", 45, [[*tests, GATE]], last_line("gate")),
            self.speed("gpt2_compiled", "GPT-2 124M, bf16, compiled", 95, 25, *sized, *long, bf16, compiled),
            replace(plain.speed("gpt2_profile", "", 25, 12, *gpt2, bf16, compiled, "profiler=torch"), read=profile),
            plain.speed("gpt2_bf16", "GPT-2 124M, bf16", 25, 15, *gpt2, bf16),
            *(self.speed(f"gpt2_{mode}", f"GPT-2 124M, {mode}", 25, 15, *gpt2, f"precision={mode}") for mode in ladder),
            self.speed("resnet50_compiled", "ResNet-50, bf16, compiled", 85, 40, *resnet, *images, compiled),
            Stage(
                "doctor",
                50,
                [self.train("overflow", *overflow, "checkpoint=default"), diagnose],
                finding,
                (DIVERGED, FOUND),
            ),
            Stage("memory", 15, [plain.script("memory", *gpt2, bf16, "data=synthetic")], forecast),
            Stage(
                "halving", 40, [self.train("halving", *large, *misfit, bf16, "steps=2", "eval_samples=8")], microbatch
            ),
            # The second.
            Stage("tests", 95, [[*tests, "not compiled", *at_once]], last_line("tests")),
            Stage("parallel", 40, parallel, both_rates),
            self.speed("resnet50_eager", "ResNet-50, bf16", 25, 20, *resnet, *eager_images),
            # Later ones.
            self.speed(
                "gpt2_master",
                "GPT-2 124M, bf16_master, compiled",
                80,
                15,
                *sized,
                *long,
                "precision=bf16_master",
                compiled,
            ),
            Stage("compiled_tests", 90, [[*tests, "compiled", *at_once]], last_line("compiled_tests")),
            Stage("bench", 80, [bench], last_line("bench"), keeps=True),
            Stage("claims", 3600, [claims], last_line("claims")),
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
    whole: dict[str, Any] = {"hardware": hardware.name, "commit": results.origin()[0], "versions": versions()}
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
        if stage.keeps and options.rehearse == "no" and not passed("gate"):
            print(f"{stage.name}: not begun: the gate has not passed", flush=True)
            continue
        known[stage.name] = found = take(stage, folder, min(2 * stage.expected_s, left))
        print(f"{stage.name}: {found['state']} in {found['seconds']:.0f} s: {found['answer']}", flush=True)
        try:
            write_text(report, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
            if options.rehearse == "no" and passed("gate"):
                measured = {name: one for each in known.values() for name, one in each.get("measured", {}).items()}
                print(f"  {results.keep(hardware, 'benchmarks/gpu.sh', measured)}", flush=True)
            pack(folder, options.out)
        except OSError as error:  # what is measured is printed, and the next stage may be worth more
            print(f"  not written: {error}", flush=True)
    return whole


def main(arguments: list[str]) -> int:
    """Run the stages, print what each found; return 1 where one failed."""
    options, _ = parse(arguments, GpuOptions)
    needed = {"pytest": "pytest", "pynvml": "nvidia-ml-py", "torchmetrics": "torchmetrics"}
    if lacking := [package for module, package in needed.items() if find_spec(module) is None]:
        raise UserError(f"the stages need what is not installed (pip install {' '.join(lacking)})")
    folder = PROJECT / "outputs" / ("gpu" if options.rehearse == "no" else f"gpu-{options.rehearse}")
    setting = Setting(folder, options.rehearse)
    every = setting.stages()
    if unknown := [name for name in options.only if name not in (names := [stage.name for stage in every])]:
        raise UserError(f"only={unknown[0]} is unknown{nearest(unknown[0], names)} ({', '.join(names)})")
    hardware = detect("cpu" if setting.small else "auto")
    if not setting.small and hardware.device.type != "cuda":
        raise UserError("torch finds no NVIDIA GPU here", "rehearse=cpu")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{hardware.name}, {size(hardware.memory_bytes)}, torch {versions()['torch']}", flush=True)
    whole = measure(every, folder, options, hardware)
    return int(any(each["state"] == FAILED for each in whole["stages"].values()))


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
