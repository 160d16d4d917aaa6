"""Two logs beside each other: by step and by name, to the last digit; and the logs of other trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evidence.diff.logs import Compared, Log, Pair, compare, read_log
from trainer.errors import UserError

Row = dict[str, Any]


def written(path: Path, rows: list[Row]) -> Path:
    """A log: JSON lines, or CSV with blanks where a row has no value."""
    if path.suffix == ".csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def compared(folder: Path, a: list[Row], b: list[Row], suffix: str = ".jsonl", **options: Any) -> Compared:
    logs = (read_log(written(folder / f"{name}{suffix}", rows)) for name, rows in (("a", a), ("b", b)))
    return compare(*logs, **options)


def losses(*values: float, first: int = 1, every: int = 1) -> list[Row]:
    return [{"step": first + every * number, "loss": value} for number, value in enumerate(values)]


def names(found: tuple[float, list[Pair]] | None) -> tuple[float, list[str]] | None:
    return found and (found[0], [each.name for each in found[1]])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_one_last_digit_is_a_difference(suffix: str, tmp_path: Path) -> None:
    rows = [{"step": step, "lr": 0.1, "loss": 2 / step} for step in range(1, 9)]
    changed = [row | {"loss": math.nextafter(row["loss"], 9)} if row["step"] == 6 else row for row in rows]
    found = compared(tmp_path, rows, changed, suffix)
    assert (names(found.first), found.large, found.values) == ((6, ["loss"]), None, 16)
    assert found.first is not None
    assert (found.first[1][0].a, found.first[1][0].b) == (2 / 6, math.nextafter(2 / 6, 9))
    assert compared(tmp_path, rows, rows, suffix).first is None


def test_a_large_difference_is_one_of_more_than_a_thousandth(tmp_path: Path) -> None:
    found = compared(tmp_path, losses(1, 1, 1000, 1, -1000), losses(1, 1, 1000.9, 1, -1001.1))
    assert (names(found.first), names(found.large)) == ((3, ["loss"]), (5, ["loss"]))


def test_all_that_differs_at_the_first_step_is_named_and_nothing_later(tmp_path: Path) -> None:
    a = [{"step": step, "loss": 1.0, "lr": 0.5, "grad_norm": 3.0, "acc": 1.0} for step in (1, 2, 3)]
    b = [a[0], a[1] | {"loss": 1.5, "grad_norm": 3.5}, a[2] | {"lr": 0.6}]
    assert names(compared(tmp_path, a, b).first) == (2, ["loss", "grad_norm"])


def test_logs_are_aligned_by_step_whatever_their_rows(tmp_path: Path) -> None:
    """Of one every step, of the other every second, begun later, and out of order."""
    a, b = losses(*range(10)), losses(*range(2, 10, 2), first=3, every=2)[::-1]
    found = compared(tmp_path, a, b)
    assert (found.first, found.steps) == (None, [3, 5, 7, 9])
    assert any("only in a: 6 steps of 10" in note for note in found.notes)
    assert names(compared(tmp_path, a, [row | {"loss": 7} for row in b]).first) == (3, ["loss"])


def test_what_one_log_alone_has_is_said(tmp_path: Path) -> None:
    a = [{"step": step, "loss": 1.0, "acc": 1.0} for step in (1, 2, 3)]
    for b, words in (
        (a[:2], "only in a: 1 step of 3"),
        ([{"step": 1, "loss": 1.0}, *a[1:]], "only in a at step 1 or others: acc"),
        ([{"step": row["step"], "loss": 1.0} for row in a], "only in a: acc"),
    ):
        found = compared(tmp_path, a, b)
        assert (found.first, found.alone) == (None, True)
        assert any(words in note for note in found.notes), found.notes


def test_a_mean_over_other_steps_is_not_compared(tmp_path: Path) -> None:
    """Of a run with log_every=1 and one with log_every=2; both log step 1."""
    a = [{"step": step, "loss": float(step), "lr": 0.1} for step in (1, 2, 3, 4)]
    b = [{"step": 1, "loss": 1.0, "lr": 0.1}, {"step": 2, "loss": 2.0, "lr": 0.1}, {"step": 4, "loss": 3.5, "lr": 0.1}]
    found = compared(tmp_path, a, b, means=["loss"])
    assert (found.first, found.values) == (None, 5)
    assert names(compared(tmp_path, a, [*b[:1], b[1] | {"loss": 9}], means=["loss"]).first) == (2, ["loss"])
    unknown = compared(tmp_path, a, b)
    assert names(unknown.first) == (4, ["loss"])
    assert any("a mean since the line before differs by that alone" in note for note in unknown.notes)


@pytest.mark.parametrize(
    ("a", "b", "relative"),
    [
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
        (0.0, -0.0, 0),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
        (math.inf, -math.inf, math.inf),
        (0.0, 1e-30, 1),
        (-2.0, 2.0, 2),
        (1.0, 0.75, 0.25),
    ],
)
def test_the_size_of_a_difference(a: float, b: float, relative: float) -> None:
    assert Pair("loss", a, b).relative == Pair("loss", b, a).relative == relative


def test_what_is_measured_of_the_machine_is_not_compared(tmp_path: Path) -> None:
    measured = [
        *("time", "samples_per_s", "step_time_s", "process_memory_bytes", "mfu", "checkpoint_stall_s"),
        *("eval_runtime", "train_samples_per_second", "Wall time", "_timestamp", "tok_per_sec", "throughput(tps)"),
        *("DeviceStatsMonitor.on_train_batch_end/cpu_percent", "system/gpu.0.memory", "memory/max_active(GiB)"),
    ]
    trained = ["loss", "lr", "timestep", "valid/perplexity", "loss_scale", "memorized", "momentum", "speedrun_score"]
    a = [{"step": 1, **dict.fromkeys((*measured, *trained), 1)}]
    b = [{"step": 1, **dict.fromkeys(measured, 2), **dict.fromkeys(trained, 1)}]
    found = compared(tmp_path, a, b)
    assert (found.first, found.names) == (None, trained)


def test_lightnings_csv_has_several_rows_of_a_step_with_blanks(tmp_path: Path) -> None:
    """As CSVLogger of Lightning 2.5 writes it: a row for training, one for validation, one for means of the epoch."""
    text = "epoch,lr-SGD,step,train_loss_epoch,train_loss_step,val_loss\n,0.01,0,,,\n0,,0,,14.9,\n"
    text += "0,,7,,,7.25\n0,,7,9.5,,\n"
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text(text)
    b.write_text(text.replace("7.25", "7.26"))
    log = read_log(a)
    assert log.points == {
        0: {"lr-SGD": 0.01, "epoch": 0, "train_loss_step": 14.9},
        7: {"epoch": 0, "val_loss": 7.25, "train_loss_epoch": 9.5},
    }
    assert not log.notes
    assert names(compare(log, read_log(b)).first) == (7, ["val_loss"])


def test_transformers_trainer_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    history = [{"epoch": 0.5, "loss": "3.25", "step": 1}, {"epoch": 1.0, "eval_loss": 2.5, "step": 2}]
    path.write_text(json.dumps({"global_step": 2, "log_history": history}, indent=2))
    assert read_log(path).points == {1: {"epoch": 0.5, "loss": 3.25}, 2: {"epoch": 1, "eval_loss": 2.5}}


def test_null_is_a_value_and_a_blank_is_none(tmp_path: Path) -> None:
    """A run's null has a flag beside it, of which nothing is said; the line that was being written is left out."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"config": "x"}\n{"step": 1, "loss": null, "loss_nonfinite": 1}\n{"step": 2, "loss": NaN}\n{"step": 3'
    )
    log = read_log(path)
    assert [list(values) for values in log.points.values()] == [["loss"], ["loss"]]
    assert all(math.isnan(values["loss"]) for values in log.points.values())
    assert names(compare(log, Log("step", {1: {"loss": 1.0}}, [])).first) == (1, ["loss"])
    assert compare(log, Log("step", {1: {"loss": math.nan}}, [])).first is None


