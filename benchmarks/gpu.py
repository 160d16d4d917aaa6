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
variable OUT names a folder, its <machine> gets results/<machine>, the logs, the operator tables and the runs of claims
after each stage. Copied to results/, it is what the next call continues from, on another machine of this kind, too.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evidence.claims.command import seconds_of
from evidence.claims.reproduce import machine_name
from evidence.claims.results import RESULTS
from evidence.runs import LIMIT_STOP_S, OUTCOME_FILE, in_a_process, merged
from evidence.turns import stopwatch
from mantissa.display import quantity
from trainer.config.options import parse, run
from trainer.errors import UserError
from trainer.files import METRICS_FILE, PROJECT, SUMMARY_FILE, make_folder, read_object
from trainer.hardware import Hardware, detect
from trainer.profiling.rates import product_rates
from trainer.run.provenance import git_facts, versions

DONE, FAILED, TOO_LONG, CUT = "done", "failed", "took too long", "not finished"
RUNS, RUN_FILES = "runs_of_claims", (OUTCOME_FILE, METRICS_FILE)
"""The folder in which all claims are tested, and what is left of a run that makes it one that is done."""
_LEAST_S = 15.0
_STOP_S = 3 * LIMIT_STOP_S
"""For the end of a stage: one that is killed sooner leaves the process that it waits for on the GPU."""


@dataclass(frozen=True)
class Stage:
    """One process."""

    name: str
    command: str
    """Of Python: a script or ``-m module``, then its arguments; {device}, {folder}, … stand for those of a call."""
    limit_s: float
    """After which it is ended."""
    goal: str = ""
    """What it is to reach on an H200."""


TRAIN = (
    "scripts/train.py device={device} output_dir={folder} run_name=run tracking=local tracking.epilogue=false "
    "checkpoint=none loader=synthetic-on-device log_every=10 eval_samples=32 data=synthetic"
)
GPT2 = f"{TRAIN} recipe=gpt2 recipe.size=124M recipe.context=1024 batch_size=32 micro_batch_size=32"
RESNET = (
    f"{TRAIN} precision=bf16 recipe=resnet recipe.arch=resnet50 recipe.image_size=224 data.samples=1024 optimizer=sgd"
)
RESNET_512 = f"{RESNET} batch_size=512 micro_batch_size=512"
STEPS = "steps=60 eval_every=60"
TRACED = "profiler=torch profiler.record_shapes=false steps=12"
CLAIMS = "scripts/reproduce.py device={device} output_dir={claims} budget={budget_s:.0f}s {given}"
TESTS = f"-m pytest {shlex.quote(str(PROJECT / 'tests' / 'gpu'))} -q -p no:cacheprovider -p no:benchmark -W default"
GATE = "bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32 or (compiled_gradients and cuda)"
STAGES = (
    Stage("rates", "benchmarks/gpu.py rates device={device}", 90),
    Stage("gate", f"{TESTS} -k '{GATE}'", 240),
    Stage("gpt2_compiled", f"{GPT2} precision=bf16 compile=default {STEPS}", 240, "500k tokens/s, 50%"),
    Stage("gpt2_profile", f"{GPT2} precision=bf16 compile=default {TRACED}", 240),
    Stage("gpt2_master", f"{GPT2} precision=bf16_master compile=default {STEPS}", 240),
    Stage("resnet50_compiled", f"{RESNET_512} compile=default {STEPS}", 240, "5k images/s"),
    Stage("resnet50_profile", f"{RESNET_512} compile=default {TRACED}", 240),
    Stage("tf32_matmul", f"{CLAIMS} claim=tf32_matmul", 120),
    Stage("gpt2_ladder", f"{CLAIMS} claim=gpt2_ladder", 900, "10x"),
    Stage("two_x", f"{CLAIMS} claim=two_x", 300),
    Stage("gpt2_eager", f"{GPT2} precision=bf16 compile=off {STEPS}", 150),
    Stage("resnet50_eager", f"{RESNET} precision=bf16 batch_size=256 micro_batch_size=256 compile=off {STEPS}", 150),
    Stage("tests", f"{TESTS} -n 4", 270),
    Stage("bench", "benchmarks/bench.py device={device} only=memory,precision,trainer repeats=3", 300),
    Stage("claims", f"{CLAIMS} all=true", 3600),
)
REDUCED = {
    "recipe=gpt2": "recipe.size=nano recipe.context=8 data.vocab_size=64",
    "recipe=resnet": "recipe.arch=squeezenet1_1 recipe.image_size=32 data.samples=8",
    "train.py": "batch_size=2 micro_batch_size=2 eval_samples=2 steps=3 eval_every=3 log_every=1 compile=off",
    "reproduce.py": "reduced=true",
    "bench.py": "only=startup repeats=1",
    "pytest": "--collect-only",
}
"""What makes a stage small whose command has this."""


@dataclass
class GpuOptions:
    """Of the command line."""

    budget: str = "28min"
    only: list[str] = field(default_factory=list)
    reduced: bool = False
    device: str = "auto"
    output_dir: Path = Path("outputs/gpu")

    def command(self, stage: Stage, given: list[str], left_s: float) -> list[str]:
        """Return the command line of a stage, of which claims may take ``left_s`` seconds."""
        folder, claims = (shlex.quote(str(self.output_dir.absolute() / name)) for name in (stage.name, RUNS))
        places = {"device": self.device, "folder": folder, "claims": claims, "given": shlex.join(given)}
        line = stage.command.format(budget_s=max(1.0, left_s - _LEAST_S), **places)
        if self.reduced:
            line = " ".join([line, *(small for key, small in REDUCED.items() if key in stage.command)])
        script, *words = shlex.split(line)
        if script == "-m":
            return [sys.executable, script, *words]
        return [sys.executable, str(PROJECT / script), *(merged(words) if script == "scripts/train.py" else words)]


