"""fp32 arithmetic on 16-bit operands beside torch's own kernels: steps, operators, training, on this CPU.

  python benchmarks/kernels.py steps        time of a training step: formats × recipes × kernels, in turns
  python benchmarks/kernels.py training     200 steps with either kernels, from the same and from shaken weights

  rounds=8         steps of each arm that are timed; native=2: of torch's own kernels, where they are slow
  only=gpt2        one recipe
Each row is printed as JSON as soon as it is known, and all of them as a table at the end.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mantissa.statistics import ratio_interval
from trainer.config.compose import compose
from trainer.hardware import NATIVE, detect
from trainer.precision import kernels
from trainer.trainer import StepRecord, Trainer

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMMON = ("device=cpu", "steps=100000", "schedule=constant", "schedule.warmup_steps=0", "checkpoint=none")
RECIPES = {
    "gpt2 mini": "recipe=gpt2 recipe.size=mini data=synthetic data.vocab_size=4096 batch_size=4",
    "resnet18": "recipe=resnet recipe.arch=resnet18 recipe.image_size=64 data=synthetic data.classes=10 batch_size=32",
    "bignet": "recipe=bignet",
}
SMALL = {
    "gpt2 nano": "recipe=gpt2 recipe.size=nano recipe.context=16 data=python_docs data.tokenizer=chars batch_size=4",
    "resnet18": "recipe=resnet recipe.arch=resnet18 batch_size=4",
    "bignet": "recipe=bignet recipe.width=128 recipe.layers=6 data.samples=4096 batch_size=64",
}
STEPS, SEEDS = 200, 2


class Arm:
    """One trainer, whose steps are timed one by one."""

    def __init__(self, line: str, precision: str, setting: str) -> None:
        options = [*line.split(), *COMMON, f"precision={precision}"]
        if precision != "fp32":
            options.append(f"precision.kernels={setting}")
        self.trainer = Trainer.from_config(compose(options))
        self.batches = self.trainer.batches()
        self.seconds: list[float] = []

    def step(self) -> None:
        """Take a step with this arm's own kernels, and note its time."""
        kernels.clear()  # fp32 does not pay for kernels that it does not need
        self.trainer.config.precision.apply(self.trainer.kernels)
        batch = next(self.batches)
        began = time.perf_counter()
        self.trainer.train_step(batch).loss.item()
        self.seconds.append(time.perf_counter() - began)


def steps(rounds: int, native: int, only: str) -> Iterator[dict[str, Any]]:
    """Time a step of each recipe in fp32 twice (a null pair), and in both formats with both kernels, in turns."""
    for name, line in RECIPES.items():
        if only not in name:
            continue
        settings = [("fp32", "native"), *itertools.product(FORMATS, ("auto", "native"))]
        arms = {(precision, setting): Arm(line, precision, setting) for precision, setting in settings}
        arms["fp32", "again"] = Arm(line, "fp32", "native")
        slow = {arm for arm in arms if arm[1] == "native" and arm[0] != "fp32" and _lacks(arm[0])}
        for number in range(rounds + 1):
            for key in list(arms) if number % 2 else reversed(arms):
                if key not in slow or number <= native:
                    arms[key].step()
        base = arms["fp32", "native"].seconds[1:]
        for (precision, setting), arm in arms.items():
            times = arm.seconds[1:]
            ratios = [one / other for one, other in zip(times, base, strict=False)]
            interval = (
                ratio_interval(ratios) if len(ratios) > 2 and (precision, setting) != ("fp32", "native") else None
            )
            yield {
                "recipe": name,
                "command": f"python scripts/train.py {line} precision={precision}",
                "precision": precision,
                "kernels": setting,
                "arithmetic": arm.trainer.kernels,
                "step_ms": [round(1e3 * each, 2) for each in times],
                "over_fp32": round(statistics.median(ratios), 4),
                "interval": interval and [round(interval.low, 4), round(interval.high, 4)],
            }


