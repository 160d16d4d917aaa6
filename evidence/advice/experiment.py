"""The advice as a choice of ``experiment=``: a YAML below conf/, or where that cannot be written, beside the advice."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evidence.advice.candidates import Candidate
from evidence.advice.schema import SPEED, Advice
from evidence.runs import merged
from trainer.config.compose import CONF, compose, quoted
from trainer.config.options import unquoted
from trainer.config.registration import flatten
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
    is composed: it gives the config of the winner's command line, or it is not kept.

    Args:
        advice: with a winner that was measured.
        sentence: that says what was found.
        folder: of the advice; the file goes to ``folder/conf`` where ``conf`` cannot be written.
        conf: the folder of the project's YAMLs.
    """
    overrides = overrides_of(advice.overrides, advice.entry(advice.winner).candidate)
    name = PREFIX + "_".join(re.sub(r"\W+", "_", part).strip("_") for part in (advice.recipe, advice.machine))
    plain, note = shlex.join(["python", "scripts/train.py", *overrides]), ""
    wanted = flatten(compose(overrides))
    typed = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    choices = {key: unquoted(value) for key, value in typed.items() if (CONF / key).is_dir()}
    leaves = {key for key in wanted if not any(other.startswith(f"{key}.") for other in wanted)}
    options = {key for key in leaves for each in typed.keys() - choices if f"{key}.".startswith(f"{each}.")}
    for place in (conf, folder / "conf"):
        path = place / "experiment" / f"{name}.yaml"
        own = place == CONF
        command = ["python", "scripts/train.py", *[f"--config-dir={place}"] * (not own), f"experiment={name}"]
        search = [] if own else [f"hydra.searchpath={quoted([f'file://{place.absolute()}'])}"]
        head = _head(advice, sentence, shlex.join(command))
        different: set[str] = set()
        try:
            make_folder(path.parent)
            for _ in range(2):  # then with what the command line decides by itself, such as a rate for given weights
                options |= different & leaves
                write_text(path, head + _body({key: wanted[key] for key in wanted if key in options}, choices, advice))
                found = flatten(compose([*search, f"experiment={name}"]))
                different = {key for key in {*wanted, *found} if wanted.get(key, path) != found.get(key, path)}
        except OSError as error:
            note = f"{path} cannot be written ({error.strerror})"
            continue
        if not different:
            return Experiment(path, shlex.join(command), note)
        path.unlink()
        return Experiment(None, plain, f"an experiment cannot say all of it ({', '.join(sorted(different))})")
    return Experiment(None, plain, note)


def _body(options: dict[str, Any], choices: dict[str, str], advice: Advice) -> str:
    """Return the YAML: the choices of groups as a defaults list, all other options nested."""
    nested: dict[str, Any] = {}
    for key, value in options.items():
        node = nested
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    bases = [choices["experiment"]] if "experiment" in choices else []
    groups = {} if bases else {"recipe": advice.recipe}
    groups |= {key: value for key, value in choices.items() if key != "experiment"}
    defaults = [*bases, *({f"override /{key}": value} for key, value in groups.items()), "_self_"]
    content = {"defaults": defaults} | nested
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False, allow_unicode=True, width=WIDTH)


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
