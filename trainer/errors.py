"""The ways a run can end early, each with the exit code the command line gives it."""

from __future__ import annotations


class RunError(Exception):
    """A run that ends early for a known reason; the message is shown without a traceback."""

    exit_code = 1
    shared = False
    """Whether every process of the job raises it at the same point, so that one tells the user and all stay in step."""


class UserError(RunError):
    """Something the user typed or supplied cannot work: the message names it and says what to do."""

    exit_code = 2


class NonFiniteError(RunError):
    """Training turned non-finite, and the update that would have kept the damage was not made."""

    exit_code = 3
    shared = True


class Interrupted(RunError):
    """A signal asked the run to stop."""

    shared = True

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        return type(self), (str(self), self.exit_code - 128)
