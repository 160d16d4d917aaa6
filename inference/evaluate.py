"""The command of scripts/evaluate.py: a trained model's metrics, in one precision or in several."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.data import open_data, part_of, tokens_per_byte
from inference.load import Exported
from inference.options import EvaluateOptions
from inference.precisions import BATCHES, Measured, compared, verdict
from inference.precisions import table as precision_table
from inference.run_config import RunConfig, configure
from mantissa.display import counted, loss
from mantissa.tensors import synchronise
from recipes.causal_lm import CausalLM
from trainer.config.compose import check_single, combinations, key_of
from trainer.config.options import parse
from trainer.data.contract import Batch, fingerprint
from trainer.data.evaluation import Evaluation
from trainer.errors import UserError
from trainer.files import TRACKING_FILE, read_object, write_json
from trainer.metrics import Metrics, reported
from trainer.parallel.world import World
from trainer.precision.kernels import in_short
from trainer.terminal import on_error_stream, work
from trainer.tracking.datasets import DIGEST_LENGTH

CLASSES_SHOWN = 30
"""Classes in the terminal's table; of more, those with the lowest F1."""
SURE = 0.5
"""Probability above which an image that may have several labels is given one."""
_SCORES = ("precision", "recall", "f1", "samples")


@on_error_stream()
def evaluate(arguments: list[str]) -> int:
    """Evaluate a trained model, print its metrics, and write them."""
    logging.basicConfig(format="warning: %(message)s")
    options, overrides = parse(arguments, EvaluateOptions, "overrides")
    evaluation(options.find(), options, overrides)
    return 0


def evaluation(exported: Exported, options: EvaluateOptions, overrides: Sequence[str]) -> dict[str, Any]:
    """Evaluate a trained model, print its metrics, and return what is written into a file about them.

    Of the options ``split`` and ``output`` are used. Several values of ``precision`` in the overrides are compared.

    Raises:
        UserError: an override that has no effect, data that does not suit the model, or files that cannot be written.
    """
    others = [override for override in overrides if key_of(override).partition(".")[0] != "precision"]
    check_single(others, "only those of precision= are compared; set one")
    arms = combinations(overrides)
    several = len(arms) > 1
    # Mistakes come before any work.
    runs = {label: configure(exported, typed, split=options.split) for label, typed in arms.items()}
    print("opening the data and the model …")
    results = {label: measure(exported, run, options.split, BATCHES if several else 1) for label, run in runs.items()}
    run, result = list(runs.values())[-1], list(results.values())[-1]
    unit, about = run.config.recipe.unit, result.about
    left_out = f"; {about['left_out']:,} more left out (eval_samples={about['samples']})" if about["left_out"] else ""
    print(f"{exported.folder}, {about['data']}")
    print(f"{about['samples']:,} samples of split={options.split} in batches of {about['batch_size']}{left_out}")
    if note := _not_its_own(exported, overrides, options.split, about["digest"]):
        print(f"warning: {note}")
    print()
    folder = Path(options.output).expanduser() if options.output else exported.results / "evaluation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={folder} cannot be written ({error.strerror}); choose another") from error
    facts: dict[str, Any] = {
        "run": str(exported.run.path) if exported.run else None,
        "weights": str(exported.folder),
        "recipe": exported.recipe,
        **about,
        "hardware": run.hardware.name,
    }
    if several:
        facts["precisions"] = _several(results, unit)
    else:
        mode, how = run.config.precision.mode, in_short(result.not_timed)
        print("  ".join(f"{name} {loss(value)}" for name, value in result.metrics.items()))
        print(f"{result.units_per_s:,.0f} {unit}/s in {mode}{how}")
        facts |= {"precision": mode} | _facts(result, unit)
        if result.given:
            write_classes(folder, result)
    write_json(folder / ("precisions.json" if several else "evaluation.json"), facts)
    print(f"\nwritten to {folder}")
    return facts


