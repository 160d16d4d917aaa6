"""What is kept of a measurement, and the tables that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.picture import draw
from benchmarks.results import (
    Origin,
    blocks,
    brief,
    filled,
    filled_table,
    here,
    keep,
    read_folder,
    read_machines,
    shown,
)
from tests.helpers import CPU
from trainer.errors import UserError


def test_the_pages_show_what_results_hold() -> None:
    for path, table in blocks(read_machines()).items():
        page = path.read_text(encoding="utf-8")
        assert filled(page, table) == page, "run: python benchmarks/results.py"


def test_a_cpu_is_named_with_its_bf16_instructions() -> None:
    """AMD EPYC is the name of processors with and without them."""
    for flag, words in (("avx2", ""), ("avx512_bf16", "avx512-bf16-"), ("amx_bf16", "amx-")):
        cpu = replace(CPU, name="AMD EPYC", cpu_cores=2, cpu_flags=frozenset({flag}))
        assert here(cpu).machine == f"amd-epyc-{words}2-cores"


def test_machines_have_titles_in_an_order_and_another_one_is_shown_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "tables.yaml").write_text("machines: {fast: with AMX, a-slow-one: without}")
    for name in ("a-new-one", "a-slow-one", "fast"):
        (tmp_path / f"{name}.json").write_text('{"measurements": {}}')
    assert list(read_machines()) == ["with AMX", "without", "a-new-one"]


@pytest.mark.parametrize(
    ("name", "unit", "ends", "verdict", "cell", "short"),
    [
        ("speed", "x", (2.0879, 1.9717, 2.2111), "", "2.09x [1.97, 2.21]", "**2.09x** [1.97, 2.21]"),
        ("peak memory", "x", (0.9996, 0.9996, 0.9996), "", "1.00x", "1.00x"),
        ("loss, a over b", "x", (1.0003, 0.9989, 1.0016), "", "+0.03 % [-0.11, +0.16]", None),
        ("loss, a over b", "x", (28.83, 24.97, 33.28), "", "29x [25, 33]", None),
        ("loss", "%", (0.012, -0.047, 0.072), "EQUIVALENT", "+0.01 % [-0.05, +0.07] EQUIVALENT", "same within 0.5 %"),
        ("loss", "%", (0.759, 0.423, 1.095), "WORSE", "+0.76 % [+0.42, +1.09] WORSE", "+0.76 % worse"),
        ("top1", "%", (98.31, 98.31, 98.31), "", "98.3 %", None),
        ("time", "s", (128.43, 128.43, 128.43), "", "128 s", None),
        ("loss reached", "", (1.891, 1.8896, 1.8919), "CONFIRMED", "1.89 CONFIRMED", None),
    ],
)
def test_a_measurement_in_a_cell(
    name: str, unit: str, ends: tuple[float, ...], verdict: str, cell: str, short: str | None
) -> None:
    found = dict(zip(("value", "low", "high"), ends, strict=True)) | {"unit": unit, "verdict": verdict, "margin": 0.005}
    assert shown(name, found) == cell
    assert short is None or brief(name, found) == short


def measured(**found: float) -> dict[str, dict[str, Any]]:
    return {name: {"value": value, "low": value, "high": value, "unit": "x"} for name, value in found.items()}


def test_empty_rows_and_columns_are_left_out_and_a_group_in_a_name_is_a_column() -> None:
    machines = {"fast": measured(a=1, b=2), "slow": measured(c=3), "none": measured(d=4)}
    table = {"head": "what", "rows": {"c": "see", "a": "aye", "absent": "nothing"}}
    assert filled_table(table, machines).splitlines() == [
        "| what | fast | slow |",
        "| --- | --- | --- |",
        "| see |  | 3.00x |",
        "| aye | 1.00x |  |",
    ]
    machines = {"here": measured(**{"net, step of A": 1, "net, step of B": 2})}
    table = {"head": "step", "also": ["machine"], "form": "ROW, step of (.+)", "rows": {"net": "a net"}}
    assert filled_table(table, machines).splitlines()[::2] == [
        "| step | machine | A | B |",
        "| a net | here | 1.00x | 2.00x |",
    ]


def test_a_measurement_without_words_is_shown_by_its_name() -> None:
    every = {path.name: text for path, text in blocks({"a GPU": measured(**{"something new": 2})}).items()}
    assert "## Other measurements" in every["results.md"]
    assert "| something new | 2.00x |" in every["results.md"]
    assert "Other measurements" not in blocks(read_machines())[results.PROJECT / "docs/results.md"]


def test_a_gpus_column_takes_the_place_of_the_sentence_that_none_was_measured() -> None:
    rate = {"value": 456_000.4, "low": 456_000.4, "high": 456_000.4, "unit": "tokens/s"}
    given = {"H200": {"GPT-2 124M, bf16, compiled: throughput": rate}}
    pages, before = blocks(given), blocks({"a CPU": measured(speed=2)})
    assert {path.name for path in pages} == {"README.md", "which-precision.md", "results.md"}
    for path, text in pages.items():
        assert "| H200 |" in text
        assert "456,000 tokens/s" in text
        assert "No GPU has been measured" in before[path]
        assert "No GPU has been measured" not in text


def test_the_picture_can_be_drawn_where_speed_was_not_judged(tmp_path: Path) -> None:
    loss = measured(**{"precisions, bf16 / fp32, validation loss": 0.1})
    loss["precisions, bf16 / fp32, validation loss"]["verdict"] = "EQUIVALENT"
    draw({"a machine": loss, "another": measured(unrelated=1)}, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size < 100_000


def test_the_newest_measurement_of_clean_code_replaces_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "PROJECT", tmp_path)
    origin = Origin(CPU.facts(), {}, {"commit": "a", "dirty": "false"}, "2026-12-01")
    one = {"value": 2.0, "low": 1.5, "high": 2.5, "unit": "x"}
    keep(origin, "first", {"speed": one, "other": one})
    keep(origin, "second", {"speed": one | {"value": 2.25}})
    changed = replace(origin, git={"commit": "a", "dirty": "true"})
    assert keep(changed, "third", {"speed": one}).startswith("not kept: ")
    kept = json.loads((tmp_path / f"{origin.machine}.json").read_text())["measurements"]
    assert {name: (found["value"], found["command"]) for name, found in kept.items()} == {
        "speed": (2.25, "second"),
        "other": (2.0, "first"),
    }


def test_what_a_folder_measured_is_of_its_own_machine_and_commit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished comparison and no claim"):
        read_folder(tmp_path)
    there: dict[str, Any] = {"hardware": replace(CPU, name="Another").facts(), "versions": {"torch": "1"}}
    there["git"] = {"commit": "b", "dirty": "false"}
    found = {"claim": "mine", "command": "c", "rows": [{"quantity": "throughput, a over b", "value": 2.0}]}
    (tmp_path / "claim.json").write_text(json.dumps(there | found))
    origin, command, measured = read_folder(tmp_path)
    assert (origin.machine.partition("-")[0], origin.git["commit"]) == ("another", "b")
    assert (command, measured) == ("c", {"mine: throughput, a over b": {"value": 2.0}})