def test_of_a_step_that_comes_again_the_last_value_counts_and_it_is_said(tmp_path: Path) -> None:
    """As in the log of a run that was resumed from step 1."""
    log = read_log(written(tmp_path / "a.jsonl", [*losses(5, 4, 3), *losses(4.5, 3.5, first=2)]))
    assert log.points == {1: {"loss": 5}, 2: {"loss": 4.5}, 3: {"loss": 3.5}}
    assert len(log.notes) == 1
    assert "2 values" in log.notes[0]


def test_a_step_column_of_another_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", [{"samples_seen": 10, "loss": 1}])
    assert read_log(path, "samples_seen").points == {10: {"loss": 1}}
    assert read_log(written(tmp_path / "b.csv", losses(1)), "samples_seen").points == {1: {"loss": 1}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "a.csv has no rows"),
        ("a.csv", "step,loss\n", "has no rows"),
        ("a.csv", "samples,loss\n1,2\n", r"\(samples, loss\); name the one that counts steps, step=NAME"),
        ("a.csv", "step,loss\none,2\n", "no column of numbers is called step"),
        ("a.csv", "step,loss\n1,2,3\n", "a line has more cells than the heading"),
        ("a.jsonl", '{"step": 1}\n{"step"\n{"step": 2}\n', "line 2 is no JSON"),
        ("a.jsonl", "[1, 2]\n", "a row is no object"),
        ("trainer_state.json", '{"log_history": 3}', "cannot be read"),
    ],
)
def test_a_log_that_cannot_be_read(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_log(tmp_path / name)


@pytest.mark.parametrize(
    ("b", "words"),
    [
        (Log("step", {11: {"loss": 1.0}}, []), "no step is in both logs: a has 1 to 2, and b has 11 to 11"),
        (Log("step", {1: {"acc": 1.0}}, []), "no metric of the training in common: a has loss, and b has acc"),
        (Log("step", {1: {"time": 1.0}}, []), "no metric of the training in common"),
        (Log("Epoch", {1: {"loss": 1.0}}, []), "a counts by step, and b by Epoch"),
        (Log("step", {1: {"lr": 1.0}, 9: {"loss": 1.0}}, []), "no value of loss is in both logs at the same step"),
    ],
)
def test_logs_that_cannot_be_compared(b: Log, words: str) -> None:
    with pytest.raises(UserError, match=words):
        compare(Log("step", {1: {"loss": 2.0}, 2: {"loss": 1.0}}, []), b)
