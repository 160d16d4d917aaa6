"""The commands of an advice: they compose to what was measured, whatever the user has set."""

from __future__ import annotations

import shlex
from pathlib import Path

from evidence.advice.commands import comparison, training
from evidence.comparison.command import planned
from tests.evidence.advice.made import TINY, advice
from trainer.config.compose import compose
from trainer.config.registration import flatten


def test_a_users_own_experiment_and_odd_values_stay_and_where_it_was_recorded_does_not(tmp_path: Path) -> None:
    text = tmp_path / "it's a text.txt"
    text.write_text("a b c " * 100)
    given = ["experiment=shakespeare_cpu", f"data.path={text}", "precision.fp32_modules=[lm_head]", "compile=off"]
    script, *arguments = shlex.split(training(advice(overrides=[*given, "tracking=local", "output_dir=elsewhere"])))[1:]
    assert script == "scripts/train.py"
    assert flatten(compose(arguments)) == flatten(compose([*given[:-1], "precision=bf16", "compile=default"]))


def test_the_comparison_is_of_the_winner_and_the_baseline() -> None:
    made = advice(overrides=[*TINY, "seed=3", "output_dir=elsewhere"])
    script, *arguments = shlex.split(comparison(made))[1:]
    assert script == "scripts/compare.py"
    plan = planned(arguments)
    assert plan.common == [*TINY]
    arms = {arm.label: arm.overrides for arm in plan.arms}
    assert (plan.baseline, arms["baseline"]) == ("baseline", ())
    assert arms["advised"] == ("precision=bf16", "compile=default")
