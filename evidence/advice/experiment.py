"""The advice as a choice of ``experiment=``: a YAML below conf/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from evidence.advice.candidates import Candidate
from evidence.advice.schema import SPEED, Advice
from evidence.runs import merged
from trainer.config.compose import CONF, checked_arguments, compose, key_of, quoted
from trainer.config.registration import flatten
from trainer.files import make_folder, write_text

PREFIX = "advised_"
"""Of the files' names: git ignores them, and so do the tests of the project's own YAMLs."""
NOT_ADVISED = ("output_dir", "run_name", "resume", "tracking", "checkpoint", "profiler")
"""Keys and groups that say where and how a run is recorded: those of the advice are not those of later runs."""


def overrides_of(given: Sequence[str], candidate: Candidate) -> list[str]:
    """Return the overrides of train.py that make up a candidate, the user's own (``given``) before it."""
    kept = [text for text in given if re.split(r"[.=]", text.lstrip("+~"))[0] not in NOT_ADVISED]
    return merged(kept, candidate.overrides)


def comparison(advice: Advice) -> str:
    """Return the command that tests whether the winner trains as well as the baseline."""
    common = [text for text in overrides_of(advice.overrides, Candidate("")) if key_of(text) != "seed"]
    roles = {"baseline": advice.baseline, "advised": advice.winner}
    arms = [f"arm.{role}={' '.join(advice.entry(label).candidate.overrides)}" for role, label in roles.items()]
    return shlex.join(["python", "scripts/compare.py", *common, *arms])


def write(advice: Advice, sentence: str, conf: Path) -> tuple[str, Path | None]:
    """Write ``experiment/advised_<recipe>_<machine>.yaml``, which the next advice for the recipe here replaces.

    Args:
        advice: with a winner that was measured.
        sentence: that says what was found.
        conf: the folder of the project's YAMLs.

    Returns:
        The command that trains with the advised setting, and the file. There is no file, and the command has all
        overrides, where ``conf`` cannot be written, or the file would compose to another config than they do: a YAML
        cannot delete an option.
    """
    overrides = overrides_of(advice.overrides, advice.entry(advice.winner).candidate)
    plain = shlex.join(["python", "scripts/train.py", *overrides])
    name = PREFIX + "_".join(re.sub(r"\W+", "_", part).strip("_") for part in (advice.recipe, advice.machine))
    command, path = f"python scripts/train.py experiment={name}", conf / "experiment" / f"{name}.yaml"
    try:
        make_folder(path.parent)
        write_text(path, _head(advice, sentence, command) + _body(overrides, advice.recipe))
    except OSError:
        return plain, None
    search = f"hydra.searchpath=[{quoted(f'file://{conf.absolute()}')}]"
    if flatten(compose([search, f"experiment={name}"])) == flatten(compose(overrides)):
        return command, path
    path.unlink()
    return plain, None


def _body(overrides: Sequence[str], recipe: str) -> str:
    """Return the YAML: the choices of groups as a defaults list, all other options nested."""
    groups: dict[str, object] = {}
    options: DictConfig = OmegaConf.create()
    for override in OverridesParser.create().parse_overrides(checked_arguments(overrides)):
        if (CONF / override.key_or_group).is_dir():
            groups[override.key_or_group] = override.value()
        else:
            OmegaConf.update(options, override.key_or_group, override.value(), force_add=True)
    base = groups.pop("experiment", None)
    if base is None:
        groups = {"recipe": recipe} | groups
    chosen = [{f"override /{key}": choice} for key, choice in sorted(groups.items())]
    defaults = [*([base] if base else []), *chosen, "_self_"]
    return OmegaConf.to_yaml({"defaults": defaults, **options})


def _head(advice: Advice, sentence: str, command: str) -> str:
    fastest = f"fastest setting, in a run of {advice.steps} steps,"
    goal = fastest if advice.goal == SPEED else "setting with the least memory"
    hardware, commit = advice.hardware, advice.git.get("commit", "unknown")
    lines = [
        f"The {goal} for {advice.recipe} on this machine, found by scripts/advise.py.",
        f"  {command}",
        f"{sentence}.",
        f"{advice.date}, torch {advice.versions.get('torch')}, {hardware['name']}, {hardware['cpu_cores']} cores, "
        f"commit {commit[:10]}.",
    ]
    return "\n".join(["# @package _global_", *(f"# {line}" for line in lines)]) + "\n"
