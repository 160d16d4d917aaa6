"""The thread that works ahead: order, errors, its end. Events decide when anything goes on, never the time."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from tests.helpers import PROJECT
from trainer.data.loading import Prefetched

PATIENCE_S = 60.0
"""After which an event that never comes fails the test."""


def nothing() -> None:
    pass


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches ahead"]


class Source:
    """Counts to ``length``; notes which numbers were begun and whether the generator was closed."""

    def __init__(self, length: int = 10**9, error_at: int | None = None) -> None:
        self.length = length
        self.error_at = error_at
        self.begun: list[int] = []
        self.closed_by: threading.Thread | None = None
        self._changed = threading.Condition()

    def items(self) -> Iterator[int]:
        try:
            for number in range(self.length):
                with self._changed:
                    self.begun.append(number)
                    self._changed.notify_all()
                if number == self.error_at:
                    raise ZeroDivisionError("a bug")
                yield number
        finally:
            self.closed_by = threading.current_thread()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.begun, PATIENCE_S)


@pytest.mark.parametrize("length", [0, 1, 2, 50])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_items_come_in_their_order(length: int, count: int) -> None:
    ahead = Prefetched(iter(range(length)), count, nothing)
    assert list(ahead) == list(range(length))
    assert list(ahead) == []
    assert threads() == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_works_on_the_next_items_while_one_is_used_and_not_on_more(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    class Room(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if not super().acquire(blocking=False):
                waits.set()
                super().acquire()
            return True

    monkeypatch.setattr("trainer.data.loading.threading.Semaphore", Room)
    source = Source()
    ahead = Prefetched(source.items(), count, nothing)
    for number in range(5):
        assert waits.wait(PATIENCE_S)
        assert source.begun == list(range(number + count))  # although nobody has asked for them
        waits.clear()
        assert next(ahead) == number
    ahead.close()


def test_the_thread_prepares_itself_first() -> None:
    prepared: list[threading.Thread] = []
    ahead = Prefetched(iter([1]), 2, lambda: prepared.append(threading.current_thread()))
    assert next(ahead) == 1
    assert prepared[0] is not threading.main_thread()
    ahead.close()


def test_an_error_comes_in_its_place_with_its_traceback() -> None:
    ahead = Prefetched(Source(error_at=3).items(), 2, nothing)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match=r"^a bug$") as raised:
        next(ahead)
    assert "items" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert list(ahead) == []
    assert threads() == []


def test_an_error_of_the_preparation_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        next(Prefetched(iter([1]), 2, fail))
    assert threads() == []


def _close(held: list[Prefetched[int]]) -> None:
    held[0].close()


def _forget(held: list[Prefetched[int]]) -> None:
    held.clear()


def _collect(held: list[Prefetched[int]]) -> None:
    held.append(held)  # type: ignore[arg-type]  # a cycle
    ahead = held[0]
    ahead.itself = ahead  # type: ignore[attr-defined]
    del ahead
    held.clear()
    gc.collect()


@pytest.mark.parametrize("end", [_close, _forget, _collect])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_thread_and_generator_end_with_it(end: Callable[[list[Prefetched[int]]], None], taken: int) -> None:
    source = Source()
    held = [Prefetched(source.items(), 2, nothing)]
    (thread,) = threads()
    source.wait_for(0)
    assert [next(held[0]) for _ in range(taken)] == list(range(taken))
    end(held)
    assert not thread.is_alive()
    assert source.closed_by is thread
    assert all(list(ahead) == [] for ahead in held)


def test_an_item_in_work_is_finished_before_the_end() -> None:
    begun, may_end = threading.Event(), threading.Event()
    finished = []

    def items() -> Iterator[int]:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        finished.append(True)
        yield 0

    ahead = Prefetched(items(), 2, nothing)
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert not finished
    may_end.set()
    closing.join()
    assert finished
    assert threads() == []


def test_the_garbage_collector_may_end_it_in_its_own_thread() -> None:
    """A thread cannot wait for itself."""
    ended, failures = threading.Event(), []
    held: list[Prefetched[int]] = []

    def items() -> Iterator[int]:
        assert ended.wait(PATIENCE_S)
        try:
            held.pop().close()
        except RuntimeError as error:
            failures.append(error)
        yield 0

    held.append(Prefetched(items(), 2, nothing))
    (thread,) = threads()
    ended.set()
    thread.join()
    assert not held
    assert not failures


def test_signals_are_handled_while_an_item_is_waited_for() -> None:
    handled = threading.Event()
    seen: list[bool] = []

    def handle(number: int, frame: FrameType | None) -> None:
        handled.set()

    def items() -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGUSR1)  # the main thread is in ``next`` below, or about to be
        seen.append(handled.wait(PATIENCE_S))
        yield 0

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert list(Prefetched(items(), 2, nothing)) == [0]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [True]


def test_a_process_ends_while_an_item_is_in_work() -> None:
    """Held to the end, unclosed; in the middle of an item, which is finished, or the thread would die within it."""
    program = """
import atexit, threading
from trainer.data.loading import Prefetched

begun, at_the_end = threading.Event(), threading.Event()

def items():
    try:
        yield 0
        begun.set()
        at_the_end.wait()
        print("finished", flush=True)
        yield 1
    finally:
        print("released", flush=True)

ahead = Prefetched(items(), 2, lambda: None)
atexit.register(at_the_end.set)
assert next(ahead) == 0
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\nreleased\n", "")
