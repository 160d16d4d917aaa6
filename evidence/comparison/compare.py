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
from mantissa.display import loss
from mantissa.quality import with_look
from trainer.config.compose import combinations, compose, key_of
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import in_use, read_json, write_json
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions

PLAN_FILE, RESULT_FILE = "plan.json", "comparison.json"


@dataclass
class Comparison:
    """What to compare, and how to judge it."""

    arms: list[Arm]
    baseline: str
    """The label of the arm that the others are compared with."""
    seeds: list[int]
    margin: float = 0.003
    """The relative difference in final validation loss that is too small to matter."""
    common: list[str] = field(default_factory=list)
    """Overrides of all arms."""
    output_dir: Path = Path("outputs")
    name: str = ""
    """Of the comparison's folder."""

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
    """Recipe, unit, steps, hardware, versions and commit."""
    looks: list[dict[str, Any]]
    """``seeds``, and ``ended``, arm and seed of every run that had ended, of each report that judged an arm."""

    @property
    def failed(self) -> bool:
        """Whether a run failed."""
        return any(arm.failures for arm in self.arms)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        head = {key: getattr(self.comparison, key) for key in ("name", "baseline", "seeds", "margin")}
        return (
            head
            | self.facts
            | {
                "looks": self.looks,
                "common": recorded(self.comparison.common),
                "arms": [asdict(arm) for arm in self.arms],
            }
        )


def compare(comparison: Comparison, configs: dict[str, Config]) -> Result:
    """Train what is left to train, judge it, and write ``comparison.json``; print each run.

    Args:
        comparison: what to compare; its ``name`` is set here if it is empty.
        configs: from ``check_arms``.

    Raises:
        UserError: the folder holds another comparison or seeds that are left out now, is in use by another process, or
            cannot be written.
    """
    first = configs[comparison.baseline]
    if not comparison.name:
        comparison.name = "-".join([first.recipe.name, *(arm.label for arm in comparison.arms if not arm.seed_shift)])
    hardware = detect(first.device)
    common = [*comparison.common, *_added(comparison, hardware.is_gpu)]
    arms, seeds, folder = comparison.arms, comparison.seeds, comparison.folder
    facts: dict[str, Any] = {
        "recipe": first.recipe.name,
        "unit": first.recipe.unit,
        "steps": first.steps,
        "hardware": hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
    }
    _begin(comparison, common, facts)
    with in_use(folder):  # a second process would remove this one's unfinished runs
        plan = read_json(folder / PLAN_FILE)
        looks = plan["looks"]
        if missing := sorted(set(looks[-1]["seeds"] if looks else ()) - set(seeds)):
            raise UserError(
                f"seed {missing[0]} was judged before and is left out now; keep all seeds, since a verdict on chosen "
                "ones means nothing, or give this comparison a name=…"
            )
        print(f"{len(arms)} arms × {len(seeds)} seeds, alternating; every run is a fresh process. {folder}")
        outcomes = Runner(folder, common, partial(_measured, unit=first.recipe.unit)).run_all(arms, seeds)
        looks = with_look(looks, losses(arms, outcomes), comparison.margin)
        judged = judge(arms, comparison.baseline, outcomes, comparison.margin, looks)
        write_json(folder / PLAN_FILE, plan | {"looks": looks})  # before the report that shows a look
        result = Result(comparison, judged, outcomes, facts, looks)
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
                f"arm {arm.label} is the same as the baseline {comparison.baseline}; remove it "
                "(the null arm already measures the noise)"
            )
    return configs


def _comparable(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flatten(config).items() if key != "run_name"}


def _added(comparison: Comparison, is_gpu: bool) -> list[str]:
    """Return the defaults of the runs: no checkpoints, and a memory ledger where CUDA does not count memory."""
    typed = set(map(key_of, comparison.common))
    added = {"checkpoint": "none", "profiler": "none" if is_gpu else "memory"}
    return [f"{key}={value}" for key, value in added.items() if key not in typed]


def _begin(comparison: Comparison, common: list[str], facts: dict[str, Any]) -> None:
    """Write the plan, or check that it equals the one in the folder. Seeds may be added.

    Raises:
        UserError: the folder holds another comparison, or cannot be written.
    """
    plan = {
        "common": recorded(common),
        "arms": [[arm.label, recorded(arm.overrides)] for arm in comparison.arms],
        "baseline": comparison.baseline,
        "margin": comparison.margin,
        "hardware": facts["hardware"]["name"],
        "number of threads": facts["hardware"]["threads"],
        "torch": facts["versions"]["torch"],
        "commit": facts["git"].get("commit"),
    }
    path = comparison.folder / PLAN_FILE
    try:
        comparison.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = read_json(path)
            if different := [key for key in plan if plan[key] != before.get(key)]:
                raise UserError(
                    f"{comparison.folder} holds a comparison with another {different[0]} "
                    f"({before.get(different[0])} there, {plan[different[0]]} here); give this one a name=…"
                )
        else:
            write_json(path, plan | {"began_s": time.time(), "key": uuid.uuid4().hex, "looks": []})
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or give this comparison a name=…") from None
    except OSError as error:
        raise UserError(f"output_dir={comparison.output_dir} cannot be written ({error.strerror})") from None


def _measured(outcome: Outcome, unit: str) -> str:
    rate = outcome.summary["units_per_s"]
    return f"loss {loss(outcome.summary['final'].get(LOSS))}" + (f"  {rate:,.0f} {unit}/s" if rate else "")
