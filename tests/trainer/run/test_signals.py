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


@pytest.mark.parametrize("launcher", ["LOCAL_RANK", "SLURM_JOB_ID"])
def test_a_launcher_that_repeats_itself_does_not_keep_the_run_from_saving(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM signals torchrun and its ranks, and torchrun passes its own signal on."""
    monkeypatch.setenv(launcher, "7")
    with Signals() as signals:
        signals.ahead = "finishing the step"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop == signal.SIGTERM
        signals.ahead = None  # the loop has ended, and saves
        signal.raise_signal(signal.SIGTERM)
        signals.ahead = "finishing the step"
        with pytest.raises(Interrupted, match="second signal"):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("before", "requests"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_requests_a_stop_unless_nohup_says_otherwise(before: signal.Handlers, requests: bool) -> None:
    original = signal.signal(signal.SIGHUP, before)
    try:
        with Signals() as signals:
            signals.ahead = "finishing the step"
            signal.raise_signal(signal.SIGHUP)
            try:
                signal.raise_signal(signal.SIGHUP)  # the kernel's, and the shell's
            except Interrupted:
                pytest.fail("it ends the run without saving")
            assert signals.stop == (signal.SIGHUP if requests else None)
        with Signals(["HUP"]) as signals:
            signal.raise_signal(signal.SIGHUP)
            assert (signals.stop, signals.take_save()) == (None, True)
    finally:
        assert signal.signal(signal.SIGHUP, original) is before
