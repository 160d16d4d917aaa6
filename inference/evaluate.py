"""The command of scripts/evaluate.py: a trained model's metrics, in one precision or in several."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.classes import class_scores, table, write_classes
from inference.exported import Exported
from inference.measure import Evaluation, measure
from inference.options import EvaluateOptions
from inference.precisions import BATCHES, compared, verdict
from inference.precisions import table as precision_table
from inference.setting import configure
from mantissa.display import loss
from trainer.config.compose import combinations
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import make_folder, write_json
from trainer.run.terminal import on_error_stream


@on_error_stream()
def evaluate(arguments: list[str]) -> int:
    """Evaluate a trained model, print its metrics, and write them; with ``-m`` in several precisions."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, EvaluateOptions, "overrides")
    evaluation(options.find(), options, [each for each in overrides if each != "-m"], "-m" in overrides)
    return 0


def evaluation(exported: Exported, options: EvaluateOptions, overrides: Sequence[str], several: bool) -> dict[str, Any]:
    """Evaluate a trained model, print its metrics, and return what is written into a file about them.

    Args:
        exported: the trained model.
        options: ``split`` and ``output`` are used.
        overrides: of its config.
        several: whether they name several precisions.

    Raises:
        UserError: an override that has no effect, data that does not suit the model, or files that cannot be written.
    """
    folder = Path(options.output).expanduser() if options.output else exported.results / "evaluation"
    # Mistakes come before any work.
    if not options.output and folder.is_symlink():
        raise UserError(f"{folder} is a link; remove it, or choose where to write with output=…")
    arms = _arms(overrides, several)
    settings = {label: configure(exported, own, split=options.split) for label, own in arms.items()}
    print("opening the data and the model …")
    results = {
        label: measure(exported, setting, options.split, BATCHES if several else 1)
        for label, setting in settings.items()
    }
    label, setting = next(reversed(settings.items()))
    result, unit = results[label], setting.config.recipe.unit
    print(f"{exported.folder}, {result.data}")
    print(f"{result.samples:,} samples of split={options.split} in batches of {result.batch_size}{result.rest}\n")
    try:
        make_folder(folder)
    except OSError as error:
        raise UserError(
            f"output={folder} cannot be written ({error.strerror}); choose another with output=…"
        ) from error
    facts: dict[str, Any] = {
        "run": str(exported.run.path) if exported.run else None,
        "weights": str(exported.folder),
        "recipe": exported.recipe,
        "data": result.data,
        "split": options.split,
        "samples": result.samples,
        "targets": int(result.targets.sum()),
        "batch_size": result.batch_size,
        "hardware": setting.hardware.name,
        "time": time.time(),
    }
    if several:
        facts |= {"precisions": _several(results, unit)}
    else:
        mode = setting.config.precision.mode
        facts |= {"precision": mode} | _one(folder, mode, unit, result)
    write_json(folder / ("precisions.json" if several else "evaluation.json"), facts)
    print(f"\nwritten to {folder}")
    return facts


def _arms(overrides: Sequence[str], several: bool) -> dict[str, list[str]]:
    """Return the overrides of every arm by its label: one without ``-m``, one for each precision with it."""
    found = combinations(overrides)
    swept = [override.partition("=")[0] for override in overrides if len(combinations([override])) > 1]
    if several and (not swept or any(key.partition(".")[0] != "precision" for key in swept)):
        raise UserError("-m compares precisions on the same samples; use it as in -m precision=fp32,bf16,fp16")
    if not several and swept:
        raise UserError(f"{swept[0]} has several values; add -m to compare them")
    return found


def _measured(result: Evaluation, unit: str) -> dict[str, Any]:
    return {"metrics": result.metrics, f"{unit}_per_s": result.units_per_s, "fp32_arithmetic": result.not_timed}


def _one(folder: Path, mode: str, unit: str, result: Evaluation) -> dict[str, Any]:
    """Print the results of one precision, write the tables of a classifier, and return what evaluation.json holds."""
    print("  ".join(f"{name} {loss(value)}" for name, value in result.metrics.items()))
    wide = " (fp32 arithmetic)" if result.not_timed else ""
    print(f"{result.units_per_s:,.0f} {unit}/s in {mode}{wide}")
    found = _measured(result, unit)
    if result.confusion is not None:
        scores = class_scores(result.confusion, result.classes)
        print(f"\n{table(scores)}")
        write_classes(folder, result.confusion, result.classes, scores)
        found["classes"] = [score._asdict() for score in scores]
    return found


def _several(results: dict[str, Evaluation], unit: str) -> dict[str, Any]:
    """Print the results of several precisions, and return what precisions.json holds of each."""
    costs = compared(results)
    first, *others = results
    print(precision_table(results, costs, unit), end="\n\n")
    sentences = {label: verdict(label, first, costs[label]["loss"], results[first].metrics["loss"]) for label in others}
    print("\n".join(sentences.values()))
    return {
        label: _measured(result, unit)
        | {
            "costs": {name: cost._asdict() for name, cost in costs.get(label, {}).items()},
            "verdict": sentences.get(label),
        }
        for label, result in results.items()
    }
