"""Signals as exceptions and requests (trainer/run/signals.py)."""

import signal
from contextlib import suppress

import pytest

from trainer.errors import Interrupted
from trainer.run.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_in_a_library_that_catches_every_exception(number: signal.Signals) -> None:
    """As ``shutil.rmtree(ignore_errors=True)`` does in Python 3.11, around its first system call."""
    with Signals(), pytest.raises(Interrupted) as raised:  # noqa: PT012 - what ends is the whole block
        with suppress(Exception):
            signal.raise_signal(number)
        pytest.fail("the signal was lost")
    assert raised.value.exit_code == 128 + number
