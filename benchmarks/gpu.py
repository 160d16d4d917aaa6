"""Measure what is worth most on a new GPU machine, in order, within a budget of time.

  python benchmarks/gpu.py               all stages, in the order below
  budget=28min       for this call (also 90s, 1h); the next call continues with what is not done at this commit
  only=tests,claims  run these, also if they are done
  data.path=…        the text that the claim shakespeare_gpu asks for
  reduced=true       everything at a tiny size: a rehearsal on a CPU
  device=auto        as for train.py
  output_dir=…       folder of the stages (default: outputs/gpu)
Each stage has a limit of time, and its outcome is appended to results/<machine>/gpu.jsonl before the next begins; one
that fails does not stop the others, but the gate does, whose tests say whether any number here means something. If the
variable OUT names a folder, outcomes.tar.gz is written there after each stage: results/<machine>, the logs and the
operator tables. Unpacked in results/, it is what the next call continues from.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evidence.budget import duration as seconds_of
from evidence.claims.reproduce import machine_name
from evidence.claims.results import RESULTS
from evidence.runs import in_a_process, merged
from evidence.turns import stopwatch
from mantissa.display import columns, duration, quantity
from trainer.config.options import parse, run
from trainer.errors import UserError
from trainer.files import PROJECT, SUMMARY_FILE, make_folder, read_object
from trainer.hardware import Hardware, detect
from trainer.profiling.rates import product_rates
from trainer.run.provenance import git_facts, versions

DONE, FAILED, TOO_LONG, CUT = "done", "failed", "took too long", "not finished"
GPT2 = "recipe=gpt2 recipe.size=124M recipe.context=1024 batch_size=32 micro_batch_size=32 data=synthetic"
RESNET = "recipe=resnet recipe.arch=resnet50 recipe.image_size=224 data=synthetic data.samples=1024 optimizer=sgd"
QUIET = "tracking=local tracking.epilogue=false checkpoint=none loader=synthetic-on-device log_every=10 eval_samples=32"
SMALL = {
    "recipe=gpt2": "recipe.size=nano recipe.context=8 data.vocab_size=64",
    "recipe=resnet": "recipe.arch=squeezenet1_1 recipe.image_size=32 data.samples=8",
    "": "batch_size=2 micro_batch_size=2 eval_samples=2 steps=3 eval_every=3 log_every=1 compile=off",
}
TRACED = "profiler=torch profiler.record_shapes=false steps=12"
_TESTS = f"-m pytest {shlex.quote(str(PROJECT / 'tests' / 'gpu'))} -q -p no:cacheprovider -p no:benchmark -W default"
_GATE = "bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32"
FIRST = ("gpt2_ladder", "tf32_matmul", "two_x")
_LEAST_S, _STOP_S = 15.0, 40.0


@dataclass
class GpuOptions:
    """Of the command line."""

    budget: str = "28min"
    only: list[str] = field(default_factory=list)
    reduced: bool = False
    device: str = "auto"
    output_dir: Path = Path("outputs/gpu")


@dataclass(frozen=True)
class Stage:
    """One process."""

    name: str
    command: str
    """Of Python: a script or ``-m module``, then its arguments."""
    limit_s: float
    """After which it is ended."""
    goal: str = ""
    """What it is to reach on an H200."""


STEPS = "steps=60 eval_every=60"
RESNET_512 = f"{RESNET} batch_size=512 micro_batch_size=512"
STAGES = (
    Stage("rates", "benchmarks/gpu.py rates", 90),
    Stage("gate", f"{_TESTS} -k '{_GATE}'", 150),
    Stage("gpt2_compiled", f"scripts/train.py {GPT2} compile=default {STEPS}", 240, "500k tokens/s, 50%"),
    Stage("gpt2_profile", f"scripts/train.py {GPT2} compile=default {TRACED}", 240),
    Stage("gpt2_master", f"scripts/train.py {GPT2} compile=default precision=bf16_master {STEPS}", 240),
    Stage("resnet50_compiled", f"scripts/train.py {RESNET_512} compile=default {STEPS}", 240, "5k images/s"),
    Stage("resnet50_profile", f"scripts/train.py {RESNET_512} compile=default {TRACED}", 240),
    Stage("claims_first", f"scripts/reproduce.py claim={','.join(FIRST)}", 900, "gpt2_ladder 10x"),
    Stage("gpt2_eager", f"scripts/train.py {GPT2} compile=off {STEPS}", 150),
    Stage("resnet50_eager", f"scripts/train.py {RESNET} batch_size=256 micro_batch_size=256 compile=off {STEPS}", 150),
    Stage("tests", f"{_TESTS} -n 4", 270),
    Stage("bench", "benchmarks/bench.py only=memory,precision,trainer repeats=3", 300),
    Stage("claims", "scripts/reproduce.py all=true", 3600),
)


def command(stage: Stage, options: GpuOptions, given: list[str], left_s: float) -> list[str]:
    """Return the command line of a stage, of which claims may take ``left_s`` seconds."""
    script, *words = shlex.split(stage.command)
    own = [f"output_dir={options.output_dir.absolute() / stage.name}", f"device={options.device}"]
    if script == "scripts/train.py":
        small = [each for key, text in SMALL.items() if not key or key in words for each in text.split()]
        words = merged(["precision=bf16", *QUIET.split()], words, small * options.reduced, own, ["run_name=run"])
    elif script == "scripts/reproduce.py":
        words += [*given, *own, f"budget={max(1.0, left_s - _LEAST_S):.0f}s", *["reduced=true"] * options.reduced]
    elif script == "benchmarks/bench.py":
        words = ["only=startup", "repeats=1", own[1]] if options.reduced else [*words, own[1]]
    elif script == "-m":
        words += ["--collect-only"] * options.reduced
    else:
        words += [own[1]]
    return [sys.executable, script if script == "-m" else str(PROJECT / script), *words]


class Outcomes:
    """What the stages left on this machine, in results/<machine>/gpu.jsonl and in the folder of their runs."""

    def __init__(self, options: GpuOptions, hardware: Hardware) -> None:
        self.machine, self.git = machine_name(hardware), git_facts()
        self.folder = options.output_dir.absolute()
        self.home = self.folder if options.reduced else RESULTS / self.machine
        self.file = self.home / "gpu.jsonl"
        make_folder(self.home)
        make_folder(self.folder)

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the last record of each stage at this commit."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return {found["stage"]: found for found in map(json.loads, lines) if found["git"] == self.git}

    def add(self, stage: Stage, status: str, code: int, line: list[str], seconds: float) -> None:
        """Record how a stage ended, and pack all there is; the last whole file stays until there is another."""
        record: dict[str, Any] = {"stage": stage.name, "status": status, "exit_code": code, "command": line[1:]}
        record |= {"seconds": round(seconds, 1), "git": self.git, "versions": versions()}
        record["summary"] = read_object(self.folder / stage.name / "run" / SUMMARY_FILE)
        log = (self.folder / f"{stage.name}.log").read_text(encoding="utf-8", errors="replace")
        record["last_lines"] = log.split("\n")[-8:]
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if out := os.environ.get("OUT"):
            packed = Path(out) / ".outcomes"
            kept = [*self.home.rglob("*.json*"), *self.folder.glob("*.log"), *self.folder.rglob("operators.txt")]
            with tarfile.open(packed, "w:gz") as archive:
                for path in sorted(set(kept)):
                    within = path.relative_to(self.home) if path.is_relative_to(self.home) else path.name
                    archive.add(path, Path(self.machine) / within)
            packed.replace(Path(out) / "outcomes.tar.gz")

    def report(self) -> str:
        """Return a table of the stages: how each ended, how long it took, its speed and memory beside the goal."""
        rows = [("stage", "", "time", "speed", "of the matmul rate", "memory", "goal on an H200")]
        for stage in STAGES:
            record = self.records().get(stage.name, {})
            found, how = record.get("summary", {}), record.get("status", "not run yet")
            speed, peak = found.get("units_per_s"), found.get("peak_memory_bytes")
            mfu = (found.get("utilisation") or {}).get("mfu")
            measured = (
                f"{quantity(speed)} {found.get('unit', 'units')}/s" if speed else "",
                f"{mfu:.0%}" if mfu else "",
                f"{peak / 2**30:.1f} GiB" if peak else "",
            )
            rows.append((stage.name, how, duration(record["seconds"]) if record else "", *measured, stage.goal))
        return columns(rows)


def run_stages(options: GpuOptions, given: list[str], outcomes: Outcomes) -> None:
    """Run the stages that have not ended at this commit, or those that are named, within the budget."""
    end = time.monotonic() + seconds_of(options.budget)
    for stage in STAGES:
        status = outcomes.records().get(stage.name, {}).get("status", CUT)
        if stage.name not in options.only if options.only else status != CUT:
            continue
        began = time.monotonic()
        limit_s = min(stage.limit_s, end - began)
        if limit_s < _LEAST_S:
            print(f"{stage.name}: left for the next call")
            continue
        print(f"{stage.name}, at most {duration(limit_s)}")
        shutil.rmtree(outcomes.folder / stage.name / "run", ignore_errors=True)  # of another commit, or cut
        line = command(stage, options, given, limit_s)
        try:
            code = in_a_process(line, outcomes.folder / f"{stage.name}.log", limit_s, _STOP_S)
            # Another call has more time for claims, and repeats none.
            status = FAILED if code else CUT if stage.name == "claims" else DONE
        except subprocess.TimeoutExpired:
            code, status = -1, TOO_LONG if limit_s == stage.limit_s else CUT
        outcomes.add(stage, status, code, line, time.monotonic() - began)
        if stage.name == "gate" and status != DONE:
            print("the gate failed: mend that first; only=… runs what it names all the same")
            return


def rates(hardware: Hardware) -> dict[str, Any]:
    """Return versions, the rates of matrix products (10^12 FLOP/s) and that of copies (10^9 bytes read and written)."""
    count = 2**32 if hardware.is_gpu else 2**26
    source = torch.ones(count, dtype=torch.uint8, device=hardware.device)
    target = torch.empty_like(source)
    copy = stopwatch(lambda _: target.copy_(source), hardware.device)
    copy(1)
    found = {"hardware": hardware.facts(), "versions": versions(), "product_tflops": product_rates(hardware)}
    return found | {"copy_gb_per_s": 2 * count / min(copy(1) for _ in range(5)) / 1e9}


def main(arguments: list[str]) -> int:
    """Run the stages and print their report; the exit code is 1 where a stage failed.

    Raises:
        UserError: an unknown option or stage, or no such device.
    """
    measure = arguments[:1] == ["rates"]
    options, given = parse(arguments[measure:], GpuOptions, "overrides")
    hardware = detect(options.device)
    if measure:
        print(json.dumps(rates(hardware)))
        return 0
    if others := [override for override in given if not override.startswith("data.path=")]:
        raise UserError(f"{others[0]} is not an option; data.path=… of a claim is the only override")
    if unknown := set(options.only) - {stage.name for stage in STAGES}:
        raise UserError(f"only={min(unknown)} is not a stage ({', '.join(stage.name for stage in STAGES)})")
    seconds_of(options.budget)
    if (out := os.environ.get("OUT")) and not Path(out).is_dir():
        raise UserError(f"OUT={out} is not a folder; create it, or unset OUT")
    if not (hardware.is_gpu or options.reduced):
        raise UserError("there is no CUDA GPU here; set reduced=true to rehearse on a CPU")
    outcomes = Outcomes(options, hardware)
    run_stages(options, given, outcomes)
    print(f"\n{outcomes.report()}")
    return int(any(record["status"] in (FAILED, TOO_LONG) for record in outcomes.records().values()))


if __name__ == "__main__":
    sys.exit(run(main, __doc__, continues=True))
