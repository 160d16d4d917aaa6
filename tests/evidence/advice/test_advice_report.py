"""The advice in words and as a picture."""

from __future__ import annotations

import io
import re

from rich.console import Console

from evidence.advice.report import plot, print_advice, sentence
from evidence.advice.schema import Advice
from tests.evidence.advice.machine import Machine
from tests.evidence.advice.made import advice, measured


def printed(of: Advice, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_advice(of, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_sentence_has_speed_memory_health_and_what_is_as_good() -> None:
    made = advice(equal=["bf16", "x"])
    made.entries[0].health = {"healthy": True}
    assert sentence(made) == (
        "bf16 + compile: 2.9x [2.85, 2.95] as fast as fp32, 38% less memory, numerics healthy; compiling pays off "
        "after 140 steps; 2 other settings are not clearly slower"
    )
    least = advice(goal="memory", winner="bf16", equal=["bf16 + compile"], entries=advice(winner="bf16").entries)
    least.entry("bf16").interval = least.entries[0].interval
    assert sentence(least) == (
        "bf16: 30% less memory, 2.9x [2.85, 2.95] as fast as fp32; bf16 + compile is not clearly larger"
    )
    assert sentence(advice(stopped="not decided")).endswith(
        "; not decided: another setting may be more than 5 % faster"
    )
    assert sentence(advice(stopped="budget")).endswith("; not all settings were measured")
    alone = advice(winner="fp32", stopped="budget", entries=[measured("fp32", 1.0, 1000, interval=None)])
    assert sentence(alone) == "fp32, train.py's default: no other setting was measured in 3:00 min"
    default = advice(winner="fp32", stopped="budget")
    default.entry("bf16").health = {"faults": ["a fault"]}
    assert sentence(default) == (
        "fp32, train.py's default: no setting that can be advised is clearly faster here among those measured in "
        "3:00 min"
    )


def test_the_page_has_what_was_measured_of_whole_runs_and_what_was_not() -> None:
    said = printed(advice(notes=["the memory is scarce"]))
    for line in (
        "compiling took 14.0 s and pays off after 140 steps: bf16 + compile",
        "failed: fp16 (the loss is not finite)",
        "Note: the memory is scarce.",
        "Measured for 3:00 min on A CPU: one setting is ahead.",
    ):
        assert f"{line}\n" in said
    assert re.search(r"^bf16 \+ compile \(advised\) +2.9x \[2.85, 2.95\]", said, re.MULTILINE)
    found = Machine(noise=0.0).advise(steps=100)
    (line,) = [line for line in printed(found).splitlines() if line.startswith("bf16 + compile ")]
    # One process, so no interval; in a whole run 2 s over 10 s and 100 steps of 0.006 s.
    assert line.split()[3:6] == ["about", "3.33x", f"{2 / (10 + 0.6):.3g}x"]
    found.entries = [entry for entry in found.entries if not entry.candidate.compiles]
    assert "run of 100" not in printed(found)


def test_the_plot_names_the_winner_and_the_default() -> None:
    assert plot(advice(entries=advice().entries[-4:])) is None  # the baseline alone
    drawn = plot(advice())
    assert drawn is not None
    (axes,) = drawn[1].axes
    assert len(axes.lines) == 3
    assert [text.get_text() for text in axes.texts] == ["bf16 + compile", "fp32"]
