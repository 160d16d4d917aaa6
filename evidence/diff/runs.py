"""What two runs record of themselves: what differs before their first step, and the weights that both kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from mantissa.display import counted
from trainer.checkpoint.reader import load
from trainer.checkpoint.schema import read_manifest, steps
from trainer.config.resume import ELSEWHERE, differences, may_change
from trainer.files import BEST, PRECISION_FILE, RUN_FILE, TRACKING_FILE, read_object
from trainer.run_folder import RunFolder

DATA, CODE = "data", "code"
_HEX = 12
"""Digits of a hash that are compared and shown."""


class Row(NamedTuple):
    """What differs: its name, and what each run has."""

    group: str
    """``options``, or what else of a run it is, see ``facts``."""
    name: str
    a: str
    b: str


class Before(NamedTuple):
    """What two runs record of what was there before their first step."""

    rows: list[Row]
    """What differs, the most telling first: data, options that change what is learnt, other options, where it ran."""
    unknown: dict[str, list[str]]
    """Groups of facts that are not recorded by one of them (a, b), or both."""
    ordering: list[str]
    """What differs of that from which the samples of each step follow: data, seed and batch size."""
    making: list[str]
    """What differs of that from which the first weights follow: the recipe's options, seed and ``init_from``."""


class Kept(NamedTuple):
    """Tensors that two runs kept of the same step."""

    what: str
    """Which they are, in words."""
    differing: list[str]
    """Names of those that differ in any bit, or that only one run has."""
    step: int


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
    rows = [Row("options", key, _shown(one, key), _shown(other, key)) for key in telling]

    # What the precision and the model decide of the rest is no news beside them.
    explained = any(key.startswith(("precision.", "recipe")) for key in options)
    facts_a, facts_b = facts(a), facts(b)
    of_data: list[Row] = []
    of_machine: list[Row] = []
    unknown: dict[str, list[str]] = {}
    for group, known in facts_a.items():
        if missing := [name for name, each in (("a", known), ("b", facts_b[group])) if not each]:
            unknown[group] = missing
            continue
        different = [
            Row(group, f"{group} {key}".strip(), _shown(known, key), _shown(facts_b[group], key))
            for key in dict.fromkeys([*known, *facts_b[group]])
            if known.get(key) != facts_b[group].get(key) and not (explained and key.startswith("effective."))
        ]
        (of_data if group == DATA else of_machine).extend(different)

    # Which samples a step has, and what it starts from, follow from these alone.
    ordering = [row.name for row in of_data if row.name == f"{DATA} training"]
    ordering += [key for key in telling if key in ("seed", "batch_size") or key.startswith("augment")]
    ordering += ["loader"] * ("loader" in options and not may_change("loader", one, other))
    making = [key for key in telling if key in ("seed", "init_from") or key.partition(".")[0] == "recipe"]
    return Before([*of_data, *rows, *of_machine], unknown, ordering, making)


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
    code = {"commit": git["commit"][:_HEX], "with changes": git["dirty"]} if git.get("commit") else {}
    processes = summary.get("processes") or tags.get("processes")
    mantissa = read_object(run.path / RUN_FILE).get("written_by", {})
    return {
        DATA: {
            entry["context"]: f"{counted(entry['samples'], 'sample')}, digest {entry['digest'][:_HEX]}"
            for entry in tracked.get("datasets", ())
        },
        "processes": {"": int(processes)} if processes else {},
        "hardware": {key: value for key, value in hardware.items() if key != "memory_bytes"},
        PRECISION_FILE: {
            f"{part}.{key}": value
            for part in ("effective", "environment")
            for key, value in precision.get(part, {}).items()
            if key not in ("matmul_tflops", "device")  # measured anew, and as in hardware
        },
        "version": versions | mantissa if (versions := summary.get("versions", {})) else {},
        CODE: code,
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
        opened = [load(run.checkpoints, step) for run in (a, b)]  # verified: equal hashes are equal files
        hashes = [read_manifest(each.path)["sha256"].items() for each in opened]
        files = [{name: value for name, value in each if name.endswith(".safetensors")} for each in hashes]
        return Kept(what, [] if files[0] == files[1] else _differing(*(each.tensors() for each in opened)), step)
    best = [(run.summary().get("best") or {}).get("step") for run in (a, b)]
    exported = [_exported(run.path / BEST) for run in (a, b)]
    if best[0] is None or best[0] != best[1] or not all(exported):
        return None
    return Kept(f"the weights in {BEST}/, of step {best[0]}", _differing(*exported), best[0])


def _exported(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an exported model; none: there is none."""
    tensors: dict[str, Tensor] = {}
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
        return "-"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value)
