"""Plans a comparison, trains what is left to train, judges it, and writes comparison.json."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evidence.runs import Arm, Runner, code_digest, merge_overrides, redacted_arguments
from mantissa.errors import UsageError
from mantissa.verdict.judge import Row, incomparable, judge
from mantissa.verdict.runs import Look, Run, Runs
from trainer.config.command_line import quoted, remedied
from trainer.config.compose import check_single, compose
from trainer.config.registration import flatten, key_of
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.files import in_use, write_json
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions
from trainer.tracking.store import GROUP_TAG

RESULT_FILE = "comparison.json"
COSTS = ("speed", "memory")
"""Names of the numbers that arms are compared by, beside their loss."""


@dataclass(frozen=True)
class ComparisonPlan:
    """What to compare, and how to judge it."""

    arms: list[Arm]
    """Arms; the first is the baseline, which the others are compared with."""
    seeds: list[int]
    margin: float
    """Relative difference in final validation loss that is too small to matter."""
    common: list[str]
    """Overrides of all arms."""
    output_dir: Path
    name: str
    """Name of the comparison's folder; empty, until ``compare`` names it by the recipe and the arms."""

    @property
    def baseline(self) -> str:
        """Label of the arm that the others are compared with."""
        return self.arms[0].label

    @property
    def folder(self) -> Path:
        """Where the runs and the report are."""
        return self.output_dir.absolute() / "compare" / self.name


