"""Mistakes and their remedies: a row is a wrong command, and words of its message.

    what all commands of the row have | the mistake | words of its message, each before … ; "-": nothing

Every remedy that the error holds is typed in place of the mistake, and has to be accepted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.command_line.conftest import Result
from trainer.config import options
from trainer.config.command_line import remedied
from trainer.errors import UserError
from trainer.run import command


class Began(BaseException):
    """All that was typed is accepted: the work begins."""


@dataclass(frozen=True)
class Row:
    """A mistake."""

    common: list[str]
    wrong: list[str]
    words: list[str]


def begin(*_: object, **__: object) -> None:
    raise Began


def rows(table: str, **short: str) -> list[object]:
    """The rows of a table as parameters of a test; ``short`` are names that stand for several words."""
    found: list[object] = []
    for line in table.strip().splitlines():
        if line.startswith("#"):
            continue
        whole = line
        for name, words in short.items():
            whole = re.sub(rf"\b{name}\b", words, whole)
        common, wrong, words = ("" if cell == "-" else cell for cell in whole.split(" | "))
        row = Row(shlex.split(common), shlex.split(wrong), words.split(" … "))
        found.append(pytest.param(row, id=line.replace(" | ", " ")[:60]))
    return found


def check(row: Row, run: Callable[[list[str]], Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mistake, and then do each thing that its message says to do."""
    held: list[UserError] = []

    def holding(report: Callable[..., int]) -> Callable[..., int]:
        def hold(error: UserError, *others: str) -> int:
            held.append(error)
            return report(error, *others)

        return hold

    typed = [*row.common, *row.wrong]
    with monkeypatch.context() as patch:
        patch.setattr(command, "_report", holding(command._report))
        patch.setattr(options, "report", holding(options.report))
        refused = run(typed)
    said = refused.err.rpartition("error: ")[2]
    assert refused.code == 2, "no mistake"
    assert not (more := said.partition("\n")[2].strip()) or more.startswith("python ")  # a sentence, and a command
    assert "Traceback" not in refused.out + refused.err
    for words in row.words:
        assert words in said
    script = typed[:1] if typed[0] in SCRIPTS else []
    for remedy in getattr(held[-1], "remedies", ()):
        mended = [*script, *remedied(typed[len(script) :], remedy, held[-1].mistake)]
        accepted = run(mended)
        assert accepted.code == 0, f"{said}{shlex.join(mended)}: {accepted.err}"


SCRIPTS = {
    "compare": ("evidence.comparison.command:main", "evidence.runs.Runner.run_all"),
    "advise": ("evidence.advice.command:main", "evidence.advice.search.Search.run"),
    "layers": ("evidence.layers.command:main", "evidence.layers.search.Search.run"),
    "search": ("evidence.search.search:main", "evidence.search.search.run_trials"),
    "lr_range": ("evidence.search.lr_range:main", "evidence.search.lr_range.range_test"),
    "memory": ("evidence.memory.command:memory", "evidence.memory.command.forecast"),
    "max_batch": ("evidence.memory.command:max_batch", "evidence.memory.max_batch.search"),
    "doctor": ("evidence.doctor.command:main", "evidence.doctor.command.diagnose"),
    "diff": ("evidence.diff.command:main", "evidence.diff.command.compare"),
    "reproduce": ("evidence.claims.reproduce:main", "evidence.claims.reproduce.test"),
    "evaluate": ("inference.evaluate:evaluate", "inference.evaluate.measure"),
    "generate": ("inference.generate:generate", "inference.generate._write"),
    "predict": ("inference.predict:predict", "inference.predict._predictions"),
    "sync": ("scripts.sync:main", "trainer.tracking.follower.Follower.send"),
    "ui": ("scripts.ui:main", "os.execve"),
}
"""A script's function, and where it has accepted all that was typed."""


def up_to_the_work(words: list[str], script: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Result:
    """Call another script than train.py, ``words[0]``; its exit code is 0 where its work would begin."""
    main, place = SCRIPTS[words[0]]
    with monkeypatch.context() as patch:
        patch.setattr(place, begin)
        try:
            return script(main, *words[1:])
        except Began:
            return Result(0, "", "")
