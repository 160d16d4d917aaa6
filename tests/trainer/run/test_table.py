"""The table of a run's progress (trainer/run/table.py)."""

from __future__ import annotations

import io
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trainer.profiling.utilisation import Utilisation
from trainer.run.step_metrics import STEP_METRICS, Column, StepMetric
from trainer.run.table import Table
from trainer.terminal import Terminal

LINE = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.2, "loss_scale": 65536.0, "skipped_steps": 3.0}
TIMED = LINE | {"tokens_per_s": 12_345.0, "step_time_s": 0.15}
SCORES = {"valid/loss": 2.25, "valid/perplexity": 9.4877}


def begun(width: int | None = None, mfu: bool = True, **monitor: Any) -> tuple[Table, io.StringIO]:
    """A table of 300 steps, evaluated after every 25th; in a file, or on a terminal of this width."""
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=width is not None, width=width))
    plan: Any = SimpleNamespace(steps=300, evaluates=lambda step: step % 25 == 0)
    utilisation = Utilisation(flops_per_unit=1e6, measured_tflops=0.1 if mfu else None)
    known: Any = SimpleNamespace(**{"unit": "tokens", "ever_scaled": False, "utilisation": utilisation} | monitor)
    return Table(terminal, plan, known), out


def lines(out: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).splitlines()


@pytest.mark.usefixtures("five_metrics")
def test_a_row_of_each_evaluation_has_the_last_line_of_the_log() -> None:
    table, out = begun()
    table.progress(1, TIMED | {"loss": 5.0})
    table.progress(20, TIMED)
    table.row(25, SCORES, best=True)
    table.row(50, SCORES, best=True)  # nothing was logged between them
    assert lines(out) == [
        "",
        "     step     loss    valid  perplexity       lr     norm    tok/s      MFU      eta",
        "       25   2.5000   2.2500      9.4877  1.0e-03     1.20    12.3k     12 %     0:41  ★",
        "       50            2.2500      9.4877                                               ★",
    ]


@pytest.mark.usefixtures("five_metrics")
def test_a_metric_of_the_steps_with_a_column_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    column = Column("peak", "{:.1f}".format)
    monkeypatch.setitem(STEP_METRICS, "peak", StepMetric(lambda step, _: step.grad_norm, max, column))
    table, out = begun()
    table.progress(20, TIMED | {"peak": 3.0})
    table.row(25, SCORES)
    _, heading, row = lines(out)
    assert heading.split() == ["step", "loss", "valid", "perplexity", "lr", "norm", "peak", "tok/s", "MFU", "eta"]
    assert row.split()[5:7] == ["1.20", "3.0"]


def test_the_time_of_the_first_step_says_nothing_about_the_others() -> None:
    table, out = begun()
    table.progress(1, TIMED)
    table.row(1)
    assert lines(out)[-1].split() == ["1", "2.5000", "1.0e-03", "1.20"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.5, 0.0, 1e-7, 0.05, 0.38, 999.99996, 12345.6, 1.2e6, 1e30])
@pytest.mark.parametrize("unit", ["tokens", "images", "samples"])
@pytest.mark.parametrize("scaled", [False, True])
def test_columns_are_aligned_for_numbers_of_any_size(value: float, unit: str, scaled: bool) -> None:
    table, out = begun(unit=unit, ever_scaled=scaled)  # the scale takes the place of MFU
    rate = {f"{unit}_per_s": abs(value) if math.isfinite(value) else 1.0, "step_time_s": 1.0}
    table.progress(20, LINE | {"loss": value, "grad_norm": value, "lr": 1e-3, "loss_scale": 2.0**21} | rate)
    table.row(25, dict.fromkeys(SCORES, value))
    _, heading, row = lines(out)
    ends = [found.end() for found in re.finditer(r"\S+", heading)]
    assert [found.end() for found in re.finditer(r"\S+( %)?", row)] == ends
    assert len(row) <= 100


def test_a_scaled_run_has_its_scale_and_a_narrow_terminal_what_tells_most() -> None:
    many = SCORES | {f"valid/metric_{number}": 0.5 for number in range(5)}
    for width, shown in (
        (None, "step loss valid perplexity lr norm tok/s eta scale skipped"),
        (80, "step loss valid perplexity tok/s eta scale skipped"),
        (72, "step loss valid tok/s eta scale skipped"),
    ):
        table, out = begun(width, ever_scaled=True)
        table.progress(20, TIMED)
        table.row(25, many, best=True)
        table._terminal.end_progress()
        heading, row = (line for line in lines(out) if "valid " in line or "★" in line)
        assert heading.split() == shown.split()
        assert len(row) <= (width or 100)
        assert row.split()[-3:] == ["65536", "3", "★"]


def test_a_log_has_one_heading_whatever_the_format_becomes() -> None:
    table, out = begun(ever_scaled=True, mfu=False)
    known: Any = table._monitor
    for step, measured_tflops in ((25, None), (50, 0.1)):
        known.utilisation = Utilisation(flops_per_unit=1e6, measured_tflops=measured_tflops)
        table.progress(step - 5, TIMED)
        table.row(step, SCORES)
    _, heading, *rows = lines(out)
    assert heading.split()[-2:] == ["scale", "skipped"]
    assert [row.split()[-2:] for row in rows] == [["65536", "3"]] * 2


def test_a_file_gets_a_sign_of_life_and_a_terminal_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for name in ("trainer.run.table", "trainer.terminal"):
        monkeypatch.setattr(f"{name}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    (in_file, file), (in_place, terminal) = begun(), begun(100)
    for step in range(1, 40):
        now[0] += 3.0
        for table in (in_file, in_place):
            table.progress(step, TIMED if step % 10 == 0 else None)
            in_place._terminal._progress.refresh()
        if step == 25:
            in_file.row(step, SCORES)
    shown = [line.split()[0] for line in lines(file) if line]
    # More often where the log has a new line; the one heading of the file has the columns of an evaluation.
    assert shown == ["7/300", "14/300", "20/300", "step", "25", "30", "37/300"]
    assert [line.split()[0] for line in lines(file) if "loss 2.5" in line] == ["20/300"]  # not that of another step
    assert "39/300  loss 2.5000  12.3k tok/s  eta 0:39" in terminal.getvalue()
    assert "step" not in terminal.getvalue()
    in_place._terminal.end_progress()
