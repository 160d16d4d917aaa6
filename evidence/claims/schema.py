"""The YAML of a claim: read strictly, and what is not as it should be answered with how it is written."""

from __future__ import annotations

import math
from typing import Any

import yaml

from trainer.errors import UserError, nearest


def read(text: bytes, where: str) -> dict[str, Any]:
    """Return the keys of a file.

    Raises:
        UserError: no YAML, none with keys, or a key that is there twice.

    """
    try:
        content = yaml.load(text, _Strict)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).replace('in "<byte string>", ', "").split())
        hint = "; text with a colon in it needs quotes" if "mapping values are not allowed" in words else ""
        raise UserError(f"{where}: {words}{hint}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where} holds no keys; see evidence/claims/published/bignet_memory.yaml")
    return content


def check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    """Refuse a key that is not known."""
    for key in content:
        if key not in known:
            raise UserError(f"{where}: {key} is not a key{nearest(str(key), known)} ({', '.join(sorted(known))})")


def check_type(key: str, value: Any, wanted: Any, where: str) -> None:
    """Refuse what YAML read as something else than a key's type, and say how it is written."""
    if wanted is str and not isinstance(value, str):
        raise UserError(f'{where}: {key}: {value} must be text; in quotes it is: {key}: "{value}"')
    if wanted is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{where}: {key}: {value} must be a whole number, without quotes, such as {key}: 3")
    if wanted == float | None and not _is_number(value):
        example = f"{float(value):g}" if _is_number(_float(value)) else "1.5"
        raise UserError(f"{where}: {key}: {value!r} must be a number; write {key}: {example}")
    if wanted == list[str]:
        if not isinstance(value, list):
            raise UserError(f"{where}: {key} is a list; write {key}: [{value or '…'}]")
        for entry in value:
            check_type(f"an entry of {key}", entry, str, where)
    if wanted in (dict[str, str], dict[str, list[str]]):
        if not isinstance(value, dict):
            raise UserError(f"{where}: {key} holds names, each with its own line below {key}, such as {_EXAMPLES[key]}")
        for name, entry in value.items():
            if not isinstance(name, str):
                raise UserError(f'{where}: {key}: the name {name} must be text; in quotes it is: "{name}"')
            if wanted == dict[str, list[str]]:
                check_type(f"{key}.{name}", entry, list[str], where)
            elif not isinstance(entry, str) or not entry.strip():
                raise UserError(f"{where}: {key}: {name} must be overrides; write, for example, {_EXAMPLES[key]}")


_EXAMPLES = {
    "setups": "gpt2: recipe=gpt2 steps=40",
    "arms": "bf16: gpt2 precision=bf16 (a setup, then the arm's own overrides)",
    "asks": "data.path: a text",
    "on_cuda": "gpt2: recipe.size=124M",
    "reduced": "gpt2: recipe.size=nano steps=3",
    "arms_need": "tf32: [tf32]",
}


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Strict(yaml.SafeLoader):
    """YAML in which a key that is there twice is a mistake, not the last of them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = node.value[number][0].start_mark.line + 1
                raise yaml.YAMLError(f"{key} is there twice, again in line {line}")
        return super().construct_mapping(node, deep)
