from __future__ import annotations

from collections.abc import Callable

from benchmarks.turns import interleave, ratios


def test_blocks_take_turns_and_the_first_repeat_is_not_kept() -> None:
    calls: list[str] = []
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([7.0, 3.0, 5.0])}

    def block(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return next(seconds[name])

        return run

    times = interleave({"a": block("a"), "b": block("b")}, repeats=2)
    assert times == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert ratios(times, "b", "a") == [3.0, 2.5]


def test_without_warm_up_every_repeat_is_kept() -> None:
    seconds = iter([4.0, 6.0])
    assert interleave({"a": lambda: next(seconds)}, repeats=2, warm_up=0) == {"a": [4.0, 6.0]}
