"""Signals as exceptions and requests (trainer/signals.py)."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from trainer.errors import Interrupted
from trainer.signals import Requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_in_a_library_that_catches_every_exception(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``shutil.rmtree`` does so with ``ignore_errors``, around its first call of the system."""
    lstat = os.lstat

    def interrupted(*arguments: object, **given: object) -> object:
        signal.raise_signal(number)
        return lstat(*arguments, **given)  # type: ignore[call-overload]

    with Requests(), pytest.raises(Interrupted) as raised:  # noqa: PT012 - what ends is the whole block
        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", interrupted)
            shutil.rmtree(tmp_path, ignore_errors=True)
        pytest.fail("the signal was lost")
    assert raised.value.exit_code == 128 + number
