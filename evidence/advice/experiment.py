"""The advice as a choice of ``experiment=``: a YAML below conf/, or where that cannot be written, beside the advice."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from evidence.advice.candidates import Candidate
from evidence.advice.schema import SPEED, Advice
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
    kept = [text for text in given if re.split(r"[.=]", text.lstrip("+~"))[0] not in NOT_ADVISED]
    return merged(kept, candidate.overrides)


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
    name = PREFIX + "_".join(re.sub(r"\W+", "_", part).strip("_") for part in (advice.recipe, advice.machine))
    plain = shlex.join(["python", "scripts/train.py", *overrides])
    if removed := [text for text in overrides if text.startswith("~")]:
        return Experiment(None, plain, f"{removed[0]} removes an option, which an experiment cannot")
    note = ""
    for place in (conf, folder / "conf"):
        path = place / "experiment" / f"{name}.yaml"
        options = [] if place == CONF else [f"--config-dir={place}"]
        command = shlex.join(["python", "scripts/train.py", *options, f"experiment={name}"])
        head = _head(advice, sentence, command)
        try:
            make_folder(path.parent)
            _write(path, head, overrides, advice.recipe)
            if missing := _differences(overrides, name, place):
                # What the command line decides by itself, such as a lower learning rate for given weights.
                more = [f"{key}={quoted(value)}" for key, value in missing.items()]
                _write(path, head, [*overrides, *more], advice.recipe)
                missing = _differences(overrides, name, place)
            why = ", ".join(missing)
        except OSError as error:
            note = f"{path} cannot be written ({error.strerror})"
            continue
        except UserError as error:
            why = str(error)
        if not why:
            return Experiment(path, command, note)
        path.unlink(missing_ok=True)
        return Experiment(None, plain, f"an experiment cannot say all of it ({why})")
    return Experiment(None, plain, note)


def _differences(overrides: Sequence[str], name: str, conf: Path) -> dict[str, Any]:
    """Return the options that the file gives other values than the command line, with those of the command line."""
    search = [] if conf == CONF else [f"hydra.searchpath={quoted([f'file://{conf.absolute()}'])}"]
    wanted, found = flatten(compose(overrides)), flatten(compose([*search, f"experiment={name}"]))
    return {key: value for key, value in wanted.items() if key not in found or found[key] != value}


def _write(path: Path, head: str, overrides: Sequence[str], recipe: str) -> None:
    """Write the YAML: the choices of groups as a defaults list, all other options nested."""
    bases: list[Any] = []
    choices: dict[str, Any] = {"recipe": recipe}
    options: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(checked_arguments(overrides)):
        key, value = override.key_or_group, override.value()
        if key == "experiment":
            bases.append(value)
        elif isinstance(value, str) and (CONF / key).is_dir():
            choices[key] = value
        else:
            node = options
            *above, last = key.split(".")
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
    if bases and not any(text.startswith("recipe=") for text in overrides):
        del choices["recipe"]  # it is the experiment's
    defaults = [*bases, *({f"override /{key}": value} for key, value in choices.items()), "_self_"]
    content = {"defaults": defaults} | options
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=False, allow_unicode=True, width=WIDTH)
    write_text(path, head + body)


def _head(advice: Advice, sentence: str, command: str) -> str:
    goal = (
        f"fastest setting, in a run of {advice.steps} steps,"
        if advice.goal == SPEED
        else "setting with the least memory"
    )
    facts = [advice.date, f"torch {advice.versions.get('torch', 'unknown')}"]
    facts += [advice.hardware.get("name", advice.machine), f"{advice.hardware.get('cpu_cores', '?')} cores"]
    facts += [f"commit {commit[:10]}"] if (commit := advice.git.get("commit")) else []
    lines = [f"The {goal} for {advice.recipe} on this machine, found by scripts/advise.py.", f"  {command}"]
    for paragraph in (f"{sentence.rstrip('.')}.", ", ".join(facts) + "."):
        lines += textwrap.wrap(" ".join(paragraph.split()), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["# @package _global_", *(f"# {line}" for line in lines)]) + "\n"
