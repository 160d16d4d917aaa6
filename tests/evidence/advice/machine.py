"""A machine of which every time is known, with a clock of its own: candidates without processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import Candidate, Space
from evidence.advice.search import Search
from evidence.advice.worker import Failed

FACTORS = {"bf16": 0.5, "fp16": 0.6, "compile": 0.6, "micro=32": 0.8, "micro=8": 1.3, "eager": 1.4}


def space(compiles: bool = False, **choices: list[str]) -> Space:
    """A space with fp32 as default, and these options."""
    varied = {key: [f"{key}={value}" for value in values] for key, values in choices.items()}
    words = {f"precision={mode}": mode for mode in choices.get("precision", [])}
    return Space("fp32", compiles, varied, words)


SPACE = space(precision=["bf16", "fp16"], compile=["default"], micro=["32", "8"], attention=["eager"])


@dataclass
class Machine:
    """What each candidate takes, in seconds and bytes."""

    factors: dict[str, float] = field(default_factory=lambda: dict(FACTORS))
    """Factors of a step of 0.02 s by the words of the label."""
    compile_s: float = 10.0
    noise: float = 0.002
    """Standard deviation of a block, relative."""
    between: float = 0.0
    """Standard deviation between processes of one setting, relative."""
    room: int = 10**9
    """Bytes for processes, each of which takes 1000."""
    broken: dict[str, str] = field(default_factory=dict)
    """Error at the start by label; ``later``: an error in the pairs that confirm."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """What the doctor finds, by label."""
    fresh_factor: float = 1.0
    """Factor of a candidate's steps in the pairs that confirm."""
    seed: int = 0
    now: float = 0.0
    started: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    most_alive: int = 0
    examined: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def check_up(self, entry: Any) -> dict[str, object]:
        assert not self.alive, "the doctor has the memory for itself"
        self.examined.append(entry.label)
        return {"faults": self.faults.get(entry.label, []), "missed": [], "healthy": entry.label not in self.faults}

    def search(self, among: Space = SPACE, budget_s: float = 600.0, steps: int = 10**6) -> Search:
        def free_bytes() -> float:
            return self.room - 1000 * len(self.alive)

        launch: Callable[[Candidate], Any] = lambda candidate: Fake(self, candidate)  # noqa: E731
        say: Callable[[str], None] = lambda line: None  # noqa: E731
        return Search(among, steps, budget_s, launch, free_bytes, self.check_up, say, lambda: self.now)


class Fake:
    """Stands for the process of a candidate."""

    def __init__(self, machine: Machine, candidate: Candidate) -> None:
        self.machine, self.candidate, self.label = machine, candidate, candidate.label
        self.again = self.label in machine.started
        machine.started.append(self.label)
        machine.alive.append(self.label)
        machine.most_alive = max(machine.most_alive, len(machine.alive))
        self.own = math.exp(machine.random.gauss(0, machine.between))

    def start(self, limit_s: float) -> tuple[float, list[float], int]:
        here, why = self.machine, self.machine.broken.get(self.label, "")
        if why and (why != "later" or self.again):
            raise Failed(why, self.label)
        compiling = here.compile_s if self.candidate.compiles and not self.again else 0.0
        here.now += 1.0 + compiling
        return 1.0 + compiling, [self._step() + compiling, self._step()], 1000

    def block(self, steps: int, limit_s: float) -> float:
        seconds = steps * self._step() * max(0.1, self.machine.random.gauss(1, self.machine.noise))
        self.machine.now += seconds
        return seconds

    def memory(self, limit_s: float) -> int:
        return 500 if "bf16" in self.label else 1000

    def close(self) -> None:
        self.machine.alive.remove(self.label)

    def _step(self) -> float:
        factor = math.prod(factor for words, factor in self.machine.factors.items() if words in self.label)
        return 0.02 * factor * self.own * (self.machine.fresh_factor if self.again and self.label != "fp32" else 1.0)
