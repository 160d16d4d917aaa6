"""The advice as a choice of ``experiment=``: a YAML below conf/, or where that cannot be written, beside the advice."""

from __future__ import annotations

import datetime
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from evidence.advice.schema import Advice, Candidate
from evidence.runs import merged
from trainer.config.compose import CONF, checked_arguments, compose, quoted
from trainer.config.registration import flatten
from trainer.errors import UserError
from trainer.files import make_folder, write_text

PREFIX = "advised_"
"""Of the files' names: git ignores them, and so do the tests of the project's own YAMLs."""
NOT_ADVISED = ("output_dir", "run_name", "resume", "tracking", "checkpoint", "profiler")
"""Keys and groups that say where and how a run is recorded: those of the advice are not those of later runs."""
WIDTH = 118


class Experiment(NamedTuple):
    """The advice, ready to run."""

    path: Path | None
    """Of the YAML; None: it could not be written."""
    command: str
    """That trains with the advised setting."""
    note: str = ""
    """Why the file is not below conf/, or why there is none."""


def overrides_of(given: Sequence[str], candidate: Candidate) -> list[str]:
    """Return the overrides of train.py that make up a candidate, the user's own (``given``) before it."""
    threads = [] if candidate.threads is None else [f"threads={candidate.threads}"]
    kept = [text for text in given if _key(text).partition(".")[0] not in NOT_ADVISED]
    return merged(kept, candidate.overrides, threads)


def write(advice: Advice, sentence: str, folder: Path, conf: Path) -> Experiment:
    """Write ``experiment/advised_<recipe>_<machine>.yaml``, and return it with the command that runs it.

    The file is replaced by the next advice for the recipe on this machine. It holds what differs from the defaults, and
    is composed once: it gives the config of the winner's command line, or it is not kept.

    Args:
        advice: with a winner that was measured.
        sentence: that says what was found.
        folder: of the advice; the file goes to ``folder/conf`` where ``conf`` cannot be written.
        conf: the folder of the project's YAMLs.
    """
    overrides = overrides_of(advice.overrides, advice.entry(advice.winner).candidate)
    name = f"{PREFIX}{_plain(advice.recipe)}_{_plain(advice.machine)}"
    plain = shlex.join(["python", "scripts/train.py", *overrides])
    if removed := [text for text in overrides if text.startswith("~")]:
        return Experiment(None, plain, f"{removed[0]} removes an option, which an experiment cannot")
    note = ""
    for place in (conf, folder / "conf"):
        path = place / "experiment" / f"{name}.yaml"
        options = [] if place == CONF else [f"--config-dir={place}"]
        command = shlex.join(["python", "scripts/train.py", *options, f"experiment={name}"])
        try:
            content = _tree(overrides, advice.recipe)
            make_folder(path.parent)
            _write(path, _head(advice, sentence, command), content)
            missing = _differences(overrides, name, place)
            if missing:  # what the command line decides by itself, such as a lower learning rate for given weights
                content = _tree(
                    [*overrides, *(f"{key}={quoted(value)}" for key, value in missing.items())], advice.recipe
                )
                _write(path, _head(advice, sentence, command), content)
                missing = _differences(overrides, name, place)
        except OSError as error:
            note = f"{path} cannot be written ({error.strerror})"
            continue
        except UserError as error:
            missing, note = {"": None}, f"an experiment cannot say all of it ({error})"
        if missing:
            path.unlink(missing_ok=True)
            return Experiment(None, plain, note or f"an experiment cannot say all of it ({', '.join(missing)})")
        return Experiment(path, command, note)
    return Experiment(None, plain, note)


def _differences(overrides: Sequence[str], name: str, conf: Path) -> dict[str, Any]:
    """Return the options that the file gives other values than the command line, with those of the command line."""
    search = [] if conf == CONF else [f"hydra.searchpath={quoted([f'file://{conf.absolute()}'])}"]
    wanted, found = flatten(compose(overrides)), flatten(compose([*search, f"experiment={name}"]))
    return {key: value for key, value in wanted.items() if key not in found or found[key] != value}


def _tree(overrides: Sequence[str], recipe: str) -> dict[str, Any]:
    """Return the YAML's content: the choices of groups as a defaults list, all other options nested."""
    bases: list[Any] = []
    choices: list[Any] = []
    options: dict[str, Any] = {}
    typed = [_parsed(text) for text in checked_arguments(overrides)]
    if not any(override.key_or_group in ("recipe", "experiment") for override in typed):
        choices.append({"override /recipe": recipe})
    for override in typed:
        key, value = override.key_or_group, override.value()
        if key == "experiment":
            bases.append(value)
        elif isinstance(value, str) and (CONF / key).is_dir():
            choices.append({f"override /{key}": value})
        else:
            _put(options, key.split("."), value)
    return {"defaults": [*bases, *choices, "_self_"]} | options


def _put(node: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        node = node.setdefault(key, {})
    node[keys[-1]] = value


def _parsed(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


def _write(path: Path, head: str, content: dict[str, Any]) -> None:
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=False, allow_unicode=True, width=WIDTH)
    write_text(path, head + body)


def _head(advice: Advice, sentence: str, command: str) -> str:
    goal = "The setting with the least memory"
    if advice.goal == "speed":
        goal = f"The fastest setting, in a run of {advice.steps} steps,"
    when = advice.date or datetime.datetime.now(datetime.UTC).date().isoformat()
    commit = advice.git.get("commit", "")[:10]
    name, torch = advice.hardware.get("name", advice.machine), advice.versions.get("torch", "unknown")
    facts = [when, f"torch {torch}", f"{name}, {advice.hardware.get('cpu_cores', '?')} cores"]
    lines = [f"{goal} for {advice.recipe} on this machine, found by scripts/advise.py."]
    paragraphs = [f"{sentence.rstrip('.')}.", ", ".join([*facts, *([f"commit {commit}"] if commit else [])]) + "."]
    for paragraph in paragraphs:
        lines += textwrap.wrap(" ".join(paragraph.split()), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    lines.insert(1, f"  {command}")
    return "\n".join(["# @package _global_", *(f"# {line}" for line in lines)]) + "\n"
