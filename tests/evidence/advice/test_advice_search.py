"""The search on machines whose times are known, and what it says."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evidence.advice import timing
from evidence.advice.candidates import Candidate, Space
from evidence.advice.report import Advice
from evidence.advice.search import LEAST_PAIRS, PAIRS, Search
from evidence.advice.timing import Times
from evidence.comparison.command import planned
from evidence.stopwatch import stopwatch
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.errors import RunError

TINY = ["recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=4"]
FACTS: dict[str, Any] = {
    "hardware": {"name": "A CPU", "device": "cpu", "threads": 2},
    "versions": {"torch": "2.15.0"},
    "git": {"commit": "0123456789abcdef", "dirty": "false"},
}
FACTORS = {"bf16": 0.5, "fp16": 0.6, "compile": 0.6, "micro=32": 0.8, "micro=8": 1.3, "eager": 1.4}
BEST = "bf16, compile=default, micro=32"


def space(**choices: list[str]) -> Space:
    return Space({key: [f"{key}={value}" for value in values] for key, values in choices.items()})


CHOICES = {"precision": ["bf16", "fp16"], "compile": ["default"], "micro": ["32", "8"], "attention": ["eager"]}


@dataclass
class Machine:
    """What each candidate takes; in the place of processes."""

    factors: dict[str, float] = field(default_factory=lambda: dict(FACTORS))
    """Factors of a step of 0.02 s by the words of the label."""
    between: float = 0.0
    """Standard deviation between processes of one setting, relative."""
    broken: dict[str, str] = field(default_factory=dict)
    """Error by label; ``later``: after the first time; ``once``: the second time alone."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """What the doctor finds, by label."""
    slower_again: float = 1.0
    """Factor of a candidate's steps in the pairs that confirm."""
    slower_by_minute: float = 1.0
    """Factor of every step for each minute that has passed."""
    process_s: float = 5.0
    compile_s: float = 10.0
    check_up_s: float = 0.0
    busier_by_minute: float = 1.0
    """Factor of the seconds of a whole process for each minute that has passed."""
    seed: int = 0
    now: float = 0.0
    started: list[str] = field(default_factory=list)
    examined: list[str] = field(default_factory=list)
    large: str = "nothing"
    """Words of the labels that are not forecast to fit."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def time(self, candidate: Candidate, blocks: int, limit_s: float) -> Times:
        label, again = candidate.label, candidate.label in self.started
        self.started.append(label)
        why = self.broken.get(label, "")
        if why and (why != "later" or again) and (why != "once" or self.started.count(label) == 2):
            raise RunError(why)
        factor = math.prod(factor for words, factor in self.factors.items() if words in label)
        factor *= self.slower_again if again and label != "the default" else 1.0
        factor *= math.exp(self.random.gauss(0, self.between)) * self.slower_by_minute ** (self.now / 60)
        compile_s = self.compile_s if "compile=" in label and not again else 0.0
        took_s = (self.process_s + compile_s) * self.busier_by_minute ** (self.now / 60)
        self.now += min(took_s, limit_s)
        if took_s > limit_s:
            raise RunError(f"it did not end within {limit_s:.0f} s")
        return Times(0.02 * factor, compile_s, 500 if "bf16" in label else 1000)

    def clock(self) -> float:
        return self.now

    def too_large(self, candidate: Candidate) -> str:
        return "too large" if self.large in candidate.label else ""

    def check_up(self, candidate: Candidate) -> dict[str, Any]:
        label = candidate.label
        self.examined.append(label)
        self.now += self.check_up_s
        return {"faults": self.faults.get(label, []), "missed": [], "healthy": label not in self.faults}

    def search(self, among: Space | None = None, time_budget_s: float = 600.0, steps: int = 10**6) -> Search:
        return Search(among or space(**CHOICES), self, steps, time_budget_s)


def advise(search: Search, overrides: list[str] = TINY) -> Advice:
    return Advice(search, search.run(), "gpt2", overrides, "python scripts/advise.py recipe=gpt2", 180.0, FACTS)


def test_the_changes_that_help_are_combined_and_six_fresh_pairs_confirm_the_winner() -> None:
    machine = Machine()
    advice = advise(machine.search())
    assert advice.winner.label == BEST
    assert set(machine.started) >= {"the default", "bf16", "fp16", "compile=default", "micro=8", "attention=eager"}
    assert (machine.started.count(BEST), machine.examined) == (1 + PAIRS, [BEST])
    found = advice.search.interval(advice.winner)
    assert found is not None
    assert (found.count, found.level) == (PAIRS, 0.95)
    assert found.mean == pytest.approx(1 / (0.5 * 0.6 * 0.8), rel=0.02)
    sentence = advice.sentence()
    assert sentence.startswith(f"{BEST}: 4.167x as fast as the default, 50% less memory, numerics healthy; compiling")
    assert "; compiling pays off after 658 steps; 4.1" in sentence
    assert sentence.endswith("as fast in a run of 1,000,000 steps, compile time included")


def test_the_default_is_timed_again_so_that_a_machine_that_slows_down_hides_no_change() -> None:
    machine = Machine(slower_by_minute=1.5, process_s=20.0)
    assert advise(machine.search()).winner.label == BEST
    assert "the default" in machine.started[1:-12]


def test_a_default_that_fails_when_it_is_timed_again_ends_no_search() -> None:
    machine = Machine(process_s=20.0, broken={"the default": "once"})
    advice = advise(machine.search())
    assert advice.winner.label == BEST
    assert "the default failed when it was timed again: once" in "; ".join(advice.search.space.notes)


def test_the_spread_between_processes_is_in_the_interval_and_seldom_advises_an_equal_setting() -> None:
    """Intervals that held the spread of blocks alone would exclude the truth in most searches."""
    advised, missed = 0, 0
    for seed in range(200):
        search = Machine({"bf16": 1.0}, between=0.03, seed=seed).search(space(precision=["bf16"]))
        advised += search.run().label != "the default"
        interval = search.interval(search.entries["bf16"])
        missed += interval is not None and interval.excludes(1.0)
    assert advised <= 0.05 * 200
    assert missed <= 0.08 * 200


@pytest.mark.parametrize(
    ("machine", "winner", "note"),
    [
        (Machine(slower_again=9.0), "the default", f"{BEST} was the fastest, which fresh processes did not"),
        (Machine(dict.fromkeys(FACTORS, 1.2)), "the default", ""),
        (Machine(broken={"bf16": "out of luck"}), "fp16, compile=default, micro=32", ""),
        (
            Machine(broken={BEST: "later"}),
            "bf16, compile=default",
            f"{BEST} was the fastest, and failed when it was measured again: later",
        ),
        (
            Machine(faults={BEST: ["overflow"]}),
            "bf16, compile=default",
            f"{BEST} is not advised, because the doctor found a fault in it: overflow",
        ),
        (
            Machine(
                faults={
                    f"bf16{more}": ["overflow"] for more in (", compile=default, micro=32", ", compile=default", "")
                }
            ),
            "the default",
            "3 settings have a fault, so no further one is examined or advised",
        ),
    ],
    ids=["not confirmed", "nothing helps", "a failure", "fails later", "a fault", "three faults"],
)
def test_what_is_advised_where_something_is_against_the_fastest(machine: Machine, winner: str, note: str) -> None:
    advice = advise(machine.search())
    assert advice.winner.label == winner
    assert note in "\n".join(advice.search.space.notes)
    assert advice.report().text()
    if winner == "the default":
        assert advice.sentence().startswith("the default: no setting ")


def test_a_short_run_is_not_compiled_and_it_says_what_compiling_took() -> None:
    advice = advise(Machine().search(steps=100))
    assert advice.winner.label == "bf16, micro=32"
    text = advice.report().text()
    assert "compiling took 10.0 s: compile=default" in text
    assert "run of 100" in text


def test_a_default_that_fails_gives_its_place_to_the_first_that_works_and_where_all_fail_the_error_is_told() -> None:
    advice = advise(Machine(broken={"the default": "it broke"}).search())
    assert advice.search.reference.label == "bf16"
    assert "failed: the default (it broke)" in advice.report().text()
    everything = dict.fromkeys([*advice.search.entries, "micro=8"], "it broke")
    with pytest.raises(RunError, match="no candidate can be advised; the first error: the default: it broke"):
        Machine(broken=everything).search().run()


def test_the_time_budget_is_kept_and_what_was_not_started_is_listed() -> None:
    machine, among = Machine(large="fp16"), space(precision=["bf16", "fp16"], micro=["32"], attention=["eager"])
    advice = advise(machine.search(among, time_budget_s=49.0))
    assert machine.now <= 49.0
    assert among.left_out == {"fp16": "too large", "attention=eager": "there was no time for it"} | {
        "bf16, micro=32": "there was no time for it"
    }
    assert "left out: fp16 (too large)" in advice.report().text()
    assert advice.sentence().endswith("; not all settings were measured")
    assert "fp16" not in machine.started


def test_a_budget_for_the_default_alone_is_no_advice() -> None:
    advice = advise(Machine().search(time_budget_s=38.0))
    assert [*advice.search.entries] == ["the default"]
    assert advice.sentence() == "the default alone was measured: the time budget was too short to try bf16"
    assert "advised" not in advice.report().text()


@pytest.mark.parametrize(
    ("machine", "pairs"),
    [
        (Machine(compile_s=60.0), PAIRS),  # the compiler is ended
        (Machine(compile_s=20.0, check_up_s=20.0), 4),
        (Machine(busier_by_minute=1.4), LEAST_PAIRS),
    ],
    ids=["compiles long", "a long check-up", "a busy machine"],
)
def test_two_minutes_are_two_minutes(machine: Machine, pairs: int, capsys: pytest.CaptureFixture[str]) -> None:
    advice = advise(machine.search(time_budget_s=120.0))
    assert machine.now <= 125.0
    assert len(advice.winner.pairs) == pairs
    printed = capsys.readouterr().out
    assert printed.endswith(f"] pair {pairs} of 6 of fresh processes: the default, {advice.winner.label}\n")
    assert "] single change 1 of 6: bf16\n" in printed
    note = f"there was time for {pairs} of 6 pairs"
    assert (note in advice.search.space.notes) == (pairs < PAIRS)


def test_the_page_has_the_commands_which_compose_to_what_was_measured(tmp_path: Path) -> None:
    text = tmp_path / "it's a text.txt"
    text.write_text("a b c " * 100)
    given = ["experiment=shakespeare_cpu", f"data.path={text}", "precision.modules={lm_head:fp32}"]
    among = space(precision=["bf16", "fp16"], compile=["default"], threads=["1"])
    factors = {"bf16": 0.5, "fp16": 0.6, "compile": 0.95, "threads": 0.9}
    machine = Machine(factors, faults={"bf16, compile=default, threads=1": ["overflow"]})
    advice = advise(machine.search(among), [*given, "seed=3", "tracking=local", "output_dir=elsewhere"])
    script, *arguments = shlex.split(advice.training())[1:]
    assert script == "scripts/train.py"
    assert flatten(compose(arguments)) == flatten(compose([*given, "seed=3", "precision=bf16", "threads=1"]))
    advice.overrides = [*TINY, "seed=3"]
    script, *arguments = shlex.split(advice.comparison())[1:]
    plan = planned(arguments)
    assert (script, plan.common, plan.baseline) == ("scripts/compare.py", TINY, "baseline")
    assert {arm.label: arm.overrides for arm in plan.arms} == {
        "baseline": (),
        "advised": ("precision=bf16", "threads=1"),
        "second": ("precision=bf16",),
        "third": ("precision=fp16",),
    }
    report = advice.report()
    for command in (advice.training(), advice.comparison()):
        assert command in report.text()
    assert "bf16, threads=1 (advised)" in report.html()
    assert advice.content()["winner"] == "bf16, threads=1"


class Simulated:
    """A GPU's trainer, by a clock of its own."""

    def __init__(self, plan: Any, clock: SimpleNamespace) -> None:
        self.plan, self.clock, self.device = plan, clock, torch.device("cpu")

    def batches(self) -> Iterator[list[int]]:
        return repeat([0] * self.plan.batching.accumulation)

    def gradients(self, microbatches: list[int]) -> None:
        self.clock.now += 0.2 * len(microbatches)

    def train_step(self, microbatches: list[int]) -> None:
        self.gradients(microbatches)
        self.clock.now += 0.02


def test_the_time_of_a_step_of_thirty_microbatches_is_computed_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "Trainer", partial(Simulated, clock=clock))
    monkeypatch.setattr(timing, "settle", lambda plan: plan)
    monkeypatch.setattr(timing, "keep_memory", lambda plan: None)
    monkeypatch.setattr(timing, "stopwatch", partial(stopwatch, clock=lambda: clock.now))
    monkeypatch.setattr(timing, "peak_of", lambda trainer, step: 1000)
    found = timing.measure(compose([*TINY, "device=cpu", "batch_size=30", "micro_batch_size=1"]), 3)
    assert found.step_s == pytest.approx(30 * 0.2 + 0.02)
    assert found.composed
    assert clock.now < 5
