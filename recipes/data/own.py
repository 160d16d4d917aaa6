"""``data=own``: for recipes that bring their data with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.recipe import DataSource


@dataclass
class OwnData(DataSource):
    """Nothing to choose: the recipe's ``datasets`` opens what it needs."""

    kind: ClassVar[str] = "own"
