"""How long a run that has ended waits for MLflow (trainer/tracking/mlflow/feed.py), by a clock that tests turn."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import UserError
from trainer.progress import shown_by
from trainer.tracking.mlflow import feed
from trainer.tracking.mlflow.record import RunInfo


class Clock:
    """Stands for the module ``time``: to sleep takes no time, and the clock is turned."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feed, "time", clock)
    return clock


def concluded(
    monkeypatch: pytest.MonkeyPatch, attempt: Callable[[Callable[[str, float], None]], None], patience_s: float = 30.0
) -> str | None:
    """Conclude a feed whose attempts to deliver are replaced."""

    class Delivery:
        elsewhere = None

        def __init__(self, folder: Path, uri: str, info: RunInfo, session: str | None, progress: Any) -> None:
            attempt(progress)

        def complete(self, status: str) -> None:
            pass

    monkeypatch.setattr(feed, "Delivery", Delivery)
    return feed.Feed(Path("run"), "http://host", RunInfo("e", "run", {}, {})).conclude("FINISHED", patience_s)


@pytest.mark.parametrize(("patience_s", "least_s"), [(30.0, 25.0), (7.0, 5.0), (math.inf, 3.0)])
def test_a_store_that_refuses_is_asked_again_until_the_patience_ends(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, patience_s: float, least_s: float
) -> None:
    asked = []

    def refuse(progress: Any) -> None:
        asked.append(clock.now)
        raise ConnectionError("503")

    assert concluded(monkeypatch, refuse, patience_s) == "http://host lacks this run: 503"
    assert least_s <= asked[-1] <= min(patience_s, feed.SYNC_PAUSES_S if math.isinf(patience_s) else patience_s)
    assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= feed.LONGEST_PAUSE_S


def test_a_store_that_comes_back_in_time_gets_the_run(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: Any) -> None:
        if clock.now < 20:
            raise ConnectionError("refused")

    assert concluded(monkeypatch, refuse) is None


def test_what_is_always_refused_does_not_wait_for_ever(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: Any) -> None:
        progress("best", allowance_s=1000.0)  # everything else arrives, which is progress
        raise ValueError("too large")

    assert concluded(monkeypatch, refuse) == "http://host lacks best: too large"
    assert clock.now <= 30

    def mistake(progress: Any) -> None:
        raise UserError("it belongs to another program")

    before = clock.now
    assert "belongs" in str(concluded(monkeypatch, mistake))
    assert clock.now == before


def test_how_much_was_sent_is_shown(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[tuple[float, float]] = []
    (tmp_path / "model").mkdir()
    for name, size in (("summary.json", 250_000), ("model/weights", 750_000)):
        (tmp_path / name).write_bytes(bytes(size))

    def wait_for(mb: float) -> None:
        while (mb, 1.0) not in shown:
            threading.Event().wait(0.01)

    def send(progress: Any) -> None:
        progress("the last metrics", rest=1_000_000)
        progress("summary.json", part=tmp_path / "summary.json")
        progress("best", part=tmp_path / "model")
        wait_for(0.25)
        progress("its description")

    @contextmanager
    def show(label: str, total: None, unit: str) -> Iterator[Any]:
        assert (label, unit) == ("sending the run to MLflow", "MB")
        yield lambda done, total: shown.append((done, total))

    with shown_by(show):
        assert concluded(monkeypatch, send) is None