def training(_: int, __: int, only: str) -> Iterator[dict[str, Any]]:
    """Train 200 steps with torch's kernels, with fp32 arithmetic, and with torch's from weights half a unit off."""
    for (name, line), (precision, dtype), seed in itertools.product(SMALL.items(), FORMATS.items(), range(SEEDS)):
        if only not in name:
            continue
        options = [*line.split(), "device=cpu", f"steps={STEPS}", f"seed={seed}", f"precision={precision}"]
        options += ["scaler=dynamic", "scaler.init=4294967296", "scaler.interval=40"] * (precision == "fp16")
        curves, skipped = {}, {}
        for arm in ("native", "fp32", "null"):
            setting = "fp32" if arm == "fp32" else "native"
            trainer = Trainer.from_config(compose([*options, f"precision.kernels={setting}"]))
            if arm == "null":
                _shake(trainer, dtype)
            batches = trainer.batches()
            records: list[StepRecord] = [trainer.train_step(next(batches)) for _ in range(STEPS)]
            trainer.close()
            curves[arm] = torch.stack([record.loss.detach().double() for record in records])
            skipped[arm] = sum(int(record.skipped.item()) for record in records)
        ends = {arm: curve[-20:].mean().item() for arm, curve in curves.items()}
        distance = {arm: (curve - curves["native"]).abs().mean().item() for arm, curve in curves.items()}
        yield {"recipe": name, "command": f"python scripts/train.py {' '.join(options)}", "precision": precision} | {
            "seed": seed,
            "last_20": {arm: round(value, 6) for arm, value in ends.items()},
            "mean_distance": {arm: round(value, 8) for arm, value in distance.items()},
            "skipped": skipped,
        }


@torch.no_grad()
def _shake(trainer: Trainer, dtype: torch.dtype) -> None:
    """Move every weight by half a unit in the last place of the format, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    for weight in trainer.model.parameters():
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + signs * torch.finfo(dtype).eps / 2)


def _lacks(precision: str) -> bool:
    return detect("cpu").support(precision) != NATIVE


# --- the tables ---

Table = Iterator[Sequence[Any]]
"""The cells of the heading, then those of each row."""


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _steps_table(rows: list[dict[str, Any]]) -> Table:
    yield "recipe", "precision", "kernels", "step, ms", "of the fp32 step"
    for row in rows:
        kind = "fp32 arithmetic" if row["arithmetic"] == kernels.WIDE else "torch's own"
        if row["precision"] != "fp32":
            kind = f"{row['kernels']}: {kind}"
        if row["kernels"] == "again":
            kind = "torch's own, again (null pair)"
        interval = f" [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]" if row["interval"] else ""
        count = "" if len(row["step_ms"]) > 2 else f" ({len(row['step_ms'])} steps)"
        step = f"{statistics.median(row['step_ms']):,.0f}{count}"
        yield row["recipe"], row["precision"], kind, step, f"{row['over_fp32']:.3f}x{interval}"


def _training_table(rows: list[dict[str, Any]]) -> Table:
    ends = ("last 20 steps: torch's own", "fp32 arithmetic", "null")
    distances = ("mean distance: fp32 arithmetic", "null", "ratio")
    yield "recipe", "precision", "seed", *ends, *distances, "skipped steps"
    for row in rows:
        arms, fp32, null = ("native", "fp32", "null"), row["mean_distance"]["fp32"], row["mean_distance"]["null"]
        losses = [f"{row['last_20'][arm]:.5f}" for arm in arms]
        skipped = ", ".join(str(row["skipped"][arm]) for arm in arms)
        apart = (f"{fp32:.2g}", f"{null:.2g}", f"{fp32 / null:.2f}")
        yield row["recipe"], row["precision"], row["seed"], *losses, *apart, skipped


_TABLES = {
    "steps": _steps_table,
    "training": _training_table,
}
MEASUREMENTS = {"steps": steps, "training": training}


def main(arguments: list[str]) -> int:
    """Measure what the first argument names, and print a table."""
    what, *rest = arguments or [""]
    options = dict(argument.split("=", 1) for argument in rest)
    if what not in MEASUREMENTS:
        print(__doc__)
        return 2
    rows = []
    rounds, native = int(options.get("rounds", 8)), int(options.get("native", 2))
    for row in MEASUREMENTS[what](rounds, native, options.get("only", "")):
        print(json.dumps(row), flush=True)
        rows.append(row)
    heading, *lines = _TABLES[what](rows)
    print("\n".join([_line(heading), "|---" * len(heading) + "|", *map(_line, lines)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
