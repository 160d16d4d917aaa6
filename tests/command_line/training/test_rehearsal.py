"""A rehearsal of the programme for a GPU machine: its stages at a tiny size, through the real command lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.bench import command as bench_cli
from evidence.claims import command as reproduce_cli
from evidence.claims import results
from evidence.claims.reproduce import Reproduction, machine_name
from evidence.programme import command as cli
from evidence.programme import rates
from evidence.programme.stages import stages
from trainer.hardware import detect


def test_the_programme_is_rehearsed(
    train: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claims and bench.py's measurements have tests of their own; here only their command lines are read."""
    tested: list[str] = []

    def test(self: Reproduction, name: str) -> dict[str, Any]:
        assert self.reduced
        assert self.budget
        tested.append(name)
        self.done[name] = {"claim": name, "verdict": "reduced: no verdict"}
        return self.done[name]

    def launch(command: list[str], log: Path, limit_s: float) -> int:
        words, name = command[1:], log.stem
        log.write_text(f"{name} ran\n")
        if name == "rates":
            return rates.main(words[3:])
        if name == "tests":
            assert words[:2] == ["-m", "pytest"]
            assert (Path(words[2]) / "test_cuda.py").is_file()
            return 0
        assert Path(words[0]).is_file()
        if words[0].endswith("train.py"):
            done = train(*words[1:])
            assert done.code == 0, done.err
            return int(done.code)
        return {"claims": reproduce_cli.main, "bench": bench_cli.main}[name](words[1:])

    monkeypatch.setattr(Reproduction, "test", test)
    monkeypatch.setattr(bench_cli, "MEASUREMENTS", {"startup": lambda *_: iter(())})
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("OUT", raising=False)
    place = folder / "programme"
    plan = stages(place, "cpu", True, [])
    records = cli.Programme(place, detect("cpu"), 600, launch).run(plan, [])
    assert {name: record["status"] for name, record in records.items()} == {stage.name: "done" for stage in plan}
    assert tested == reproduce_cli.ordered(reproduce_cli.names(), results.read().get(machine_name(detect("cpu")), {}))
    page = (place / "programme.md").read_text()
    assert "not run yet" not in page
    for name in ("operators-gpt2.txt", "operators-resnet50.txt"):
        assert "aten::" in (place / name).read_text()
    assert records["resnet50_eager"]["summary"]["status"] == "FINISHED"
