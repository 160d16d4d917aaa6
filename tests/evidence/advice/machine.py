"""A machine of which every time is known, with a clock of its own: candidates without processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import Factor, Setting, Space, Value
from evidence.advice.conclude import Conclusion, conclude, objections
from evidence.advice.plan import Plan
from evidence.advice.rounds import Bench
from evidence.advice.schema import TWIN, Candidate, Log
from evidence.advice.search import Search
from evidence.advice.worker import OUT_OF_MEMORY, Failed, Hung, Started


def factor(name: str, *values: str) -> Factor:
    return Factor(
        name, tuple(Value(words, (f"{name}={words}",) if index else ()) for index, words in enumerate(values))
    )


def space(*factors: Factor) -> Space:
    return Space(list(factors))


SPACE = space(
    factor("precision", "fp32", "bf16", "fp16"),
    factor("compile", "", "compile"),
    factor("micro", "", "micro=8", "micro=32"),
    factor("attention", "", "attention=eager"),
    factor("fused", "", "fused=false"),
)


@dataclass
class Machine:
    """What each candidate takes, in seconds and bytes."""

    step_s: Callable[[str], float]
    """Of a step, by the label."""
    compile_s: float = 10.0
    start_s: float = 1.0
    noise: float = 0.002
    """Standard deviation of a block, relative."""
    spikes: float = 0.0
    """Share of the blocks that another program slows down ten times."""
    memory: Callable[[str], int] = lambda label: 1000
    room: int = 10**9
    """Bytes for processes, each of which takes 1000."""
    device_bytes: int = 10**9
    """Beside other processes a candidate fails with less than ``memory`` of it."""
    broken: dict[str, str] = field(default_factory=dict)
    """By label: the error at the start; ``hangs``: no answer; ``later``: an error in the third block."""
    seed: int = 0
    now: float = 0.0
    started: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    examined: list[str] = field(default_factory=list)
    """By the doctor."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def runner(self, candidate: Candidate) -> Fake:
        return Fake(self, candidate.label)

    def bench(self, log: Log, block_s: float = 0.1) -> Bench:
        return Bench(self.runner, lambda: self.room - 1000 * len(self.alive), log, block_s, lambda: self.now)

    def search(
        self,
        among: Space = SPACE,
        budget_s: float = 600.0,
        log: Log | None = None,
        goal: str = "speed",
        steps: int = 10**6,
        **more: object,
    ) -> Search:
        plan = Plan(among, log or Log(), goal, steps)
        save = more.get("save", lambda: None)
        assert callable(save)
        return Search(plan, self.bench(plan.log), budget_s, save, lambda line: None)

    def advise(self, faults: dict[str, list[str]] | None = None, **options: object) -> tuple[Conclusion, str]:
        search = self.search(**options)  # type: ignore[arg-type]

        def check_up(candidate: Candidate) -> dict[str, Any]:
            self.examined.append(candidate.label)
            return {"faults": (faults or {}).get(candidate.label, []), "notes": [], "healthy": True}

        chosen, stopped = search.run(lambda chosen: objections(search.plan, chosen, check_up)[0])
        return conclude(search.plan, chosen), stopped


@dataclass
class Fake:
    machine: Machine
    label: str
    blocks: int = 0

    def start(self, limit_s: float) -> Started:
        self.machine.started.append(self.label)
        self.machine.alive.append(self.label)
        if why := self.machine.broken.get(self.label):
            if why == "hangs":
                self.machine.now += limit_s
                raise Hung(f"no answer within {limit_s:.0f} s")
            if why != "later":
                raise Failed(why)
        step = self._step()
        compiling = self.machine.compile_s if "compile" in self.label else 0.0
        self.machine.now += self.machine.start_s + compiling + 2 * step
        if 1000 * (len(self.machine.alive) - 1) + self.memory(limit_s) > self.machine.device_bytes:
            raise Failed(f"{OUT_OF_MEMORY}beside {len(self.machine.alive) - 1} others")
        return Started(self.machine.start_s + compiling + 2 * step, [step + compiling, step], 1000)

    def block(self, steps: int, limit_s: float) -> float:
        self.blocks += 1
        if self.machine.broken.get(self.label) == "later" and self.blocks == 3:
            raise Failed("it broke later")
        seconds = steps * self._step() * max(0.1, self.machine.random.gauss(1, self.machine.noise))
        if self.machine.random.random() < self.machine.spikes:
            seconds *= 10
        self.machine.now += seconds
        return seconds

    def memory(self, limit_s: float) -> int:
        return self.machine.memory(self.label.removesuffix(TWIN))

    def close(self) -> None:
        self.machine.alive.remove(self.label)

    def _step(self) -> float:
        return self.machine.step_s(self.label.removesuffix(TWIN))


def settings(among: Space = SPACE) -> list[Setting]:
    return among.product()
