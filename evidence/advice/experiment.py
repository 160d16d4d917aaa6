"""The advice as a choice of ``experiment=``: a YAML below conf/."""

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
    """Of the YAML; None: there is none."""
    command: str
    """That trains with the advised setting."""
    note: str = ""
    """Why there is no file."""


def overrides_of(given: Sequence[str], candidate: Candidate) -> list[str]:
    """Return the overrides of train.py that make up a candidate, the user's own (``given``) before it."""
    kept = [text for text in given if re.split(r"[.=]", text.lstrip("+~"))[0] not in NOT_ADVISED]
    return merged(kept, candidate.overrides)


def write(advice: Advice, sentence: str, conf: Path) -> Experiment:
    """Write ``experiment/advised_<recipe>_<machine>.yaml``, and return it with the command that runs it.

    The file is replaced by the next advice for the recipe on this machine. It holds what was typed and chosen, and
    is composed: it gives the config of the winner's command line, or it is not kept.

    Args:
        advice: with a winner that was measured.
        sentence: that says what was found.
        conf: the folder of the project's YAMLs.
    """
    overrides = overrides_of(advice.overrides, advice.entry(advice.winner).candidate)
    plain = shlex.join(["python", "scripts/train.py", *overrides])
    name = PREFIX + "_".join(re.sub(r"\W+", "_", part).strip("_") for part in (advice.recipe, advice.machine))
    command, path = f"python scripts/train.py experiment={name}", conf / "experiment" / f"{name}.yaml"
    wanted = flatten(compose(overrides))
    typed = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    groups = {key: unquoted(value) for key, value in typed.items() if (CONF / key).is_dir()}
    search = f"hydra.searchpath=[{quoted(f'file://{conf.absolute()}')}]"
    leaves = [key for key in wanted if not any(other.startswith(f"{key}.") for other in wanted)]
    options = {key for key in leaves for each in typed.keys() - groups.keys() if f"{key}.".startswith(f"{each}.")}
    for _ in range(2):  # then with what the command line decides by itself, such as a rate for given weights
        body = _body({key: wanted[key] for key in leaves if key in options}, groups, advice.recipe)
        try:
            make_folder(path.parent)
            write_text(path, _head(advice, sentence, command) + body)
        except OSError as error:
            return Experiment(None, plain, f"{path} cannot be written ({error.strerror})")
        found = flatten(compose([search, f"experiment={name}"]))
        different = {key for key in {*wanted, *found} if wanted.get(key, path) != found.get(key, path)}
        if not different:
            return Experiment(path, command)
        options |= different
    path.unlink()
    return Experiment(None, plain, f"an experiment cannot say all of it ({', '.join(sorted(different))})")


def _body(options: dict[str, Any], groups: dict[str, str], recipe: str) -> str:
    """Return the YAML: the choices of groups as a defaults list, all other options nested."""
    nested: dict[str, Any] = {}
    for key, value in options.items():
        node = nested
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    bases = [groups["experiment"]] if "experiment" in groups else []
    chosen = ({} if bases else {"recipe": recipe}) | {key: groups[key] for key in groups.keys() - {"experiment"}}
    defaults = [*bases, *({f"override /{key}": value} for key, value in sorted(chosen.items())), "_self_"]
    content = {"defaults": defaults} | nested
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=False, allow_unicode=True, width=WIDTH)


def _head(advice: Advice, sentence: str, command: str) -> str:
    fastest = f"fastest setting, in a run of {advice.steps} steps,"
    goal = fastest if advice.goal == SPEED else "setting with the least memory"
    hardware = advice.hardware
    facts = [advice.date, f"torch {advice.versions.get('torch')}", hardware["name"], f"{hardware['cpu_cores']} cores"]
    facts += [f"commit {commit[:10]}"] if (commit := advice.git.get("commit")) else []
    lines = [f"The {goal} for {advice.recipe} on this machine, found by scripts/advise.py.", f"  {command}"]
    for paragraph in (f"{sentence.rstrip('.')}.", ", ".join(facts) + "."):
        lines += textwrap.wrap(paragraph, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["# @package _global_", *(f"# {line}" for line in lines)]) + "\n"
