"""What is compared takes turns, so that it is measured under the same load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

One = TypeVar("One")
Round = TypeVar("Round")


def in_turns(them: Sequence[One], rounds: Iterable[Round]) -> Iterator[tuple[One, Round]]:
    """Yield all of them in each round, in reverse order every second time, so that none is always the later one."""
    for number, each_round in enumerate(rounds):
        for one in them if number % 2 == 0 else reversed(them):
            yield one, each_round
