"""From a composed config to live objects, with the options of an earlier run, and a rate for pretrained weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config.init_from import adopt
from trainer.config.registration import by_key, check, name_of_composed
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.recipe import Decision


def build(composed: DictConfig, overrides: Sequence[str] = (), recorded: Mapping[str, Any] = {}) -> Config:
    """Turn what Hydra composed into live, typed objects.

    Args:
        composed: of the root's schema.
        overrides: the command line; an earlier run gives its options (``init_from``) where that does not.
        recorded: what the command line was composed on, by dotted key: it stays, like what is typed.

    Raises:
        UserError: a key that no component has (``+typo=1``), a required one that is missing, a bad value.
    """
    check(composed)
    if composed.recipe_path is not None:
        composed.recipe_path = str(Path(composed.recipe_path).expanduser().absolute())
    typed = by_key(overrides)
    given = {*typed, *recorded}
    composed.resume = recorded.get("resume", composed.resume)  # the folder that an address of MLflow stands for
    if "recipe.pretrained" in typed:
        raise UserError(f"recipe.pretrained: write init_from={typed['recipe.pretrained']}")
    source, kept = adopt(composed, given, name_of_composed(composed))
    kept += _fine_tuned(composed, given)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return replace(config, source=source, preset=tuple(kept))


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
