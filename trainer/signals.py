"""Signals as requests that the loop answers between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from trainer.errors import Interrupted
from trainer.opening import OUTSIDE


class Requests:
    """While entered: in training, the first SIGINT or SIGTERM asks to stop, and a second one leaves at once.

    Before training there is nothing to save, so the first one leaves. Others, such as USR1, ask for a checkpoint.
    """

    def __init__(self, save_on: Sequence[str] = ()) -> None:
        """Prepare the handlers; ``save_on`` names signals without their ``SIG``."""
        self.training = False
        self.stop: int | None = None
        """The number of the signal that asked to stop."""
        self._save = False
        self._save_on = [signal.Signals[f"SIG{name}"] for name in save_on]
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive_stop)
            for number in self._save_on:
                self._previous[number] = signal.signal(number, self._receive_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive_stop(self, number: int, frame: FrameType | None) -> None:
        if not self.training:
            raise Interrupted(OUTSIDE, number)
        if self.stop is not None:
            raise Interrupted("a second signal: left at once, without saving", number)
        self.stop = number

    def take_save(self) -> bool:
        """Tell whether a checkpoint was asked for since the last call."""
        if not self._save:
            return False
        self._save = False  # one more signal until here means the same checkpoint
        return True

    def _receive_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True
