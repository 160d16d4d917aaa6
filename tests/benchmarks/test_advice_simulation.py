"""The search for the best setting on simulated machines, whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import advice_simulation
from benchmarks.advice_simulation import MACHINES, Cell, main, missed, searched, table


@pytest.mark.parametrize("name", ["processes 3 %, blocks 2 %", "noisy: blocks 10 %, from 5 to 20 % by setting"])
def test_intervals_hold_and_what_may_be_far_from_the_best_is_not_called_decided(name: str) -> None:
    """The seeds are fixed. Intervals of blocks alone would hold in about half of the searches."""
    cell = searched(name, MACHINES[name], 16, 40)
    assert cell.finals > 40
    assert missed(cell) == []


def test_a_target_that_is_missed_is_named() -> None:
    met = Cell("quiet: blocks 2 %", 8, 100, wrong=5, near=95, finals=100, covered=93)
    assert missed(met) == []
    assert missed(Cell("quiet: blocks 2 %", 8, 100, wrong=6, near=94, finals=100, covered=92)) == [
        "coverage",
        "wrong",
        "near",
    ]


def test_outcomes_are_appended_and_the_page_has_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results" / "advice.jsonl", tmp_path / "advice.md"
    page.write_text(f"Before.\n\n{advice_simulation.BEGIN}\nold\n{advice_simulation.END}\n\nAfter.\n")
    for name, value in {"RESULTS": results, "PAGE": page, "PROJECT": tmp_path, "SETTINGS": (8,)}.items():
        monkeypatch.setattr(advice_simulation, name, value)
    for searches in (1, 2):
        main([f"searches={searches}"])
    lines: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["searches"] for line in lines] == [1, 2]
    assert all({"command", "date", "git"} <= line.keys() for line in lines)
    assert page.read_text().startswith(f"Before.\n\n{advice_simulation.BEGIN}\n`python benchmarks/advice_simulation.py")
    assert page.read_text().endswith(f"{table(lines[-1])}\n{advice_simulation.END}\n\nAfter.\n")
    main(["only=quiet: blocks 2 %, 8", "searches=1"])
    assert len(results.read_text().splitlines()) == 2, "a part is not kept"


def test_the_committed_table_is_of_the_last_outcome() -> None:
    last = advice_simulation.RESULTS.read_text(encoding="utf-8").splitlines()[-1]
    assert table(json.loads(last)) in advice_simulation.PAGE.read_text(encoding="utf-8")
