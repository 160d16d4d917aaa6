"""From a composed config to live objects, with the options of the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config.init_from import adopt
from trainer.config.registration import by_key, check, name_of_composed
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.recipe import Recipe


def build(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    recorded: Mapping[str, Any] = {},
    recipe: Recipe | None = None,
) -> Config:
    """Turn what Hydra composed into live, typed objects.

    Args:
        composed: of the root's schema.
        overrides: the command line; an earlier run gives its options (``init_from``) where that does not.
        recorded: what the command line was composed on, by dotted key: it stays, like what is typed.
        recipe: takes the place of the composed one; None: that one.

    Raises:
        UserError: a key that no component has (``+typo=1``), a required one that is missing, a bad value.
    """
    check(composed)
    if composed.recipe_path is not None:
        composed.recipe_path = str(Path(composed.recipe_path).expanduser().absolute())
    typed = by_key(overrides)
    composed.resume = recorded.get("resume", composed.resume)  # the folder that an address of MLflow stands for
    if "recipe.pretrained" in typed:
        raise UserError(f"recipe.pretrained: write init_from={typed['recipe.pretrained']}")
    given = frozenset({*typed, *recorded})
    source, options = adopt(composed, given, name_of_composed(composed))
    for key, value in options.items():
        OmegaConf.update(composed, key, value)
    components: dict[str, Any] = {
        str(key): OmegaConf.to_object(node) if OmegaConf.is_config(node) else node for key, node in composed.items()
    }
    components |= {"recipe": recipe} if recipe is not None else {}
    return Config(**components, source=source, typed=given, recorded=recorded)
