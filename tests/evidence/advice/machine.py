"""A machine of which every time is known, with a clock of its own: candidates without processes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import Candidate, Space
from evidence.advice.schema import Advice
from evidence.advice.search import Search
from evidence.advice.timing import Timer
from evidence.advice.worker import Failed


def space(*precisions: str, compiles: bool = False, **choices: list[str]) -> Space:
    """A space of the first of these precisions as default, and of further options."""
    varied = {"precision": [f"precision={mode}" for mode in precisions[1:]]}
    for key, values in choices.items():
        varied[key] = [f"{key}={value}" for value in values]
    words = {f"precision={mode}": mode for mode in precisions}
    return Space(precisions[0], compiles, {key: values for key, values in varied.items() if values}, words)


def every(among: Space) -> list[Candidate]:
    """All combinations."""
    return [
        among.candidate(filter(None, each))
        for each in itertools.product(*([None, *choices] for choices in among.choices.values()))
    ]


SPACE = space("fp32", "bf16", "fp16", compile=["default"], micro=["8", "32"], attention=["eager"], fused=["false"])
FACTORS = {"bf16": 0.5, "fp16": 0.6, "compile": 0.6, "micro=32": 0.8, "micro=8": 1.3, "eager": 1.4, "fused=false": 1.1}


def times(factors: dict[str, float], base_s: float = 0.02) -> Callable[[str], float]:
    """Seconds of a step by the label: the factors of its words."""
    return lambda label: base_s * math.prod(factor for words, factor in factors.items() if words in label)


def new(goal: str = "speed", steps: int = 10**6) -> Advice:
    facts: dict[str, Any] = {"hardware": {"name": "A CPU"}, "versions": {}, "git": {}}
    return Advice("gpt2", goal, [], "python scripts/advise.py", steps, "a-cpu", **facts)


@dataclass
class Machine:
    """What each candidate takes, in seconds and bytes."""

    step_s: Callable[[str], float] = field(default_factory=lambda: times(FACTORS))
    """Of a step, by the label."""
    compile_s: float = 10.0
    start_s: float = 1.0
    noise: float = 0.002
    """Standard deviation of a block, relative."""
    between: float = 0.0
    """Standard deviation between processes of one setting, relative."""
    memory: Callable[[str], int] = lambda label: 1000
    room: int = 10**9
    """Bytes for processes, each of which takes 1000."""
    device_bytes: int = 10**9
    """Beside other processes a candidate fails with less than ``memory`` of it."""
    broken: dict[str, str] = field(default_factory=dict)
    """By label: the error at the start; ``hangs``: no answer; ``later``: an error in the third block."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """That the doctor finds, by label."""
    final: Callable[[str], float] = lambda label: 1.0
    """Factors of the steps in fresh processes."""
    seed: int = 0
    now: float = 0.0
    started: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    most_alive: int = 0
    examined: list[str] = field(default_factory=list)
    """By the doctor."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def timer(self) -> Timer:
        return Timer(
            lambda candidate, fresh: Fake(self, candidate, fresh),
            lambda: self.room - 1000 * len(self.alive),
            0.1,
            lambda: self.now,
        )

    def check_up(self, entry: Any) -> dict[str, object]:
        self.examined.append(entry.label)
        return {"faults": self.faults.get(entry.label, []), "missed": [], "healthy": entry.label not in self.faults}

    def search(
        self,
        among: Space = SPACE,
        budget_s: float = 600.0,
        advice: Advice | None = None,
        save: Callable[[], None] = lambda: None,
        **of: Any,
    ) -> Search:
        show = lambda line: None  # noqa: E731
        return Search(among, advice or new(**of), self.timer(), budget_s, self.check_up, save, show)

    def advise(self, **options: Any) -> Advice:
        search = self.search(**options)
        search.run()
        return search.advice


class Fake:
    """Stands for the process of a candidate."""

    def __init__(self, machine: Machine, candidate: Candidate, fresh: bool) -> None:
        self.machine, self.candidate, self.fresh = machine, candidate, fresh
        self.label, self.blocks = candidate.label, 0
        machine.alive.append(self.label)
        machine.most_alive = max(machine.most_alive, len(machine.alive))
        (machine.fresh if fresh else machine.started).append(self.label)
        self.own = math.exp(machine.random.gauss(0, machine.between)) if machine.between else 1.0

    def start(self, limit_s: float) -> tuple[float, list[float], int]:
        here = self.machine
        why = here.broken.get(self.label, "")
        if why == "hangs":
            here.now += limit_s
            raise Failed(f"its start did not end within {limit_s:.0f} s", self.label, late=True)
        if why and why not in ("later", "in the final round"):
            raise Failed(why, self.label)
        step = self._step()
        first = (self.label not in here.started[:-1]) and not self.fresh
        compiling = here.compile_s if self.candidate.compiles and first else 0.0
        here.now += here.start_s + compiling + 2 * step
        if 1000 * (len(here.alive) - 1) + here.memory(self.label) > here.device_bytes:
            raise Failed(f"out of memory: beside {len(here.alive) - 1} others", self.label, out_of_memory=True)
        return here.start_s + compiling + 2 * step, [step + compiling, step], 1000

    def block(self, steps: int, limit_s: float) -> float:
        here = self.machine
        self.blocks += 1
        why = here.broken.get(self.label)
        if (why == "later" and self.blocks == 3) or (why == "in the final round" and self.fresh):
            raise Failed("it broke later", self.label)
        seconds = steps * self._step() * max(0.1, here.random.gauss(1, here.noise))
        here.now += seconds
        return seconds

    def memory(self, limit_s: float) -> int:
        return self.machine.memory(self.label)

    def close(self) -> None:
        self.machine.alive.remove(self.label)

    def _step(self) -> float:
        return self.machine.step_s(self.label) * self.own * (self.machine.final(self.label) if self.fresh else 1.0)
