"""From ``key=value`` overrides to a config: what Hydra composes, and on what.

``prepare`` serves all commands: train.py lets Hydra go on from there, and ``compose`` is for those that need a config,
or several, without being Hydra's own.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from trainer.config import external_recipes
from trainer.config.command_line import CommandLine, read
from trainer.config.explain import explained
from trainer.config.registration import CONF, groups, register, root, with_open_dictionaries
from trainer.config.registration import key_of as key_of
from trainer.config.typed import anew, of_another_version
from trainer.errors import UserError
from trainer.files import BEST, NO_FOLDER
from trainer.run_folder import RunFolder

if TYPE_CHECKING:  # it takes torch, for which mistakes in the command line do not wait
    from trainer.config.schema import Config
    from trainer.recipe import Recipe

_RECORDED = "recorded"
"""The name of the config that has a run's options in the place of the defaults."""


class Composition(NamedTuple):
    """What Hydra composes, and on what."""

    name: str
    """The name of the config: conf/config.yaml, or one that has the options of a run."""
    recorded: Mapping[str, Any]
    """These options, by dotted key; empty: it is conf/config.yaml."""
    arguments: list[str]
    """The command line, for Hydra."""


def prepare(line: CommandLine, recorded: Mapping[str, Any] | None = None) -> Composition:
    """Register what a command line is composed on; every process of a job does so before they know each other.

    Args:
        line: the command line; with ``resume=FOLDER`` it is composed on what that run has recorded.
        recorded: options to compose on in the place of the defaults, by dotted key; those of a group all together. A
            choice on the command line, such as ``loader=plain``, takes the place of its group's.

    Raises:
        UserError: ``resume`` names no run to continue, or the options are not those of this version.
    """
    if not line.is_multirun:
        line.check_single()
    # The record of the run that resume names.
    folder = _resumed(line)
    if folder is not None:
        recorded = _options_of(folder) | {"resume": str(folder.path)}
        if line.value("epochs") is not None:  # in the place of the steps that epochs became
            del recorded["steps"]
    # The classes of the options, those of the user's own recipes among them.
    if recorded is not None:
        external_recipes.use_folder(line.value("recipe_path", recorded.get("recipe_path")))
    register()
    if recorded is not None:
        try:
            _register(recorded)
        except UserError as error:
            if folder is None:
                raise
            raise of_another_version(folder, str(error)) from error
    # The folders of the user's own choices.
    arguments = list(line.arguments)
    if searched := external_recipes.config_folders():
        arguments.append(f"hydra.searchpath={[f'file://{path}' for path in searched]}")
    return Composition("config", {}, arguments) if recorded is None else Composition(_RECORDED, recorded, arguments)


def _resumed(line: CommandLine) -> RunFolder | None:
    """Return the run whose folder or address ``resume`` is; None: it is no folder, and the run is found by its name."""
    resume = line.value("resume")
    if str(resume).lower() in ("true", "yes", "1", "last", "latest") and not Path(str(resume)).is_dir():
        problem = f"resume={resume}: resume takes a run folder, or auto, which continues the newest run of this name"
        raise UserError(problem, "resume=auto", mistake=f"resume={resume}")
    if resume in NO_FOLDER:
        return None
    if line.is_multirun:
        raise UserError(f"resume={resume} continues one run, but -m starts several", "", mistake="-m --multirun")
    output_dir = str(line.value("output_dir", "outputs"))
    return RunFolder.open("resume", str(resume), output_dir, line.value("tracking.uri"))


def _options_of(folder: RunFolder) -> dict[str, Any]:
    """Return what a run has recorded, to compose on; where that is damaged, its exported weights are left."""
    try:
        return folder.options()
    except UserError as error:
        remedies = anew(folder, folder.path / BEST) if (folder.path / BEST / "config.json").is_file() else []
        raise UserError(error.problem, *remedies, mistake="resume=") from error


