"""From a composed config to live objects: the options of a named class, of an earlier run, of pretrained weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from trainer.config.init_from import adopt
from trainer.config.registration import CONF, by_key, check, name_of_composed
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.optim.optimizer import accepted_options, optimizer_class
from trainer.recipe import Decision


def build(composed: DictConfig, overrides: Sequence[str] = (), recorded: Mapping[str, Any] = {}) -> Config:
    """Turn what Hydra composed into live, typed objects.

    Args:
        composed: of the root's schema.
        overrides: the command line. Options that an optimizer's YAML has for another class are left out where the
            command line names the class and not the options; an earlier run gives its options (``init_from``) where
            the command line does not.
        recorded: what the command line was composed on, by dotted key: it stays, like what is typed.

    Raises:
        UserError: a key that no component has (``+typo=1``), a required one that is missing, a bad value.
    """
    check(composed)
    if composed.recipe_path is not None:
        composed.recipe_path = str(Path(composed.recipe_path).expanduser().absolute())
    typed = by_key(overrides)
    dropped = _of_another_class(composed, typed, str(recorded.get("optimizer.name", "")))
    given = {*typed, *recorded}
    composed.resume = recorded.get("resume", composed.resume)  # the folder that an address of MLflow stands for
    if "recipe.pretrained" in typed:
        raise UserError(f"recipe.pretrained: write init_from={typed['recipe.pretrained']}")
    source, kept = adopt(composed, given, name_of_composed(composed))
    kept += _fine_tuned(composed, given)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return replace(config, source=source, preset=(*dropped, *kept))


def _of_another_class(composed: DictConfig, typed: Mapping[str, str], recorded: str) -> list[Decision]:
    """Remove the options of the optimizer's YAML that the class named on the command line does not have.

    Raises:
        UserError: another choice of ``optimizer`` has the settings of that class; these would be AdamW's rate for SGD.
    """
    name = composed.optimizer.name
    if "optimizer.name" not in typed or name == recorded:
        return []
    names = {path.stem: OmegaConf.load(path).name for path in (CONF / "optimizer").glob("*.yaml")}
    right = sorted(choice for choice, cls in names.items() if cls == name)
    chosen = typed.get("optimizer", "adamw")  # the default of conf/config.yaml
    if right and chosen in names and chosen not in right and "experiment" not in typed:  # which has its own settings
        raise UserError(f"optimizer.name={name} would get the settings of optimizer={chosen}; set optimizer={right[0]}")
    options, accepted = composed.optimizer.options, accepted_options(optimizer_class(name))
    foreign = [key for key in options if key not in accepted and f"optimizer.options.{key}" not in typed]
    if not foreign or "optimizer.options" in typed:
        return []
    with open_dict(options):
        for key in foreign:
            del options[key]
    why = f"{name} has no {' and no '.join(map(str, foreign))}"
    return [Decision("optimizer.options", OmegaConf.to_container(options), why)]


def _fine_tuned(composed: DictConfig, typed: Collection[str]) -> list[Decision]:
    """Lower the learning rate for pretrained weights or adapters, if it is the optimizer's default."""
    cls: Any = OmegaConf.get_type(composed.recipe)
    rank = OmegaConf.select(composed, "recipe.lora.rank")
    started = composed.init_from is not None
    decisions = []
    if rank and not started:
        why = "the weights below the adapters are random and stay so; set init_from"
        decisions.append(Decision("recipe.lora.rank", rank, why))
    factor = cls.adapter_lr if rank else cls.fine_tuning_lr
    if factor is None or not (started or rank) or {"optimizer.lr", "experiment"} & set(typed):
        return decisions
    lr = float(f"{factor * composed.optimizer.lr:.6g}")
    why = f"for {'adapters' if rank else 'pretrained weights'}; {composed.optimizer.lr} for random weights"
    composed.optimizer.lr = lr
    return [*decisions, Decision("optimizer.lr", lr, why)]
