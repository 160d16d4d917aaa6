"""The exact-resume certificate: a job run once without interruption and once killed repeatedly, compared."""

from __future__ import annotations

import random
import re
import shlex
import sys
from argparse import Namespace
from collections import Counter
from typing import Any

from evidence.certificate.child import METRICS_LEFT, Kill
from evidence.options import CertifyOptions
from evidence.runs import merged, recorded
from mantissa.commands import certify as library
from mantissa.commands.certify import OUT
from mantissa.errors import UsageError
from mantissa.formats import FORMATS
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import write_json
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


METRIC = re.compile(r"^traced step (\d+): ({.*})")
DATA = re.compile(r"^traced step (\d+) data (.*)")


def main(arguments: list[str]) -> int:
    """Certify, print the certificate, and return its exit code."""
    options, overrides = parse(arguments, CertifyOptions, "overrides")
    found = certify(overrides, options)
    print("\n".join([found["verdict"], *(f"- {sentence}" for sentence in found["lost"]), *found["facts"]]))
    return int(found["exit_code"])


def certify(overrides: list[str], options: CertifyOptions, child: str = "evidence.certificate.child") -> dict[str, Any]:
    """Run a job undisturbed and killed, in separate processes of the module ``child``, and compare.

    Raises:
        UserError: the folder exists, or a run failed.
    """
    given = dict(override.partition("=")[::2] for override in overrides)
    recipe, precision = given.get("recipe", "gpt2"), given.get("precision", "fp32")
    folder = options.output_dir.absolute() / f"certificate-{recipe}-{precision}"
    if folder.exists():
        raise UserError(f"{folder} exists; remove it, or choose another with output_dir=…")
    steps = int(given.get("steps", 2 * options.kills + 10))
    scaled = precision in FORMATS and FORMATS[precision].needs_loss_scale
    defaults = [f"steps={steps}", *COMMON, *DEFAULTS.get(recipe, []), *(SKIPPING if scaled else [])]
    job = merged(defaults, overrides)
    kinds = [kind for kind in KINDS_OF_KILL if kind != "skip" or scaled]
    kills = _planned_kills(random.Random(options.seed), kinds, options.kills, steps)
    command, *dying = (
        f"exec {shlex.join([sys.executable, '-m', child, kill, *job])} output_dir={OUT} run_name=run resume=auto"
        for kill in ("none", *(kill.text() for kill in kills))
    )
    saved = f"{OUT}/run/checkpoints/step-{steps:08d}"
    same = [f"{saved}/*.safetensors", f"{saved}/state.json", f"{OUT}/run/{METRICS_LEFT}"]
    try:
        found = library.certify(
            Namespace(
                command=command, metric=METRIC, data=DATA, same=same, max_ulp=options.max_ulp, report=folder, clean=None
            ),
            dying,
        )
    except UsageError as error:
        raise UserError(str(error)) from None
    died = Counter(start["last_line"] for start in found["starts"] if start["killed"])
    found["kinds"] = {kind: died[f"killed: {kind}"] for kind in KINDS_OF_KILL}
    found["skipped_steps"] = (folder / "whole.log").read_text().count('"skipped": true')
    found["facts"] += [f"{count} killed {KINDS_OF_KILL[kind]}." for kind, count in found["kinds"].items() if count]
    found["facts"].append(f"{found['skipped_steps']} steps were skipped.")
    found["command"] = (
        f"python scripts/certify.py {' '.join(recorded(overrides))} kills={options.kills} seed={options.seed}"
    )
    facts = {"hardware": detect("auto").facts(), "versions": versions(), "git": git_facts(), "job": recorded(job)}
    write_json(folder / "certificate.json", found | facts)
    return found


def _planned_kills(generator: random.Random, kinds: list[str], kills: int, steps: int) -> list[Kill]:
    """Return the kills in the order of their steps, with every kind equally often."""
    chosen = [kinds[number % len(kinds)] for number in range(kills)]
    generator.shuffle(chosen)
    moments = sorted(generator.randrange(FIRST_KILL, steps - 1) for _ in range(kills))
    counts = {"accumulation": (2, ACCUMULATION), "save": (1, 7), "evaluation": (2, 2)}
    return [
        Kill(kind, step, generator.randint(*counts.get(kind, (0, 0))))
        for kind, step in zip(chosen, moments, strict=True)
    ]
