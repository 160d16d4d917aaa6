"""Plans a comparison, trains what is left to train, judges it, and writes comparison.json."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evidence.comparison.judge import ArmResult, judge, losses
from evidence.measures import LOSS
from evidence.runs import Arm, Outcome, Runner, merged, recorded
from mantissa.compare import Look, with_look
from mantissa.display import loss
from mantissa.errors import UsageError
from trainer.config.compose import combinations, compose, key_of
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import in_use, write_json
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions

RESULT_FILE = "comparison.json"


@dataclass
class Comparison:
    """What to compare, and how to judge it."""

    arms: list[Arm]
    baseline: str
    """Label of the arm that the others are compared with."""
    seeds: list[int]
    margin: float = 0.003
    """Relative difference in final validation loss that is too small to matter."""
    common: list[str] = field(default_factory=list)
    """Overrides of all arms."""
    output_dir: Path = Path("outputs")
    name: str = ""
    """Name of the comparison's folder."""

    @property
    def folder(self) -> Path:
        """Where the runs and the report are."""
        return self.output_dir.absolute() / "compare" / self.name


@dataclass
class Result:
    """A finished comparison."""

    comparison: Comparison
    arms: list[ArmResult]
    outcomes: list[Outcome]
    facts: dict[str, Any]
    """Command, recipe, unit, steps, hardware, versions and commit."""
    looks: list[Look]
    plan: dict[str, Any] = field(default_factory=dict)
    """What was kept when the comparison began, with ``key`` and ``began_s``."""

    @property
    def failed(self) -> bool:
        """Whether a run failed."""
        return any(arm.failures for arm in self.arms)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        head = {key: getattr(self.comparison, key) for key in ("name", "baseline", "seeds", "margin")}
        of_arms = {"common": recorded(self.comparison.common), "arms": [asdict(arm) for arm in self.arms]}
        return head | self.facts | {"looks": self.looks} | of_arms


def compare(comparison: Comparison, configs: dict[str, Config], command: str = "") -> Result:
    """Train what is left to train, judge it, and write ``comparison.json``; print each run.

    Args:
        comparison: what to compare; its ``name`` is set here if it is empty.
        configs: from ``check_arms``.
        command: the command line, for the report.

    Raises:
        UserError: the folder holds another comparison or seeds that are left out now, is in use by another process, or
            cannot be written.
    """
    first = configs[comparison.baseline]
    if not comparison.name:
        comparison.name = "-".join([first.recipe.name, *(arm.label for arm in comparison.arms)])
    hardware = detect(first.device)
    common = [*comparison.common, *_added(comparison, hardware.is_gpu)]
    arms, seeds, folder = comparison.arms, comparison.seeds, comparison.folder
    facts: dict[str, Any] = {
        "command": command,
        "recipe": first.recipe.name,
        "unit": first.recipe.unit,
        "steps": first.steps,
        "hardware": hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
    }
    runner = Runner(folder, common, partial(_described, unit=first.recipe.unit))
    _begin(comparison, runner, facts)
    with in_use(folder):  # a second process would remove this one's unfinished runs
        print(f"{len(arms)} arms × {len(seeds)} seeds, alternating; every run is a fresh process. {folder}", flush=True)
        outcomes = runner.run_all(arms, seeds)
        before = runner.store.of("look")
        looks = with_look(before, losses(arms, outcomes), comparison.margin)
        for look in looks[len(before) :]:
            runner.store.add("look", look)  # before a report shows it
        judged = judge(arms, comparison.baseline, outcomes, comparison.margin, looks)
        result = Result(comparison, judged, outcomes, facts, looks, runner.store.of("plan")[0])
        write_json(folder / RESULT_FILE, result.to_dict())
    return result


def check_arms(comparison: Comparison) -> dict[str, Config]:
    """Compose every arm as its runs will, and return the configs, resolved, by label.

    Raises:
        UserError: an arm that train.py would refuse, or one that equals the baseline.
    """
    configs: dict[str, Config] = {}
    for arm in comparison.arms:
        try:
            overrides = merged(comparison.common, arm.overrides)
            if swept := [text for text in overrides if len(combinations([text])) > 1]:
                raise UserError(f"{swept[0]} has several values; use one arm per value")
            composed = compose(overrides)
            config, plan, *_ = composed.resolve(detect(composed.device))
            if plan.steps <= config.log_every:
                raise UserError(
                    f"steps={plan.steps} leaves no steps to measure the speed: the steps up to log_every="
                    f"{config.log_every} are warm-up and not counted; use steps={4 * config.log_every}, "
                    "or a smaller log_every"
                )
        except UserError as error:
            raise UserError(f"arm {arm.label}: {error}") from None
        configs[arm.label] = config
    base = _comparable(configs[comparison.baseline])
    for arm in comparison.arms:
        if arm.label != comparison.baseline and not arm.seed_shift and _comparable(configs[arm.label]) == base:
            raise UserError(
                f"arm {arm.label} is the same as the baseline {comparison.baseline}; remove it, or name the baseline "
                "twice, such as arms=fp32,fp32,bf16, to see the noise"
            )
    return configs


def _comparable(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flatten(config).items() if key != "run_name"}


def _added(comparison: Comparison, is_gpu: bool) -> list[str]:
    """Return the defaults of the runs: no checkpoints, and a memory ledger where CUDA does not count memory."""
    typed = set(map(key_of, comparison.common))
    added = {"checkpoint": "none", "profiler": "none" if is_gpu else "memory"}
    return [f"{key}={value}" for key, value in added.items() if key not in typed]


def _begin(comparison: Comparison, runner: Runner, facts: dict[str, Any]) -> None:
    """Keep the plan, or check that it equals the one in the folder. Seeds may be added.

    Raises:
        UserError: the folder holds another comparison, or cannot be written.
    """
    plan = {
        "common": recorded(runner.common),
        "arms": [[arm.label, recorded(arm.overrides)] for arm in comparison.arms],
        "baseline": comparison.baseline,
        "margin": comparison.margin,
        "hardware": facts["hardware"]["name"],
        "number of threads": facts["hardware"]["threads"],
        "torch": facts["versions"]["torch"],
        "commit": facts["git"].get("commit"),
    }
    remedy = "give this one a name=…"
    try:
        runner.store.begin(plan, comparison.seeds, remedy, began_s=time.time(), key=uuid.uuid4().hex)
    except UsageError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"output_dir={comparison.output_dir} cannot be written ({error.strerror})") from None


def _described(outcome: Outcome, unit: str) -> str:
    rate = outcome.summary["units_per_s"]
    return f"loss {loss(outcome.summary['final'].get(LOSS))}" + (f"  {rate:,.0f} {unit}/s" if rate else "")
