"""What a run was started with as a config of Hydra's: ``resume=FOLDER`` composes the command line on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import external_recipes
from trainer.config.command_line import CommandLine
from trainer.config.explain import explain
from trainer.config.registration import CONF, groups, register, root
from trainer.config.registration import options as fields_of
from trainer.errors import UserError
from trainer.files import NO_FOLDER

if TYPE_CHECKING:  # it takes torch, for which a command line without resume=FOLDER does not wait
    from trainer.run_folder import RunFolder

_NAME = "recorded"


def base(line: CommandLine, recorded: Mapping[str, Any] | None = None) -> tuple[str, Mapping[str, Any], list[str]]:
    """Register what a command line is composed on; every process of a job does so before they know each other.

    Args:
        line: the command line; with ``resume=FOLDER`` it is composed on what that run has recorded.
        recorded: options to compose on in the place of the defaults, by dotted key; those of a group all together.

    Returns:
        The name of the config for Hydra; the options that are in it, none where it is conf/config.yaml; the arguments,
        with ``resume=FOLDER`` without the choices that are the recorded ones, whose YAML would bring its defaults.

    Raises:
        UserError: ``resume`` names no run to continue, or the options are not those of this version.
    """
    folder, kept = _resumed(line), list(line.arguments)
    for override in line.overrides:
        if override.is_sweep_override() and not line.is_multirun:
            raise UserError(f"{override.input_line} has several values; add -m to run one after the other")
    if folder is not None:
        if line.is_multirun:
            raise UserError(f"resume={folder.path} continues one run, but -m starts several; remove -m")
        longer = line.value("epochs") is not None
        options = {key: value for key, value in options_of(folder).items() if not (longer and key == "steps")}
        recorded = options | {"resume": str(folder.path)}
    if line.value("recipe_path") is None and recorded is not None:
        external_recipes.use_folder(recorded.get("recipe_path"))
    register()
    if folder is not None and recorded is not None:
        keys = [argument.partition("=")[0] for argument in line.arguments]
        if "experiment" not in keys:  # which may choose, too; of several choices the last counts
            pairs = zip(keys, line.arguments, strict=True)
            kept = [each for key, each in pairs if keys.count(key) > 1 or not _is_recorded(each, recorded)]
    if searched := external_recipes.config_folders():
        kept.append(f"hydra.searchpath={[f'file://{path}' for path in searched]}")
    if recorded is None:
        return "config", {}, kept
    _register(recorded)
    return _NAME, recorded, kept


def options_of(folder: RunFolder) -> dict[str, Any]:
    """Return a run's options as those of a run in the same place; its tracking.json has the whole ``tracking.uri``.

    Raises:
        UserError: config.json cannot be read.
    """
    kept = {key: value for key, value in folder.config().items() if key not in ("resume", "tracking.uri")}
    return kept | {"output_dir": str(folder.path.absolute().parent)}


def _resumed(line: CommandLine) -> RunFolder | None:
    """Return the run that ``resume=FOLDER`` on this command line names; None: it names none."""
    resume = line.value("resume")
    if resume in NO_FOLDER:
        return None
    from trainer.run_folder import RunFolder

    output_dir = line.value("output_dir", "outputs")
    return RunFolder.open("resume", str(resume), str(output_dir), line.value("tracking.uri"))


def _is_recorded(argument: str, recorded: Mapping[str, Any]) -> bool:
    """Return whether an argument is the choice of a group that the record has, and no other can be meant."""
    group, _, choice = argument.partition("=")
    classes = groups().get(group, {})
    if len(classes) != 1:
        return choice in classes and recorded.get(group) == choice
    first = fields_of(*classes.values())[0]  # by which the choices of one class differ: name, mode, enabled
    files: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in (CONF / group).glob("*.yaml")}
    kept = recorded.get(f"{group}.{first.name}")
    return [name for name, file in files.items() if file.get(first.name, first.default) == kept] == [choice]


def _register(recorded: Mapping[str, Any]) -> None:
    """Register options as choices of their groups, and a config with these choices.

    Another choice on the command line, such as ``loader=plain``, takes the place of the group's recorded options.
    """
    config, chosen = OmegaConf.structured(root()), set()
    for group, choices in groups().items():
        if any(key.partition(".")[0] == group for key in recorded):
            kind = str(recorded.get(group)) if len(choices) > 1 else next(iter(choices))
            if kind not in choices:
                raise UserError(f"config.json names {group}={kind:.60}, which this version does not have")
            config[group] = choices[kind]
            chosen.add(group)
    try:
        for key, value in recorded.items():
            if key not in chosen:
                literal = value.replace("${", "\\${") if isinstance(value, str) else value
                OmegaConf.update(config, key, literal, merge=False)
    except OmegaConfBaseException as error:
        raise UserError(f"config.json: {explain(error)}") from error
    store, choice = ConfigStore.instance(), f"{_NAME}_schema"
    for group in chosen:
        store.store(choice, config[group], group)
    main = OmegaConf.load(CONF / "config.yaml")
    for entry in main.defaults:
        if OmegaConf.is_dict(entry) and chosen & set(entry):
            entry.update(dict.fromkeys(entry, choice))
    others = {key.partition(".")[0] for key in recorded} - chosen
    store.store(_NAME, OmegaConf.merge(main, OmegaConf.masked_copy(config, list(others))))