def measure(exported: Exported, run: RunConfig, split: str, at_least: int) -> Measured:
    """Open data and model in the precision of the run, and evaluate the samples of ``split``.

    Batches are of ``micro_batch_size``, or smaller so that there are ``at_least`` so many.

    Raises:
        UserError: the data does not suit the model, the files cannot be read, or there are too few samples.
    """
    run, datasets = run.with_data(open_data(run, exported, split))
    part = part_of(datasets, split, run.config.data)
    config, device, recipe = run.config, run.hardware.device, run.config.recipe
    samples = min(len(part), run.eval_samples or len(part))
    if samples < at_least:
        remedies = [f"eval_samples={at_least}"] if len(part) >= at_least else []
        more = "" if remedies else "; give more data"
        raise UserError(
            f"{counted(samples, 'sample')} cannot fill the {at_least} batches of an interval{more}", *remedies
        )
    size = min(int(config.micro_batch_size), samples // at_least)
    model = run.in_precision(exported.model(recipe, datasets, config.precision.loaded_dtype))
    metrics = Metrics(recipe, datasets, config.metrics, device)
    classes: list[str] = getattr(datasets, "classes", [])
    sums: list[dict[str, Tensor]] = []
    targets, units, given, first = [], [], [], time.perf_counter()

    def forward(batch: Batch, counts: bool) -> dict[str, Tensor]:
        with config.precision.autocast(device):
            output = recipe.loss(model, batch)
        metrics.update(output)
        sums.append({"loss": output.loss_sum, **output.metric_sums})
        if classes and output.predictions is not None:
            several = output.targets.ndim > 1
            given.append((output.targets, output.predictions if several else output.predictions.argmax(1)))
        return sums[-1]

    def count(batch: Batch) -> int:
        targets.append(recipe.count_targets(batch))
        units.append(recipe.count_units(batch))
        return targets[-1]

    def progress(done: int, total: int) -> None:
        nonlocal first
        advance(done, total)
        if done == 1 < total:  # it also warms up
            units.clear()
            synchronise(device)
            first = time.perf_counter()

    batches = Evaluation(part, run.eval_samples, size, config.loader, run.hardware, World())
    with torch.inference_mode(), work(f"evaluating in {config.precision.mode}", unit="batches") as advance:
        summed = batches.sums(forward, count, progress)
    assert summed is not None, "nothing stops it"
    totals, count_of_targets = summed
    seconds = time.perf_counter() - first
    values = reported(recipe, totals, count_of_targets) | metrics.values(World())
    if isinstance(recipe, CausalLM) and (rate := tokens_per_byte(datasets, split)):
        values["bits_per_byte"] = values["loss"] / math.log(2) * rate
    about: dict[str, Any] = {"data": datasets.description, "split": split, "digest": fingerprint(part)[:DIGEST_LENGTH]}
    about |= {"samples": samples, "left_out": len(part) - samples}
    return Measured(
        values,
        np.array(targets),
        {name: torch.stack([batch[name] for batch in sums]).double().cpu().numpy() for name in sums[0]},
        about | {"targets": count_of_targets, "batch_size": size},
        sum(units) / seconds,
        run.not_timed(model),
        classes,
        given,
    )


def _not_its_own(exported: Exported, overrides: Sequence[str], split: str, digest: str) -> str:
    """Return that a run's data is not what it was in training; empty: it is, or what is typed asks for other samples.

    Args:
        exported: the trained model.
        overrides: of its config.
        split: of the data.
        digest: of that part, as the run keeps it for MLflow.
    """
    chosen = {key_of(override).partition(".")[0] for override in overrides}
    if exported.run is None or not chosen.isdisjoint(("data", "recipe", "augment", "seed")):
        return ""
    context = {"valid": "validation", "train": "training"}.get(split)
    kept = read_object(exported.run.path / TRACKING_FILE).get("datasets", [])
    if not {entry["digest"] for entry in kept if entry["context"] == context} - {digest}:
        return ""
    return (
        f"these are not the samples of split={split} that {exported.run.path} had in training: its data has changed "
        "since, so these scores are not to be compared with the run's own"
    )


def _facts(result: Measured, unit: str) -> dict[str, Any]:
    return {"metrics": result.metrics, f"{unit}_per_s": result.units_per_s, "not_timed": result.not_timed}


def _several(results: dict[str, Measured], unit: str) -> dict[str, Any]:
    """Print the results of several precisions, and return what precisions.json holds of each."""
    costs = compared(results)
    first, *others = results
    print(precision_table(results, costs, unit), end="\n\n")
    sentences = {label: verdict(label, first, costs[label]["loss"], results[first].metrics["loss"]) for label in others}
    print("\n".join(sentences.values()))
    facts = {label: _facts(result, unit) for label, result in results.items()}
    for label, sentence in sentences.items():
        intervals = {name: cost and asdict(cost) for name, cost in costs[label].items()}
        facts[label] |= {"costs": intervals, "verdict": sentence}
    return facts


def write_classes(folder: Path, result: Measured) -> None:
    """Print how well a classifier does on each class, and write classes.csv; of one label an image also confusion.csv.

    They have the classes that occur or were given; a number without a denominator is left out.
    """
    import pandas as pd
    from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_fscore_support

    labels, given = (torch.cat(parts).cpu().numpy() for parts in zip(*result.given, strict=True))
    if labels.ndim > 1:
        present = np.flatnonzero(labels.any(0) | (given > SURE).any(0))
        labels, given = labels[:, present], given[:, present]
        scores = precision_recall_fscore_support(labels, given > SURE, zero_division=np.nan)
        table = pd.DataFrame(dict(zip(_SCORES, scores, strict=True)), [result.classes[index] for index in present])
        pairs = zip(labels.T, given.T, strict=True)
        table["average_precision"] = [average_precision_score(*pair) if pair[0].any() else np.nan for pair in pairs]
        _write_table(folder, table)
        return
    present = np.union1d(labels, given).tolist()  # the model may have more outputs than the data has classes
    names = [result.classes[index] if index < len(result.classes) else str(index) for index in present]
    scores = precision_recall_fscore_support(labels, given, labels=present, zero_division=np.nan)
    _write_table(folder, pd.DataFrame(dict(zip(_SCORES, scores, strict=True)), names))
    cells = confusion_matrix(labels, given, labels=present)
    pd.DataFrame(cells, names, names).to_csv(folder / "confusion.csv", index_label="class \\ given")


def _write_table(folder: Path, table: Any) -> None:
    table.to_csv(folder / "classes.csv", index_label="name")
    shown = table if len(table) <= CLASSES_SHOWN else table.sort_values("f1").head(CLASSES_SHOWN)
    print(f"\n{shown.to_string(float_format='{:.3f}'.format, na_rep='–')}")
