"""The search on machines whose times are known, and what it says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from evidence.advice.report import Advice
from evidence.advice.search import FAILED, LEFT_OUT, PAIRS, Search
from evidence.comparison.command import planned
from tests.evidence.advice.machine import FACTORS, SPACE, Machine, space
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.errors import RunError

TINY = ["recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=4"]
FACTS: dict[str, Any] = {
    "hardware": {"name": "A CPU", "device": "cpu", "threads": 2},
    "versions": {"torch": "2.15.0"},
    "git": {"commit": "0123456789abcdef", "dirty": "false"},
}


def advise(search: Search, overrides: list[str] = TINY) -> Advice:
    return Advice(search, search.run(), "gpt2", overrides, "python scripts/advise.py recipe=gpt2", 180.0, FACTS)


def test_the_changes_that_help_are_combined_and_six_fresh_pairs_confirm_the_winner() -> None:
    machine = Machine()
    advice = advise(machine.search())
    assert advice.winner.label == "bf16 + compile, micro=32"
    assert set(machine.started) >= {"fp32", "bf16", "fp16", "fp32 + compile", "fp32, micro=8", "fp32, attention=eager"}
    assert machine.started.count("bf16 + compile, micro=32") == 1 + PAIRS
    assert (machine.most_alive, machine.alive, machine.examined) == (2, [], ["bf16 + compile, micro=32"])
    found = advice.search.interval(advice.winner)
    assert found is not None
    assert (found.count, found.level) == (PAIRS, 0.95)
    assert found.mean == pytest.approx(1 / (0.5 * 0.6 * 0.8), rel=0.02)
    said = advice.sentence()
    assert said.startswith("bf16 + compile, micro=32: 4.1")
    assert "as fast as fp32, 50% less memory, numerics healthy; compiling pays off after 660 steps; 4.1" in said
    assert said.endswith("as fast in a run of 1000000 steps, compile time included")


def test_the_spread_between_processes_is_in_the_interval_and_seldom_advises_an_equal_setting() -> None:
    """Intervals that held the spread of blocks alone would exclude the truth in most searches."""
    equal = {"bf16": 1.0}
    advised, missed = 0, 0
    for seed in range(200):
        machine = Machine(equal, between=0.03, noise=0.01, seed=seed)
        search = machine.search(space(precision=["bf16"]))
        advised += search.run().label != "fp32"
        interval = search.interval(search.entries["bf16"])
        missed += interval is not None and interval.excludes(1.0)
    assert advised <= 0.05 * 200
    assert missed <= 0.08 * 200


@pytest.mark.parametrize(
    ("machine", "winner", "note"),
    [
        (Machine(fresh_factor=9.0), "fp32", "bf16 + compile, micro=32 was the fastest, which fresh processes did not"),
        (Machine(dict.fromkeys(FACTORS, 1.2)), "fp32", ""),
        (Machine(broken={"bf16": "out of luck"}), "fp16 + compile, micro=32", ""),
        (
            Machine(broken={"bf16 + compile, micro=32": "later"}),
            "bf16 + compile",
            "bf16 + compile, micro=32 was the fastest, and failed when it was measured again: later",
        ),
        (
            Machine(faults={"bf16 + compile, micro=32": ["overflow"]}),
            "bf16 + compile",
            "bf16 + compile, micro=32 is not advised, because the doctor found a fault in it: overflow",
        ),
        (
            Machine(faults={f"bf16{more}": ["overflow"] for more in (" + compile, micro=32", " + compile", "")}),
            "fp32",
            "3 settings have a fault, so no further one is examined or advised",
        ),
    ],
    ids=["not confirmed", "nothing helps", "a failure", "fails later", "a fault", "three faults"],
)
def test_what_is_advised_where_something_is_against_the_fastest(machine: Machine, winner: str, note: str) -> None:
    advice = advise(machine.search())
    assert advice.winner.label == winner
    assert note in "\n".join(advice.search.notes)
    assert advice.report().text()
    if winner == "fp32":
        assert advice.sentence().startswith("fp32, train.py's default: no setting ")


def test_a_short_run_is_not_compiled_and_it_says_what_compiling_took() -> None:
    advice = advise(Machine().search(steps=100))
    assert advice.winner.label == "bf16, micro=32"
    text = advice.report().text()
    assert "compiling took 10.0 s: fp32 + compile" in text
    assert "run of 100" in text


def test_a_default_that_fails_gives_its_place_to_the_first_that_works_and_where_all_fail_the_error_is_told() -> None:
    advice = advise(Machine(broken={"fp32": "it broke"}).search())
    assert advice.baseline.label == "bf16"
    assert advice.search.entries["fp32"].status == FAILED
    everything = dict.fromkeys(advice.search.entries, "it broke")
    with pytest.raises(RunError, match="no candidate can be advised; the first error: fp32: it broke"):
        Machine(broken=everything | {"fp32, micro=32": "x", "fp32, micro=8": "x"}).search().run()


def test_the_budget_is_kept_and_what_there_was_no_time_for_is_listed() -> None:
    machine = Machine()
    advice = advise(machine.search(budget_s=70.0))
    assert machine.now < 90.0
    left = [entry.label for entry in advice.search.entries.values() if entry.status == LEFT_OUT]
    assert left
    assert f"left out: {left[0]} (the budget had no time for it)" in advice.report().text()
    assert "measured" in advice.sentence()


def test_what_is_forecast_not_to_fit_is_not_started() -> None:
    among = space(precision=["bf16"], micro=["32"])
    among.refused = lambda candidate: "too large" if "micro=32" in candidate.label else ""
    machine = Machine()
    assert machine.search(among).run().label == "bf16"
    assert not any("micro" in label for label in machine.started)


def test_processes_that_do_not_fit_together_run_one_after_the_other() -> None:
    machine = Machine(room=2100)
    assert machine.search(SPACE).run().label == "bf16 + compile, micro=32"
    assert machine.most_alive == 1


def test_the_page_has_the_commands_which_compose_to_what_was_measured(tmp_path: Path) -> None:
    text = tmp_path / "it's a text.txt"
    text.write_text("a b c " * 100)
    given = ["experiment=shakespeare_cpu", f"data.path={text}", "precision.fp32_modules=[lm_head]"]
    among = space(precision=["bf16"])
    advice = advise(Machine().search(among), [*given, "seed=3", "tracking=local", "output_dir=elsewhere"])
    script, *arguments = shlex.split(advice.training())[1:]
    assert script == "scripts/train.py"
    assert flatten(compose(arguments)) == flatten(compose([*given, "seed=3", "precision=bf16"]))
    advice.overrides = [*TINY, "seed=3"]
    script, *arguments = shlex.split(advice.comparison())[1:]
    plan = planned(arguments)
    assert (script, plan.common, plan.baseline) == ("scripts/compare.py", TINY, "baseline")
    assert {arm.label: arm.overrides for arm in plan.arms}["advised"] == ("precision=bf16",)
    report = advice.report()
    for command in (advice.training(), advice.comparison()):
        assert command in report.text()
    assert "bf16 (advised)" in report.html()
    assert advice.content()["winner"] == "bf16"
