"""The tables of docs/speed.md that benchmarks/kernels.py writes are those of results/."""

from __future__ import annotations

from benchmarks import kernels


def test_the_tables_are_those_of_the_results() -> None:
    page = kernels.PAGE.read_text(encoding="utf-8")
    shown = page.partition(kernels.BEGIN)[2].partition(kernels.END)[0]
    assert kernels.records()
    assert shown.strip() == kernels.tables().strip(), "run: python benchmarks/kernels.py pages"
