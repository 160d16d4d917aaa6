"""What scripts/memory.py and scripts/max_batch.py answer, and what a run that ran out of memory says."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import memory

JOB = ("recipe=bignet", "recipe.width=256", "recipe.layers=4", "data.samples=512", "device=cpu")


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_memory_forecasts_and_checks_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [*JOB, "batch_size=2048", "compile=default"]
    assert memory.main([*job, "precision=fp32,bf16"]) == 0
    both = rows(capsys.readouterr().out)
    assert both["MiB"] == ["fp32", "bf16"]
    assert both["weights"] == ["1.0", "1.0"]
    assert "measured" not in both
    assert memory.main([*job, "precision=bf16", "check=true"]) == 0
    one = rows(capsys.readouterr().out)
    assert one["peak"] == both["peak"][1:]
    assert one["autocast_copies"] == ["0.4"]
    assert float(one["measured"][0]) > 10
    assert abs(float(one["error"][0].rstrip("%"))) <= 5
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("precision=bf16,bf61",), "precision=bf61 is not a choice; did you mean 'bf16'?"),
        (("check=maybe",), "check=maybe must be check=true or check=false"),
        (("micro_batch_size=3", "batch_size=8"), "use micro_batch_size=2 or 4"),
        (("parallel=fsdp",), "memory is forecast and measured for one process"),
    ],
)
def test_memory_tells_mistakes(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([*JOB, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1