@dataclass
class Outcomes:
    """What stages left."""

    machine: str
    home: Path
    """Gets gpu.jsonl, a record of each stage; claims write theirs beside it."""
    folder: Path
    """Of the stages' logs and runs."""
    git: dict[str, str] = field(default_factory=git_facts)

    @property
    def file(self) -> Path:
        """The records, one a line."""
        return self.home / "gpu.jsonl"

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the last record of each stage at this commit."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return {found["stage"]: found for found in map(json.loads, lines) if found["git"] == self.git}

    def bring_back(self) -> None:
        """Put the runs of claims that were brought home where they are continued."""
        if (runs := self.home / RUNS).exists():
            shutil.copytree(runs, self.folder / RUNS, dirs_exist_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record, and copy everything to ``$OUT``, each file by rename: the machine may end at any moment."""
        make_folder(self.home)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"git": self.git, "versions": versions()}) + "\n")
        if out := os.environ.get("OUT"):
            logs = [*self.folder.glob("*.log"), *self.folder.rglob("operators.txt")]
            logs += [path for name in RUN_FILES for path in (self.folder / RUNS).rglob(name)]
            for path in [*self.home.rglob("*.json*"), *logs]:
                copy = Path(out) / self.machine / path.relative_to(self.folder if path in logs else self.home)
                make_folder(copy.parent)
                shutil.copyfile(path, copy.with_name(".part"))
                copy.with_name(".part").replace(copy)


def run_stage(stage: Stage, options: GpuOptions, outcomes: Outcomes, given: list[str], limit_s: float) -> str:
    """Run one stage, record it, and return how it ended."""
    folder, log = outcomes.folder / stage.name / "run", outcomes.folder / f"{stage.name}.log"
    line, began, code = options.command(stage, given, limit_s), time.monotonic(), None
    shutil.rmtree(folder, ignore_errors=True)  # of another commit, or cut
    make_folder(outcomes.folder)
    try:
        code = in_a_process(line, log, limit_s, _STOP_S)
        # Of claims another call may test more, and repeats none; any other claim ends when its budget does.
        cut = "budget=" in stage.command and limit_s < stage.limit_s and time.monotonic() - began >= limit_s - _LEAST_S
        status = FAILED if code else CUT if cut or stage.name == "claims" else DONE
    except subprocess.TimeoutExpired:
        status = TOO_LONG if limit_s == stage.limit_s else CUT
    record: dict[str, Any] = {"stage": stage.name, "status": status, "exit_code": code, "command": line[1:]}
    record |= {"seconds": round(time.monotonic() - began, 1), "summary": read_object(folder / SUMMARY_FILE)}
    record["last_lines"] = log.read_text(encoding="utf-8", errors="replace").split("\n")[-8:]
    outcomes.add(record)
    print(f"{stage.name}: {status}{figures(record['summary'])}{f', goal {stage.goal}' if stage.goal else ''}")
    return status


def figures(summary: dict[str, Any]) -> str:
    """Return speed, share of the matmul rate and memory of a run, as far as it has them."""
    found = ""
    if speed := summary.get("units_per_s"):
        found += f", {quantity(speed)} {summary['unit']}/s"
    if mfu := (summary.get("utilisation") or {}).get("mfu"):
        found += f", {mfu:.0%} of the matmul rate"
    if peak := summary.get("peak_memory_bytes"):
        found += f", {peak / 2**30:.1f} GiB"
    return found


def run_stages(options: GpuOptions, outcomes: Outcomes, given: list[str]) -> None:
    """Run the stages that have not ended at this commit, or those that are named, until the budget ends."""
    end = time.monotonic() + seconds_of(options.budget)
    for stage in STAGES:
        status = outcomes.records().get(stage.name, {}).get("status", CUT)
        if stage.name not in options.only if options.only else status != CUT:
            continue
        left_s = end - time.monotonic()
        if left_s < _LEAST_S:
            print(f"{stage.name}: left for the next call")
        elif run_stage(stage, options, outcomes, given, min(stage.limit_s, left_s)) != DONE and stage.name == "gate":
            print("the gate failed: mend that first; only=… runs what it names all the same")
            return


def rates(hardware: Hardware) -> dict[str, Any]:
    """Return versions, the rates of matmuls (10^12 FLOP/s) and that of copies (10^9 bytes read and written)."""
    count = 2**32 if hardware.is_gpu else 2**26
    source = torch.ones(count, dtype=torch.uint8, device=hardware.device)
    target = torch.empty_like(source)
    copy = stopwatch(lambda _: target.copy_(source), hardware.device)
    copy(1)
    found = {"hardware": hardware.facts(), "versions": versions(), "product_tflops": product_rates(hardware)}
    return found | {"copy_gb_per_s": 2 * count / min(copy(1) for _ in range(5)) / 1e9}


def main(arguments: list[str]) -> int:
    """Run the stages; the exit code is 1 where one failed.

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
    if (out := os.environ.get("OUT")) and not Path(out).is_dir():
        raise UserError(f"OUT={out} is not a folder; create it, or unset OUT")
    if not (hardware.is_gpu or options.reduced):
        raise UserError("there is no CUDA GPU here; set reduced=true to rehearse on a CPU")
    folder = options.output_dir.absolute()
    machine = machine_name(hardware)
    outcomes = Outcomes(machine, folder if options.reduced else RESULTS / machine, folder)
    if not options.reduced:
        outcomes.bring_back()
    run_stages(options, outcomes, given)
    return int(any(record["status"] in (FAILED, TOO_LONG) for record in outcomes.records().values()))


if __name__ == "__main__":
    sys.exit(run(main, __doc__, continues=True))
