"""From ``key=value`` overrides to a config, for commands that need one, or several, without being Hydra's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from trainer.config.command_line import read
from trainer.config.explain import explained
from trainer.config.registration import CONF as CONF
from trainer.config.registration import key_of as key_of

if TYPE_CHECKING:  # it takes torch, for which mistakes in the command line do not wait
    from trainer.config.schema import Config
    from trainer.recipe import Recipe


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
        from trainer.config.resume import base

        check_single(overrides, "set one of them")
        name, kept, overrides = base(read(overrides), recorded)
        return build(hydra.compose(name, overrides), overrides, kept, recipe)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra makes of overrides, in which required options may be missing.

    Raises:
        UserError: one of them is a mistake.
    """
    with _hydra():
        from trainer.config.resume import base

        name, _, overrides = base(read(overrides))
        return hydra.compose(name, overrides)


@contextmanager
def _hydra() -> Iterator[None]:
    """Let Hydra compose configs, and make one sentence of its errors."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # of scripts/train.py, in a run
    try:
        with explained(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


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
