"""The YAML of a claim: OmegaConf reads it into dataclasses, and an error message shows the correct form."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from trainer.errors import UserError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def read(text: bytes, where: str, cls: type[T], **computed: str) -> T:
    """Return the object that a file describes.

    Args:
        text: of the file.
        where: the file, for messages.
        cls: its fields are the keys.
        computed: values of fields that a file cannot have.

    Raises:
        UserError: not YAML, a key that is unknown, missing or there twice, a value of another type, or what the object
            itself refuses.
    """
    try:
        loaded = OmegaConf.create(text.decode())
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise UserError(f"{where} is not text in UTF-8 ({error})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        hint = "; text with a colon in it needs quotes" if isinstance(error, yaml.scanner.ScannerError) else ""
        raise UserError(f"{where}, line {line}: {error.problem}{hint}") from None
    if not OmegaConf.is_dict(loaded):
        raise UserError(f"{where} has no keys; see evidence/claims/published/bignet_memory.yaml")
    given = cast("dict[str, Any]", OmegaConf.to_container(loaded))
    try:
        if present := given.keys() & computed.keys():
            raise UserError(f"{present.pop()} is not a key; drop it")
        merged = OmegaConf.merge(OmegaConf.structured(cls), loaded, computed)
        _check_text(given, cls)
        return cast("T", OmegaConf.to_object(merged))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except ConfigKeyError as error:
        known = sorted(entry.name for entry in fields(error.object_type or cls) if entry.name not in computed)
        raise UserError(
            f"{where}: {error.key} is not a key{nearest(str(error.key), known)} ({', '.join(known)})"
        ) from None
    except MissingMandatoryValue as error:
        raise UserError(f"{where}: the key {error.full_key} is missing") from None
    except OmegaConfBaseException as error:
        # A list in place of a mapping, or the reverse, is reported without its key.
        hints = get_type_hints(cls)
        swapped = (name for name in given if isinstance(given[name], list) != (get_origin(hints[name]) is list))
        key = error.full_key or next(swapped)
        raise UserError(f"{where}: {key} must be {_KINDS.get(re.split('[.[]', key)[0], 'text')}") from None


_LIST = "a list, such as [one, two]"
_NUMBER = "a number, such as 1.5"
_KINDS = {
    "repeats": "a whole number, such as repeats: 3",
    **dict.fromkeys(("at_least", "at_most", "within"), _NUMBER),
    **dict.fromkeys(("needs", "traps", "combines"), _LIST),
    "criteria": "a list; begin each entry with a dash: - {measure: speed, arm: bf16, over: fp32, at_least: 2}",
    "setups": "names with overrides, such as gpt2: recipe=gpt2 steps=40",
    "arms": "names with a setup and overrides, such as bf16: gpt2 precision=bf16",
    "asks": "overrides with what to set them to, such as data.path: a text",
    "on_cuda": "setups with overrides, such as gpt2: recipe.size=124M",
    "reduced": "setups with overrides, such as gpt2: recipe.size=nano steps=3",
    "arms_need": "arms with lists, such as tf32: [tf32]",
}
"""How the value of a key is written."""


def _check_text(given: Any, hint: Any, key: str = "") -> None:
    """Refuse what OmegaConf would take for text: a number, a truth value, a mapping within a list."""
    inner: Any = next(reversed(get_args(hint)), None)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        for name, value in given.items():
            _check_text(value, hints[name], name)
    elif get_origin(hint) is dict:
        for name, value in given.items():
            _check_text(value, inner, f"{key}.{name}")
    elif get_origin(hint) is list:
        for value in given:
            _check_text(value, inner, key)
    elif hint is str and not isinstance(given, str):
        raise UserError(f'{key}: {given} must be text; in quotes it is: "{given}"')