@dataclass
class Result:
    """A finished comparison."""

    plan: ComparisonPlan
    runs: Runs
    """Runs by arm and seed, failed ones too."""
    rows: dict[str, Row]
    """Judged arms by label, the baseline first."""
    facts: dict[str, Any]
    """Command, recipe, unit, steps, hardware, versions and commit."""
    looks: list[Look]

    @property
    def failed(self) -> bool:
        """Whether a run failed or diverged."""
        return any(map(self.failures, self.rows))

    def finished(self, label: str) -> list[Run]:
        """Return the runs of an arm that trained to their end."""
        return [run for run in self.runs[label].values() if not run.failure]

    def failures(self, label: str) -> dict[int, str]:
        """Return by seed why the other runs of an arm did not."""
        return {seed: run.failure for seed, run in self.runs[label].items() if run.failure}

    def worse_than_before(self, label: str) -> list[int]:
        """Return the seeds with which the final loss is higher than before training, where that was evaluated."""
        curves = {run.seed: run.curve for run in self.finished(label)}
        return [seed for seed, (steps, losses) in curves.items() if steps and steps[0] == 0 and losses[-1] > losses[0]]

    def skipped_steps(self, label: str) -> int:
        """Return how many steps the loss scale skipped, in all runs of an arm that finished."""
        return sum(int(run.values["skipped"] or 0) for run in self.finished(label))

    def arithmetic(self, label: str) -> str:
        """Return why the speed of an arm's runs is not that of its format; empty: it is."""
        return next((run.arithmetic for run in self.finished(label) if run.arithmetic), "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        head = {key: getattr(self.plan, key) for key in ("name", "baseline", "seeds", "margin")}
        arms = [self._arm(arm) for arm in self.plan.arms]
        of_arms = {"common": redacted_arguments(self.plan.common), "arms": arms}
        return head | self.facts | {"looks": self.looks} | of_arms

    def _arm(self, arm: Arm) -> dict[str, Any]:
        label, row, base = arm.label, self.rows[arm.label], self.runs[self.plan.baseline]
        return {
            "label": label,
            "overrides": redacted_arguments(arm.overrides),
            "seeds": [run.seed for run in self.finished(label)],
            "failures": self.failures(label),
            **{name: asdict(ratio) for name, ratio in row.ratios.items()},
            "quality": asdict(row.quality),
            "reach": asdict(row.reach),
            "skipped_steps": self.skipped_steps(label),
            "arithmetic": self.arithmetic(label),
            "not_timed": incomparable("speed", self.runs[label], base) if label != self.plan.baseline else "",
        }


def compare(plan: ComparisonPlan, base: Config, command: str = "", runner_class: type[Runner] = Runner) -> Result:
    """Train what is left to train, judge it, and write ``comparison.json``; print each run.

    In MLflow, the runs' tag ``group`` is the comparison's name.

    Args:
        plan: what to compare; without a name it is named by the recipe and the arms.
        base: config of the baseline.
        command: the command line, for the report.
        runner_class: the class that trains.

    Raises:
        UserError: the folder holds another comparison or seeds that are left out now, is in use by another process, or
            cannot be written.
    """
    # What stays the same, however often the command is repeated.
    name = plan.name or "-".join([base.recipe.name, *(arm.label for arm in plan.arms)])
    plan, hardware = replace(plan, name=name), detect(base.device)
    arms, seeds, folder = plan.arms, plan.seeds, plan.folder
    facts: dict[str, Any] = {
        "command": command,
        "recipe": base.recipe.name,
        "unit": base.recipe.unit,
        "steps": base.steps,
        "hardware": hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
    }

    # No checkpoints; and a memory ledger where CUDA does not count memory.
    quiet = ["checkpoint=none", f"profiler={'none' if hardware.is_gpu else 'memory'}"]
    runner = runner_class(folder, merge_overrides([*quiet, f"tags.{GROUP_TAG}={quoted(plan.name)}"], plan.common))
    _begin(plan, runner, facts, base.recipe_path)

    # Train, judge, write.
    with in_use(folder):  # a second process would remove this one's unfinished runs
        print(f"{len(arms)} arms × {len(seeds)} seeds, alternating; every run is a fresh process. {folder}", flush=True)
        runs = runner.run_all(arms, seeds)
        rows = judge(runs, plan.margin, runner.store, COSTS)
        result = Result(plan, runs, rows, facts, runner.store.looks)
        write_json(folder / RESULT_FILE, result.to_dict())
    return result


def check_arms(plan: ComparisonPlan) -> dict[str, Config]:
    """Compose every arm as its runs will, and return the configs, resolved, by label.

    Raises:
        UserError: an arm that train.py would refuse, or one that equals the baseline.
    """
    # What train.py would refuse, and what would give no speed.
    configs: dict[str, Config] = {}
    for arm in plan.arms:
        try:
            overrides = merge_overrides(plan.common, arm.overrides)
            check_single(overrides, "use one arm per value")
            composed = compose(overrides)
            resolved = plan_of(composed, detect(composed.device))
            config = resolved.config
            if resolved.steps <= config.log_every:
                raise UserError(
                    f"steps={resolved.steps} leaves no steps to measure the speed: the steps up to log_every="
                    f"{config.log_every} are warm-up and not counted",
                    f"steps={4 * config.log_every}",
                )
        except UserError as error:
            raise _of_arm(error, arm) from None
        configs[arm.label] = config

    # An arm that changes nothing, or a second time the same: its runs would count twice.
    compared = {arm.label: (arm.seed_shift, _comparable(configs[arm.label])) for arm in plan.arms}
    for place, arm in enumerate(plan.arms):
        same = [other.label for other in plan.arms[:place] if compared[other.label] == compared[arm.label]]
        if same:
            which = f"the baseline {same[0]}" if same[0] == plan.baseline else same[0]
            raise UserError(
                f"arm {arm.label} is the same as {which}; change it, or name the baseline twice, such as "
                "arms=fp32,fp32, to see the noise"
            )
    return configs


def _of_arm(error: UserError, arm: Arm) -> UserError:
    """Return what train.py would refuse in an arm, with the remedies as they are typed for this command."""
    typed = []
    is_named = arm.overrides == (f"precision={arm.label}",)  # which is no longer true with other overrides
    own = {key_of(each).partition(".")[0] for each in arm.overrides}
    for remedy in error.remedies:
        whole = remedied(arm.overrides, remedy, error.mistake)
        completes = not is_named and any(key_of(each).partition(".")[0] in own for each in shlex.split(remedy))
        if not {*arm.overrides} - {*whole} and not completes:  # of what all arms set
            typed.append(remedy)
        elif not is_named:
            typed.append(shlex.quote(f"arm.{arm.label}={' '.join(whole)}"))
    return UserError(f"arm {arm.label}: {error.problem}", *typed, mistake=error.mistake)


def _comparable(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flatten(config).items() if key != "run_name"}


def _begin(plan: ComparisonPlan, runner: Runner, facts: dict[str, Any], recipe_path: str | None) -> None:
    """Keep the plan, or check that it equals the one in the folder. Seeds may be added.

    Raises:
        UserError: the folder holds another comparison, or cannot be written.
    """
    fixed = {
        "common": redacted_arguments(runner.common),
        "arms": [[arm.label, redacted_arguments(arm.overrides)] for arm in plan.arms],
        "baseline": plan.baseline,
        "margin": plan.margin,
        "hardware": facts["hardware"]["name"],
        "number of threads": facts["hardware"]["threads"],
        "torch": facts["versions"]["torch"],
        "code": code_digest(recipe_path),
    }
    try:
        runner.store.begin(fixed, plan.seeds, "give this one a name=…")
    except UsageError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"output_dir={plan.output_dir} cannot be written ({error.strerror})") from None
