"""Values as they are typed on a command line."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """Return the items of ``a,b`` or ``[a,b]``."""
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",") if item.strip()]


def unquoted(text: str) -> str:
    """Return a value without the quotes around it that Hydra's grammar allows."""
    quoted = len(text) > 1 and text[0] in "\"'" and text.find(text[0], 1) == len(text) - 1
    return text[1:-1] if quoted else text


def fraction(text: str) -> float | None:
    """Return the number that ``0.05`` or ``5%`` means; None: neither."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
