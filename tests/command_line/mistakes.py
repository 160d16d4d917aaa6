"""Mistakes and their remedies: a row is a wrong command, words of its message, and what the message says to do.

    what all commands of the row have | the mistake | words of its message, each before … | a remedy | another

"-" is nothing. Every remedy is typed in place of the mistake, and has to be accepted; a remedy that is "-" leaves the
mistake out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.command_line.conftest import Result


class Began(BaseException):
    """All that was typed is accepted: the work begins."""


@dataclass(frozen=True)
class Row:
    """A mistake."""

    common: list[str]
    wrong: list[str]
    words: list[str]
    remedies: list[list[str]]


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
        common, wrong, words, *remedies = ("" if cell == "-" else cell for cell in whole.split(" | "))
        row = Row(shlex.split(common), shlex.split(wrong), words.split(" … "), [shlex.split(each) for each in remedies])
        found.append(pytest.param(row, id=line.replace(" | ", " ")[:60]))
    return found


def key_of(word: str) -> str:
    key = word.lstrip("+~-").removeprefix("space.").partition("=")[0]
    return "arm" if key.startswith("arm.") else key


def is_named(word: str, wrong: list[str], said: str) -> bool:
    """Whether a message names a word of its remedy: its key, or the value where the key had another one."""
    key, value = key_of(word), word.partition("=")[2]
    had = [other.partition("=")[2] for other in wrong if key_of(other) == key]
    parts = {value, *re.split(r"[=\s,()\[\]]+", value)} - {""} if value and had and value not in had else {key}
    return word in said or any(part in said for part in parts)


def check(row: Row, run: Callable[[list[str]], Result]) -> None:
    """Make the mistake, and then what its message says to do."""
    refused = run([*row.common, *row.wrong])
    said = refused.err.rpartition("error: ")[2]
    assert refused.code == 2, "no mistake"
    assert not (more := said.partition("\n")[2].strip()) or more.startswith("python ")  # a sentence, and a command
    assert "Traceback" not in refused.out + refused.err
    for words in row.words:
        assert words in said
    for remedy in row.remedies:
        assert all(is_named(word, row.wrong, said) for word in remedy if word not in row.wrong), (remedy, said)
        accepted = run([*row.common, *remedy])
        assert accepted.code == 0, accepted.err


SCRIPTS = {
    "compare": ("evidence.comparison.command:main", "evidence.runs.Runner.run_all"),
    "advise": ("evidence.advice.command:main", "evidence.advice.search.Search.run"),
    "search": ("evidence.search.search:main", "evidence.search.search.run_trials"),
    "lr_range": ("evidence.search.lr_range:main", "evidence.search.lr_range.range_test"),
    "memory": ("evidence.memory.command:memory", "evidence.memory.command.forecast"),
    "max_batch": ("evidence.memory.command:max_batch", "evidence.memory.max_batch.search"),
    "doctor": ("evidence.doctor.command:main", "evidence.doctor.command.diagnose"),
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
