"""What two runs record of themselves: what differs before their first step, and the weights that both kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from mantissa.display import counted, listed
from trainer.checkpoint.reader import load
from trainer.checkpoint.schema import KINDS, files_of, path_of, read_manifest, steps
from trainer.config.resume import ELSEWHERE, differences, may_change
from trainer.errors import UserError
from trainer.files import BEST, PRECISION_FILE, RUN_FILE, TRACKING_FILE, read_object
from trainer.run_folder import RunFolder

_ABSENT = "-"
_NO_FACTS = ("memory_bytes", "matmul_tflops")
"""What is measured anew by each run, or changes no bit."""


class Row(NamedTuple):
    """What differs: its name, and what each run has."""

    name: str
    a: str
    b: str


class Before(NamedTuple):
    """What two runs record of what was there before their first step."""

    rows: list[Row]
    """What differs, the most telling first: data, options that change what is learnt, other options, where it ran."""
    sentences: list[str]
    """What follows from it: whether the data come in the same order, and the first weights are the same."""
    unknown: list[str]
    """What one of them does not record, in words."""
    options: list[str]
    """The options that differ, by dotted key."""


class Kept(NamedTuple):
    """Tensors that two runs kept of the same step."""

    what: str
    """Which they are, in words."""
    differing: list[str]
    """Names of those that differ in any bit, or that only one run has."""


def before(a: RunFolder, b: RunFolder) -> Before:
    """Return what differs before step 1, as far as both runs record it.

    Raises:
        UserError: a record cannot be read.
    """
    one, other = a.config(), b.config()
    options = {
        key: values
        for key, values in differences(one, other).items()
        if key == "checkpoint.best" or key.partition(".")[0] not in ELSEWHERE
    }
    telling = sorted(options, key=lambda key: may_change(key, one, other))
    rows = [Row(key, _shown(one, key), _shown(other, key)) for key in telling]

    facts_a, facts_b = facts(a), facts(b)
    if any(key.startswith("precision.") for key in options):  # from which the rest follows
        for each in (facts_a, facts_b):
            each["precision.json"] = {key: value for key, value in each["precision.json"].items() if "environ" in key}
    of_data, of_machine, unknown = [], [], []
    for group, known in facts_a.items():
        if missing := [name for name, each in (("a", known), ("b", facts_b[group])) if not each]:
            if not (group == "precision.json" and len(missing) == 2):
                unknown.append(f"{group}: not recorded by {' and '.join(missing)}")
            continue
        different = [
            Row(f"{group}.{key}", _shown(known, key), _shown(facts_b[group], key))
            for key in dict.fromkeys([*known, *facts_b[group]])
            if known.get(key) != facts_b[group].get(key)
        ]
        (of_data if group == "data" else of_machine).extend(different)

    # Which samples a step has, and what it starts from, follow from these alone.
    ordering = [key for key in telling if key in ("seed", "batch_size") or key.startswith("augment")]
    ordering += ["loader"] * ("loader" in options and not may_change("loader", one, other))
    ordering += [row.name for row in of_data if row.name == "data.training"]
    making = [key for key in telling if key in ("seed", "init_from") or key.partition(".")[0] == "recipe"]
    same_data = f"the same, as far as data, seed and batch_size say{' (data: unknown)' * ('data' in ' '.join(unknown))}"
    sentences = [f"samples of each step: {'others, by ' + ', '.join(ordering) if ordering else same_data}"]
    if making:
        sentences.append(f"first weights: may differ, by {', '.join(making)}")
    else:
        sentences.append("first weights: the same, as far as recipe, seed and init_from say")
    return Before([*of_data, *rows, *of_machine], sentences, unknown, telling)


def facts(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return what a run records beside its options, by group; an empty group: it does not record that.

    summary.json is of the end of a run; of one that was killed, tracking.json has most of it.
    """
    summary, tracked = run.summary(), read_object(run.path / TRACKING_FILE)
    params, tags = tracked.get("params", {}), tracked.get("tags", {})
    precision = read_object(run.path / PRECISION_FILE)
    hardware = summary.get("hardware") or {
        key.removeprefix("hardware."): value for key, value in params.items() if key.startswith("hardware.")
    }
    git = summary.get("git") or {"commit": tags.get("mlflow.source.git.commit"), "dirty": tags.get("git.dirty")}
    code = {"commit": git["commit"], "with changes": git["dirty"]} if git.get("commit") else {}
    processes = summary.get("processes") or tags.get("processes")
    return {
        "data": {
            entry["context"]: f"{counted(entry['samples'], 'sample')}, digest {entry['digest']}"
            for entry in tracked.get("datasets", ())
        },
        "processes": {"number": int(processes)} if processes else {},
        "hardware": {key: value for key, value in hardware.items() if key not in _NO_FACTS},
        "precision.json": {
            f"{part}.{key}": value
            for part in ("effective", "environment")
            for key, value in precision.get(part, {}).items()
            if key not in _NO_FACTS
        },
        "versions": summary.get("versions", {}) | read_object(run.path / RUN_FILE).get("written_by", {})
        if summary.get("versions")
        else {},
        "code": code,
    }


def kept(a: RunFolder, b: RunFolder) -> Kept | None:
    """Compare the last checkpoint that both runs kept, or else ``best/``, if both are of one step, bit by bit.

    Returns:
        None: there is neither.

    Raises:
        UserError: a checkpoint is damaged, or of another format.
    """
    if common := sorted({*steps(a.checkpoints)} & {*steps(b.checkpoints)}):
        step = common[-1]
        what = f"weights, optimizer state and generators of checkpoint {step}"
        hashes = [read_manifest(path_of(run.checkpoints, step))["sha256"] for run in (a, b)]
        tensors = [{name: value for name, value in each.items() if name.endswith(".safetensors")} for each in hashes]
        opened = [load(run.checkpoints, step) for run in (a, b)]  # verified, so that equal hashes are equal files
        if tensors[0] == tensors[1]:
            return Kept(what, [])
        return Kept(what, _differing(*(each.tensors() for each in opened)))
    best = [(run.summary().get("best") or {}).get("step") for run in (a, b)]
    exported = [_exported(run.path / BEST) for run in (a, b)]
    if best[0] is None or best[0] != best[1] or not all(exported):
        return None
    return Kept(f"the weights in {BEST}/, of step {best[0]}", _differing(*exported))


def _exported(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an exported model; none: there is none."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return tensors


def _differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    return [
        name for name in dict.fromkeys([*a, *b]) if name not in a or name not in b or not _same_bits(a[name], b[name])
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (a, b)))


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return _ABSENT
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value)
