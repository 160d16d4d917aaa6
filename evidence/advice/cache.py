"""The folder of the advice: what was measured, to continue from, and the answer, to give again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.advice.schema import Advice, Candidate, Entry, Log
from evidence.intervals import Interval
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.data.loader import fingerprint
from trainer.files import PROJECT, read_object, write_json
from trainer.hardware import Hardware
from trainer.run.provenance import versions

ANSWER, STATE = "advice.json", "state.json"
_CODE = ("trainer", "recipes", "conf")
_ELSEWHERE = ("output_dir", "tracking", "run_name")
"""Options that change nothing that is measured."""


def identity(overrides: Sequence[str], goal: str, quality: bool, hardware: Hardware) -> dict[str, Any]:
    """Return everything that an answer depends on; where it differs, all is measured again.

    Raises:
        UserError: train.py would refuse the overrides, or their data.
    """
    config = compose(overrides)
    return {
        "overrides": sorted(each for each in overrides if each.partition("=")[0].partition(".")[0] not in _ELSEWHERE),
        "goal": goal,
        "quality": quality,
        "config": hashlib.sha256(repr(_options(config)).encode()).hexdigest()[:16],
        "data": fingerprint(config.resolve(hardware).config.open_datasets()),
        "code": _digest(),
        "hardware": hardware.facts(),
        "versions": versions(),
    }


def folder_name(recipe: str, of: dict[str, Any]) -> str:
    """Return the name of the folder, which the options of the command decide alone."""
    options = {key: of[key] for key in ("overrides", "goal", "quality")}
    return f"{recipe}-{hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]}"


def _options(config: Config) -> dict[str, Any]:
    """Return all options, also those that a file of the user's own sets."""
    return {key: value for key, value in flatten(config).items() if key.partition(".")[0] not in _ELSEWHERE}


def _digest() -> str:
    """Return a hash of the code and the configuration of training; advised experiments are no part of it."""
    digest = hashlib.sha256()
    for top in _CODE:
        for path in sorted((PROJECT / top).rglob("*")):
            if path.suffix in (".py", ".yaml") and not path.name.startswith("advised_"):
                digest.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def changed(of: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return in words what differs between two identities."""
    names = {
        "config": "the options of a file in conf/",
        "data": "the data",
        "code": "the code",
        "hardware": "the hardware",
        "versions": "installed versions",
    }
    of = json.loads(json.dumps(of))
    return [names.get(key, key) for key in of if of[key] != before.get(key)]


def load(folder: Path) -> tuple[dict[str, Any], Log, dict[str, Any]]:
    """Return the identity and the log of an earlier call, and what else it saved; empty ones where there are none."""
    state = read_object(folder / STATE)
    try:
        return state["of"], Log.from_dict(state["log"]), state["more"]
    except (KeyError, TypeError):
        return {}, Log(), {}


def save(folder: Path, of: dict[str, Any], log: Log, more: dict[str, Any]) -> None:
    """Write them."""
    write_json(folder / STATE, {"of": of, "log": log.to_dict(), "more": more})


def write(advice: Advice, folder: Path) -> Path:
    """Write ``advice.json``."""
    write_json(folder / ANSWER, asdict(advice))
    return folder / ANSWER


def read(folder: Path) -> Advice | None:
    """Return the advice that was written; None: there is none that this version can read."""
    content = read_object(folder / ANSWER)
    try:
        entries = [_entry(each) for each in content.pop("entries")]
        if "steps" not in content["exhaustive"]:  # by an earlier version, which compared steps instead of runs
            content["exhaustive"] = {}
        return Advice(**content, entries=entries)
    except (KeyError, TypeError):
        return None


def _entry(content: dict[str, Any]) -> Entry:
    candidate = content.pop("candidate")
    speed, run_speed = (content.pop(name) for name in ("speed", "run_speed"))
    return Entry(
        Candidate(candidate["label"], tuple(candidate["overrides"]), candidate["threads"]),
        speed=None if speed is None else Interval(**speed),
        run_speed=None if run_speed is None else Interval(**run_speed),
        **content,
    )
