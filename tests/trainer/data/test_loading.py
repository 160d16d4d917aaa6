"""The thread that works ahead: order, errors, its end. Events decide when anything goes on, never the time."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Generator, Iterator

import pytest

from trainer.data.loading import prefetched

PATIENCE_S = 60.0
"""After which an event that never comes fails the test."""

Ahead = Generator[int, None, None]


def nothing() -> None:
    pass


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches ahead")]


class Source:
    """Counts up; notes which numbers were begun."""

    def __init__(self, length: int = 10**9, error_at: int | None = None) -> None:
        self.length = length
        self.error_at = error_at
        self.begun: list[int] = []
        self._changed = threading.Condition()

    def items(self) -> Iterator[int]:
        for number in range(self.length):
            with self._changed:
                self.begun.append(number)
                self._changed.notify_all()
            if number == self.error_at:
                raise ZeroDivisionError("a bug")
            yield number

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.begun, PATIENCE_S)


@pytest.mark.parametrize("length", [0, 1, 50])
@pytest.mark.parametrize("count", [1, 7])
def test_the_items_come_in_their_order(length: int, count: int) -> None:
    assert list(prefetched(iter(range(length)), count, nothing)) == list(range(length))
    assert threads() == []


@pytest.mark.parametrize("count", [1, 3])
def test_it_works_on_the_next_items_while_one_is_used_and_not_on_more(count: int) -> None:
    source = Source()
    ahead = prefetched(source.items(), count, nothing)
    for number in range(5):
        assert next(ahead) == number
        source.wait_for(number + count)  # although nobody has asked for it
    ahead.close()
    assert source.begun == list(range(5 + count))


def test_errors_come_in_their_place_with_their_traceback() -> None:
    ahead = prefetched(Source(error_at=3).items(), 2, nothing)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match=r"^a bug$") as raised:
        next(ahead)
    assert "items" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert list(ahead) == []
    with pytest.raises(ZeroDivisionError):
        next(prefetched(iter([1]), 2, lambda: 1 // 0))  # of the preparation
    assert threads() == []


def _close(held: list[Ahead]) -> None:
    held[0].close()


def _forget(held: list[Ahead]) -> None:
    held.clear()


def _collect(held: list[Ahead]) -> None:
    held.append(held)  # type: ignore[arg-type]  # a cycle


@pytest.mark.parametrize("end", [_close, _forget, _collect])
@pytest.mark.parametrize("taken", [1, 5])
def test_the_thread_ends_with_it(end: Callable[[list[Ahead]], None], taken: int) -> None:
    held = [prefetched(Source().items(), 2, nothing)]
    assert [next(held[0]) for _ in range(taken)] == list(range(taken))
    (thread,) = threads()
    end(held)
    del held
    gc.collect()
    assert not thread.is_alive()


def test_an_item_in_work_is_finished_before_the_end() -> None:
    begun, may_end = threading.Event(), threading.Event()
    finished = []

    def items() -> Iterator[int]:
        yield 0
        begun.set()
        assert may_end.wait(PATIENCE_S)
        finished.append(True)
        yield 1

    ahead = prefetched(items(), 2, nothing)
    assert next(ahead) == 0
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
    may_end, failures = threading.Event(), []
    held: list[Ahead] = []

    def items() -> Iterator[int]:
        yield 0
        assert may_end.wait(PATIENCE_S)
        try:
            held.pop().close()
        except RuntimeError as error:
            failures.append(error)

    held.append(prefetched(items(), 2, nothing))
    assert next(held[0]) == 0
    (thread,) = threads()
    may_end.set()
    thread.join()
    assert not held
    assert not failures
