"""The stages of the programme: what each runs, how long it may take, what is kept of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.compose import quoted
from trainer.files import PROJECT

RATES, TESTS, CLAIMS, BENCH = "rates", "tests", "claims", "bench"
GPT2 = ("gpt2_eager", "gpt2_compiled", "gpt2_master")
RESNET = ("resnet50_eager", "resnet50_compiled")
PROFILES = {"gpt2": "gpt2_profile", "resnet50": "resnet50_profile"}
CLAIMS_FOLDER = "claims/reproduce"
"""Of the runs of claims, in the programme's folder."""
KEPT = {
    PROFILES["gpt2"]: ("profile/operators.txt", "operators-gpt2.txt"),
    PROFILES["resnet50"]: ("profile/operators.txt", "operators-resnet50.txt"),
}
"""By stage: a file of its run folder, and the name under which it is kept."""

_QUIET = "tracking=local tracking.epilogue=false checkpoint=none loader=synthetic-on-device log_every=10"
_GPT2 = f"recipe=gpt2 data=synthetic {_QUIET}"
_RESNET = f"recipe=resnet data=synthetic optimizer=sgd optimizer.lr=1e-3 precision=bf16 {_QUIET}"
_FULL_GPT2 = "recipe.size=124M recipe.context=1024 recipe.chunked_loss=false batch_size=32 micro_batch_size=32"
_FULL_RESNET = "recipe.arch=resnet50 recipe.image_size=224"
_SMALL_GPT2 = "recipe.size=nano recipe.context=8 data.vocab_size=64 batch_size=2 micro_batch_size=2 eval_samples=2"
_SMALL_RESNET = (
    "recipe.arch=squeezenet1_1 recipe.image_size=32 data.samples=8 batch_size=2 micro_batch_size=2 eval_samples=2"
)


@dataclass(frozen=True)
class Stage:
    """One process."""

    name: str
    about: str
    command: tuple[str, ...]
    """Of Python: a script or ``-m module``, then its arguments."""
    usual_s: float
    """What it usually takes; with less time than this it is left for the next call."""
    limit_s: float
    """After which it is ended."""

    @property
    def run(self) -> bool:
        """Whether it is one training run, with a folder of its own."""
        return self.command[0].endswith("train.py")


def stages(folder: Path, device: str, reduced: bool, given: Sequence[str]) -> list[Stage]:
    """Return all stages in their order.

    Args:
        folder: of the programme; run folders go to ``folder/runs``.
        device: as for train.py.
        reduced: make everything small enough for a CPU.
        given: overrides that claims ask for, such as ``data.path=…``.
    """
    # A warning of another version, or of a plugin that this project does not use, must not cost the whole stage.
    lenient = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default")
    small = ("-m", "pytest", str(PROJECT / "tests" / "gpu"), "-q", *lenient)
    tests = (*small, "--collect-only") if reduced else (*small, "-n", "4")
    claims = (
        _script("reproduce"),
        "all=true",
        f"device={device}",
        *given,
        f"output_dir={quoted(str(folder / Path(CLAIMS_FOLDER).parent))}",
        *(["reduced=true"] if reduced else []),
    )
    what = ("only=startup", "repeats=1") if reduced else ("only=memory,precision,trainer", "repeats=3")
    bench = (_script("bench"), *what, f"device={device}", f"json={folder / 'bench.json'}")
    rates = ("-P", "-m", "evidence.programme.rates", f"device={device}", f"json={folder / 'rates.json'}")
    plan = [
        Stage(RATES, "versions, the rates of matrix products and of copies", rates, 25, 90),
        Stage(TESTS, "tests/gpu", tests, 120, 270),
        *_training(folder, device, reduced),
        Stage(CLAIMS, "published claims, by value", claims, 60, 3600),
        Stage(BENCH, "bench.py", bench, 150, 300),
    ]
    return [replace(stage, usual_s=stage.usual_s / 10) for stage in plan] if reduced else plan


def _training(folder: Path, device: str, reduced: bool) -> list[Stage]:
    """Return the training runs: the speed of both models, then their operators."""
    gpt2 = f"{_GPT2} {_SMALL_GPT2}" if reduced else f"{_GPT2} {_FULL_GPT2} eval_samples=32"
    resnet = f"{_RESNET} {_SMALL_RESNET}" if reduced else f"{_RESNET} {_FULL_RESNET} eval_samples=256"
    steps = "steps=3 log_every=1" if reduced else "steps=60 eval_every=60"
    compiled = "" if reduced else "compile=default"
    batch, large = ("", "") if reduced else (f"{_batch(256)} data.samples=1024", f"{_batch(512)} data.samples=1024")
    traced = "profiler=torch profiler.record_shapes=false " + (
        "profiler.wait=1 profiler.warmup=1 profiler.active=1 steps=3" if reduced else "steps=12"
    )

    def train(name: str, about: str, overrides: str) -> Stage:
        own = (f"run_name={name}", f"output_dir={quoted(str(folder / 'runs'))}", f"device={device}")
        words = overrides.split()
        usual_s, limit_s = (110, 240) if "compile=default" in words else (60, 150)  # training and evaluation compile
        return Stage(name, about, (_script("train"), *words, *own), usual_s, limit_s)

    return [
        train("gpt2_eager", "GPT-2 124M, 32 × 1024, bf16", f"{gpt2} precision=bf16 {steps}"),
        train("gpt2_compiled", "the same, compiled", f"{gpt2} precision=bf16 {steps} {compiled}"),
        train("gpt2_master", "the same, bf16_master", f"{gpt2} precision=bf16_master {steps} {compiled}"),
        train("resnet50_eager", "ResNet-50, 224², 256 images, bf16", f"{resnet} {steps} {batch}"),
        train("resnet50_compiled", "the same, 512 images, compiled", f"{resnet} {steps} {large} {compiled}"),
        train("gpt2_profile", "the operators of GPT-2's step", f"{gpt2} precision=bf16 {traced}"),
        train("resnet50_profile", "the operators of ResNet-50's step", f"{resnet} {traced} {batch}"),
    ]


def command(stage: Stage) -> list[str]:
    """Return the command line of a stage."""
    return [sys.executable, *stage.command]


def _batch(count: int) -> str:
    return f"batch_size={count} micro_batch_size={count}"


def _script(name: str) -> str:
    return str(PROJECT / "scripts" / f"{name}.py")
