"""The command of scripts/evaluate.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.classes import class_scores, table, write_classes
from inference.evaluate import Evaluation, Opened, evaluate, open_all
from inference.exported import Exported, RunOptions
from inference.precisions import BATCHES, Cost, compared, verdict
from inference.precisions import table as precision_table
from inference.setting import configure
from mantissa.display import loss
from trainer.config.compose import combinations
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import make_folder, write_json


@dataclass
class EvaluateOptions(RunOptions):
    """Of scripts/evaluate.py."""

    split: str = "valid"
    output: str = ""


def evaluation(arguments: list[str]) -> int:
    """Evaluate a trained model, print its metrics, and write them; with ``-m`` in several precisions."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    several = "-m" in arguments
    options, overrides = parse([each for each in arguments if each != "-m"], EvaluateOptions, "overrides")
    exported = options.find()
    arms = _arms(overrides, several)
    target = Path(options.output).expanduser() if options.output else exported.evaluation
    # Mistakes come before any work.
    settings = {label: configure(exported, own, split=options.split) for label, own in arms.items()}
    print("opening the data and the model …")
    results: dict[str, Evaluation] = {}
    for label, setting in settings.items():
        opened = open_all(exported, setting, options.split)
        results[label] = evaluate(opened, BATCHES if several else 1)
    facts = _facts(exported, opened, options.split, results[label])
    print(f"{exported.folder}, {opened.datasets.description}")
    print(f"{facts['samples']:,} samples of split={options.split} in batches of {facts['batch_size']}\n")
    unit = opened.setting.config.recipe.unit
    folder = _made(target)
    if several:
        _report_several(folder, facts, results, unit)
    else:
        _report_one(folder, facts, opened, results[label], unit)
    return 0


def _arms(overrides: Sequence[str], several: bool) -> dict[str, list[str]]:
    """Return the overrides of every arm by its label: one without ``-m``, one for each precision with it."""
    found = combinations(overrides)
    swept = [key for key in (each.partition("=")[0] for each in overrides) if _values(overrides, key) > 1]
    if several and (len(found) < 2 or any(key.partition(".")[0] != "precision" for key in swept)):
        raise UserError("-m compares precisions on the same samples; use it as in -m precision=fp32,bf16,fp16")
    if not several and len(found) > 1:
        raise UserError(f"{swept[0]} has several values; add -m to compare them")
    return found


def _values(overrides: Sequence[str], key: str) -> int:
    return len(combinations([each for each in overrides if each.partition("=")[0] == key]))


def _facts(exported: Exported, opened: Opened, split: str, result: Evaluation) -> dict[str, Any]:
    config = opened.setting.config
    return {
        "run": str(exported.run.path) if exported.run else None,
        "weights": str(exported.folder),
        "recipe": exported.recipe,
        "data": opened.datasets.description,
        "split": split,
        "samples": result.samples,
        "targets": int(result.targets.sum()),
        "batch_size": result.batch_size,
        "hardware": opened.setting.hardware.name,
        "time": time.time(),
        "precision": config.precision.mode,
    }


def _made(target: Path) -> Path:
    try:
        make_folder(target)
    except OSError as error:
        raise UserError(
            f"output={target} cannot be written ({error.strerror}); choose another with output=…"
        ) from error
    return target


def _report_one(folder: Path, facts: dict[str, Any], opened: Opened, result: Evaluation, unit: str) -> None:
    print("  ".join(f"{name} {loss(value)}" for name, value in result.metrics.items()))
    wide = " (fp32 arithmetic)" if result.not_timed else ""
    print(f"{result.units_per_s:,.0f} {unit}/s in {facts['precision']}{wide}")
    facts |= {"metrics": result.metrics, f"{unit}_per_s": result.units_per_s, "fp32_arithmetic": result.not_timed}
    if result.confusion is not None:
        names = getattr(opened.datasets, "classes", [])
        scores = class_scores(result.confusion, names)
        print(f"\n{table(scores)}")
        write_classes(folder, result.confusion, names, scores)
        facts["classes"] = [score._asdict() for score in scores]
    write_json(folder / "evaluation.json", facts)
    print(f"\nwritten to {folder}")


def _report_several(folder: Path, facts: dict[str, Any], results: dict[str, Evaluation], unit: str) -> None:
    costs = compared(results)
    first, *others = results
    print(precision_table(results, costs, unit), end="\n\n")
    sentences = {label: verdict(label, first, costs[label]["loss"], results[first].metrics["loss"]) for label in others}
    print("\n".join(sentences.values()))
    del facts["precision"]
    facts["precisions"] = {
        label: {
            "metrics": result.metrics,
            f"{unit}_per_s": result.units_per_s,
            "fp32_arithmetic": result.not_timed,
            "costs": {name: Cost._asdict(cost) for name, cost in costs.get(label, {}).items()},
            "verdict": sentences.get(label),
        }
        for label, result in results.items()
    }
    write_json(folder / "precisions.json", facts)
    print(f"\nwritten to {folder}")
