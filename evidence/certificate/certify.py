"""The exact-resume certificate: a job run once without interruption and once killed repeatedly, compared."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from evidence.certificate.child import Kill
from evidence.certificate.differences import differences_between, trace
from evidence.options import CertifyOptions
from evidence.runs import merged, recorded
from mantissa.differences import Differences
from mantissa.formats import FORMATS
from trainer.config.options import parse
from trainer.errors import RunError, UserError
from trainer.files import PROJECT, SUMMARY_FILE, write_json, write_text
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions

ACCUMULATION = 4
FIRST_KILL = 6
"""The first step at which the job may be killed: after its first checkpoint."""
KINDS_OF_KILL = {
    "accumulation": "between two microbatches of a step",
    "save": "while a checkpoint's files are written",
    "skip": "right after a skipped step",
    "step": "after a step, before it is evaluated or saved",
    "evaluation": "during evaluation",
    "restore": "right after resuming, before the first step",
    "outside": "by another process, at a random moment",
}
DEFAULTS = {
    "gpt2": ["recipe.size=nano", "recipe.context=32", "recipe.dropout=0.1", "data=synthetic", "data.vocab_size=256"],
    "resnet": ["recipe.arch=resnet18", "data=digits", "recipe.image_size=32"],
    "bignet": ["recipe.width=64", "recipe.layers=4"],
}
COMMON = [
    *("batch_size=8", f"micro_batch_size={8 // ACCUMULATION}", "eval_every=5", "eval_samples=6", "log_every=4"),
    *("checkpoint.every=3", "deterministic=true", "tracking=local", "profiler=none", "clip=norm"),
]
# The scale starts too large and grows again soon, so that steps are skipped throughout.
SKIPPING = ["scaler.init=67108864", "scaler.interval=3"]


@dataclass
class Certificate:
    """What was done to a job, and the result."""

    command: str
    verdict: str
    exit_code: int
    """0 BITWISE, 5 within ``max_ulp``, 6 DIVERGED."""
    kills: list[dict[str, Any]]
    resumes: int
    """How often the killed job resumed from a checkpoint."""
    skipped_steps: int
    comparison: Differences
    wall_time_s: float

    def table(self) -> str:
        """Return the certificate as Markdown."""
        c = self.comparison
        rows = [
            ("verdict", self.verdict),
            ("kills", f"{len(self.kills)} with SIGKILL: {self._by_kind()}; {self.resumes} resumed"),
            (
                "steps",
                f"{c.steps}; {self.skipped_steps} were skipped, {c.repeated_steps} were replayed after a kill",
            ),
            ("compared per step", "SHA-256 of the data, learning rate, loss, norm, scale, skipped"),
            ("compared at the end", f"{c.tensors} tensors, numbers and lines of metrics ({c.elements:,} numbers)"),
            ("command", f"`{self.command}`"),
        ]
        rows += [("differs", text) for text in c.lost]
        return "| | |\n|---|---|\n" + "".join(f"| {name} | {text} |\n" for name, text in rows)

    def _by_kind(self) -> str:
        kinds = [kill["killed"] for kill in self.kills]
        return ", ".join(f"{kinds.count(kind)} {KINDS_OF_KILL[kind]}" for kind in KINDS_OF_KILL if kind in kinds)


def main(arguments: list[str]) -> int:
    """Certify, print the certificate, and return its exit code."""
    options, overrides = parse(arguments, CertifyOptions, "overrides")
    result = certify(overrides, options)
    print(result.table())
    print(f"{result.verdict} ({result.wall_time_s:.0f} s)")
    return result.exit_code


def certify(overrides: list[str], options: CertifyOptions, child: str = "evidence.certificate.child") -> Certificate:
    """Run a job twice, in separate processes of the module ``child``, and compare.

    Raises:
        UserError: the folder exists.
        RunError: a run failed.
    """
    began = time.monotonic()
    given = dict(override.partition("=")[::2] for override in overrides)
    recipe, precision = given.get("recipe", "gpt2"), given.get("precision", "fp32")
    folder = options.output_dir.absolute() / f"certificate-{recipe}-{precision}"
    if folder.exists():
        raise UserError(f"{folder} exists; remove it, or choose another with output_dir=…")
    steps = int(given.get("steps", 2 * options.kills + 10))
    scaled = precision in FORMATS and FORMATS[precision].needs_loss_scale
    defaults = [f"steps={steps}", *COMMON, *DEFAULTS.get(recipe, []), *(SKIPPING if scaled else [])]
    job = [*merged(defaults, overrides), f"output_dir={folder}"]
    _train(child, None, [*job, "run_name=whole"])
    resumed = [*job, "run_name=killed", "resume=auto"]
    kinds = [kind for kind in KINDS_OF_KILL if kind != "skip" or scaled]
    for kill in _planned_kills(random.Random(options.seed), kinds, options.kills, steps):
        _train(child, kill, resumed)
    _train(child, None, resumed)
    # Before the first checkpoint there is nothing to resume: the run then starts again, in another folder.
    folders = sorted(folder.glob("killed*"))
    last = next(path for path in folders if (path / SUMMARY_FILE).exists())
    comparison = differences_between(folder / "whole", last, steps)
    lines = [line for path in folders for line in trace(path)]
    verdict, code = comparison.judge(options.max_ulp)
    result = Certificate(
        command=f"python scripts/certify.py {' '.join(recorded(overrides))} kills={options.kills} seed={options.seed}",
        verdict=verdict,
        exit_code=code,
        kills=[line for line in lines if "killed" in line],
        resumes=sum("resumed_after" in line for line in lines),
        skipped_steps=sum(bool(line.get("skipped")) for line in trace(folder / "whole")),
        comparison=comparison,
        wall_time_s=time.monotonic() - began,
    )
    facts = {"hardware": detect("auto").facts(), "versions": versions(), "git": git_facts(), "job": recorded(job)}
    write_json(folder / "certificate.json", asdict(result) | facts)
    write_text(folder / "certificate.md", result.table())
    return result


def _planned_kills(generator: random.Random, kinds: list[str], kills: int, steps: int) -> list[Kill]:
    """Return the kills in the order of their steps, with every kind equally often."""
    chosen = [kinds[number % len(kinds)] for number in range(kills)]
    generator.shuffle(chosen)
    moments = sorted(generator.randrange(FIRST_KILL, steps - 1) for _ in range(kills))
    counts = {"accumulation": (2, ACCUMULATION), "save": (1, 7), "evaluation": (2, 2), "outside": (0, 150)}
    return [
        Kill(kind, step, generator.randint(*counts.get(kind, (0, 0))))
        for kind, step in zip(chosen, moments, strict=True)
    ]


def _train(child: str, kill: Kill | None, job: list[str]) -> None:
    """Run the job until it ends or is killed as planned.

    Raises:
        RunError: it failed, or ended before it was killed.
    """
    command = [sys.executable, "-m", child, kill.text() if kill else "none", *job]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RunError(f"a run ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    if done.returncode == 0 and kill:
        raise RunError(f"the run ended before it could be killed ({kill.text()}); use more steps or fewer kills")
