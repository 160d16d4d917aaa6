"""Blocks of work that take turns, and their ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evidence.turns import in_turns

Times = dict[str, list[float]]
"""Seconds of each block by its name, one number per repeat."""


def interleave(
    blocks: Mapping[str, Callable[[], float]],
    repeats: int,
    warm_up: int = 1,
    before: Callable[[str, int], object] = lambda name, repeat: None,
) -> Times:
    """Call the blocks in turn, in reverse order every second repeat, and return their seconds.

    ``warm_up`` further repeats come first and are not kept. ``before`` is called before each block, with its name and
    the number of the repeat (from 0, warm-up included).
    """
    times: Times = {name: [] for name in blocks}
    for name, repeat in in_turns(list(blocks), range(warm_up + repeats)):
        before(name, repeat)
        times[name].append(blocks[name]())
    return {name: seconds[warm_up:] for name, seconds in times.items()}


def ratios(times: Times, above: str, below: str) -> list[float]:
    """Return one ratio per repeat, of two loops that took turns within it."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]
