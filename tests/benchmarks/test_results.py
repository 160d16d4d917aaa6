"""What is kept of a measurement, and the tables that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import blocks, filled, keep, machine_name, read_folder, shown
from tests.helpers import CPU
from trainer.errors import UserError


def test_the_pages_show_what_results_hold() -> None:
    for path, table in blocks().items():
        page = path.read_text(encoding="utf-8")
        assert filled(page, table) == page, "run: python benchmarks/results.py"


def test_a_cpu_is_named_with_its_bf16_instructions() -> None:
    """AMD EPYC is the name of processors with and without them."""
    for flag, words in (("avx2", ""), ("avx512_bf16", "avx512-bf16-"), ("amx_bf16", "amx-")):
        cpu = replace(CPU, name="AMD EPYC", cpu_cores=2, cpu_flags=frozenset({flag}))
        assert machine_name(cpu) == f"amd-epyc-{words}2-cores"


def test_the_newest_measurement_of_clean_code_replaces_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "PROJECT", tmp_path)
    git = {"commit": "a", "dirty": "false"}
    monkeypatch.setattr(results, "git_facts", lambda: git)
    one = {"value": 2.0, "low": 1.5, "high": 2.5, "unit": "x"}
    keep(CPU, "first", {"speed": one, "other": one})
    keep(CPU, "second", {"speed": one | {"value": 2.25}})
    git["dirty"] = "true"
    assert keep(CPU, "third", {"speed": one}).startswith("not kept: commit your changes first")
    kept = json.loads((tmp_path / f"{machine_name(CPU)}.json").read_text())["measurements"]
    assert {name: (found["value"], found["command"]) for name, found in kept.items()} == {
        "speed": (2.25, "second"),
        "other": (2.0, "first"),
    }
    assert (shown(kept["speed"]), shown(None)) == ("2.25x [1.5, 2.5]", "")


def test_a_folder_that_measured_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished comparison and no claim"):
        read_folder(tmp_path)
    found = {"claim": "mine", "command": "c", "findings": [{"quantity": "throughput, a over b", "value": 2.0}]}
    (tmp_path / "claim.json").write_text(json.dumps(found))
    assert read_folder(tmp_path) == ("c", {"mine: throughput, a over b": {"value": 2.0}})