def _register(recorded: Mapping[str, Any]) -> None:
    """Register options as choices of their groups, and a config with these choices."""
    config, chosen = OmegaConf.structured(root()), set()
    # A group's options all together, as the choice that the run had.
    for group, choices in groups().items():
        if any(key.partition(".")[0] == group for key in recorded):
            kind = str(recorded.get(group)) if len(choices) > 1 else next(iter(choices))
            if kind not in choices:
                raise UserError(f"config.json: there is no {group}={kind:.60}")
            config[group] = choices[kind]
            chosen.add(group)
    with explained("config.json: "):
        for key, value in recorded.items():
            if key not in chosen:
                literal = value.replace("${", "\\${") if isinstance(value, str) else value
                OmegaConf.update(config, key, literal, merge=False)
    with_open_dictionaries(config)
    store, choice = ConfigStore.instance(), f"{_RECORDED}_schema"
    for group in chosen:
        store.store(choice, config[group], group)
    # conf/config.yaml, with these choices and the options of no group in the place of its own.
    main = OmegaConf.load(CONF / "config.yaml")
    for entry in main.defaults:
        if OmegaConf.is_dict(entry) and chosen & set(entry):
            entry.update(dict.fromkeys(entry, choice))
    others = {key.partition(".")[0] for key in recorded} - chosen
    store.store(_RECORDED, OmegaConf.merge(main, OmegaConf.masked_copy(config, list(others))))


def compose(
    overrides: Sequence[str], recorded: Mapping[str, Any] | None = None, recipe: Recipe | None = None
) -> Config:
    """Return the config that scripts/train.py would train with these overrides.

    Args:
        overrides: of the command line.
        recorded: options of a run that take the place of the defaults, by dotted key; those of a group all together.
        recipe: takes the place of the composed one; None: that one.

    Raises:
        UserError: one of them is a mistake.
    """
    with _hydra():
        from trainer.config.build import build

        line = read(overrides)
        line.check_single("set one of them")
        composition = prepare(line, recorded)
        return build(
            hydra.compose(composition.name, composition.arguments), composition.arguments, composition.recorded, recipe
        )


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra makes of overrides, in which required options may be missing.

    Raises:
        UserError: one of them is a mistake.
    """
    with _hydra():
        composition = prepare(read(overrides))
        return hydra.compose(composition.name, composition.arguments)


@contextmanager
def _hydra() -> Iterator[None]:
    """Let Hydra compose configs, and make one sentence of its errors."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # of scripts/train.py, in a run
    try:
        with explained(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def refusal(overrides: Sequence[str]) -> UserError | None:
    """Return why a command line of train.py cannot be composed; None: it can, and so can each run of its sweep."""
    try:
        check_values(read(overrides))
    except UserError as error:
        return error
    return None


def check_values(line: CommandLine) -> None:
    """Compose the run of a command line; of a sweep its first one, and those that differ from it in one key.

    Raises:
        UserError: one of them cannot be composed.
    """
    given = [str(override.input_line) for override in line.overrides]
    runs = list(combinations(given).values()) if line.is_multirun else [given]
    for run in runs:
        if sum(value != first for value, first in zip(run, runs[0], strict=True)) < 2:
            compose(run)


def with_all_values(error: UserError, line: CommandLine) -> UserError:
    """Return an error about the first run of a sweep as one about all of its values; any other as it is.

    Remedies that do not end with the value are left out: no other run would have its own. So are those of the same key,
    whose value is what is wrong.
    """
    for override in line.overrides:
        typed, (key, _, value) = str(override.input_line), error.mistake.partition("=")
        if override.is_sweep_override() and key == key_of(typed) and error.mistake != typed:
            values = typed.partition("=")[2]
            kept = [each.removesuffix(value) for each in error.remedies if value and each.endswith(f"={value}")]
            kept = [each for each in kept if each.removeprefix("-m ") != f"{key}="]
            return UserError(
                error.problem, *(f"{each}{shlex.quote(values)}" for each in kept), mistake=shlex.quote(typed)
            )
    return error


def check_single(overrides: Sequence[str], remedy: str) -> None:
    """Raise UserError where an override has several values; ``remedy`` says what to do."""
    read(overrides).check_single(remedy)


def combinations(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return every combination of overrides with several values (``precision=fp32,bf16``), by a label of its values.

    Raises:
        UserError: one of them is no override.
    """
    parts: list[list[tuple[str, str]]] = []  # label and override
    for override in read(overrides).overrides:
        key = override.get_key_element()
        is_group = (CONF / key).is_dir()
        if override.is_sweep_override():
            values = map(str, override.sweep_string_iterator())
            parts.append([(value if is_group else f"{key}={value}", f"{key}={value}") for value in values])
        else:
            parts.append([("", str(override.input_line))])
    return {
        ", ".join(filter(None, (label for label, _ in combination))): [override for _, override in combination]
        for combination in itertools.product(*parts)
    }
