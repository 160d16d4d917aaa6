"""The faults of tests/faults/faults.yaml, and how one is planted."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[2]


class DoesNotApply(Exception):
    """The source no longer holds the text that a fault replaces."""


@dataclass(frozen=True)
class Fault:
    """One edit, and who must notice it."""

    name: str
    file: str
    old: str
    new: str
    test: str
    """As pytest takes it; a test of several parameters without them."""

    def planted(self, project: Path = PROJECT) -> str:
        """Return the source with the fault.

        Raises:
            DoesNotApply: the text is not there exactly once, or the edit changes no code.
        """
        source = (project / self.file).read_text(encoding="utf-8")
        if (count := source.count(self.old)) != 1:
            raise DoesNotApply(f"{self.file} has {count} times {self.old!r}")
        edited = source.replace(self.old, self.new)
        if ast.dump(ast.parse(edited)) == ast.dump(ast.parse(source)):
            raise DoesNotApply(f"{self.file}: the edit changes no code")
        return edited


FAULTS = [
    Fault(name, file, **edit)
    for file, faults in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
    for name, edit in faults.items()
]
