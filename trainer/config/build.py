"""From what Hydra composed to a ``Config``, with the options of the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config.command_line import value_of
from trainer.config.explain import PRETRAINED, meant
from trainer.config.init_from import adopt
from trainer.config.registration import PATTERNS, by_key, check, key_of, name_of_composed, precision_of
from trainer.config.schema import Config
from trainer.config.settle import KEPT
from trainer.config.text import unquoted
from trainer.recipe import Decision, Recipe


def build(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    recorded: Mapping[str, Any] = {},
    recipe: Recipe | None = None,
) -> Config:
    """Return what Hydra composed as typed objects.

    Args:
        composed: of the root's schema; changed in place.
        overrides: the command line; an earlier run gives its options (``init_from``) where that does not.
        recorded: what the command line was composed on, see ``Composition``: it stays, like what is typed.
        recipe: takes the place of the composed one; None: that one.

    Raises:
        UserError: a key that no component has (``+typo=1``), a required one that is missing, a bad value.
    """
    # Keys, and what stands for something else: a relative folder, an address of MLflow.
    check(composed)
    if composed.recipe_path is not None:
        composed.recipe_path = str(Path(composed.recipe_path).expanduser().absolute())
    overridden = by_key(overrides)
    composed.resume = recorded.get("resume", composed.resume)
    if PRETRAINED in overridden:
        value = overridden[PRETRAINED]
        raise meant("pretrained", unquoted(value), f"{PRETRAINED} cannot be typed", f"{PRETRAINED}={value}")
    # Hydra would merge them with those of a choice, or of the run that is continued.
    for key in PATTERNS:
        if isinstance(value := value_of(f"{key}={overridden.get(key)}"), dict):
            OmegaConf.update(composed, key, value, merge=False)
    # The precision of auto, which names the run, and by which all else is checked; a run that is continued has its own.
    mode, why = precision_of(composed)
    if why and "resume" in recorded:
        mode, why = recorded["precision.mode"], KEPT
    composed.precision.mode = mode
    # The weights that it starts from, and the options that they depend on.
    typed = frozenset({*overridden, *recorded})
    source, options = adopt(composed, typed, name_of_composed(composed))
    for key, value in options.items():
        OmegaConf.update(composed, key, value)
    # Each group becomes an object of its class, which checks its own options; ``Config`` checks them together.
    components: dict[str, Any] = {
        str(key): OmegaConf.to_object(node) if OmegaConf.is_config(node) else node for key, node in composed.items()
    }
    components |= {"recipe": recipe} if recipe is not None else {}
    kept = tuple(each for each in overrides if not key_of(each).startswith(("-", "hydra")))
    if data := [each for each in kept if key_of(each) == "data" or key_of(each).startswith("data.")]:
        components["recipe"].check_reads(components["data"], data)
    decided = (Decision("precision", mode, why),) if why else ()
    return Config(**components, source=source, typed=typed, overrides=kept, decided=decided)
