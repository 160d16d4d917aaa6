"""The report of the programme: what each stage gave, and what was measured beside the goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.budget import in_words
from evidence.programme.stages import GPT2, KEPT, PROFILES, RESNET, TESTS, Stage
from mantissa.display import quantity
from trainer.files import read_object

Records = dict[str, dict[str, Any]]
"""By stage."""


@dataclass(frozen=True)
class Goal:
    """A figure that is to be reached on an H200."""

    text: str
    least: float
    measured: float | None
    """None: not yet."""
    explained_by: str
    """Where to look when it is not reached."""
    shown: Callable[[float], str] = quantity

    def row(self) -> str:
        """Return a line of the table of goals."""
        if self.measured is None:
            return f"| {self.text} | {self.shown(self.least)} | not measured yet | |"
        verdict = "reached" if self.measured >= self.least else f"not reached: see {self.explained_by}"
        return f"| {self.text} | {self.shown(self.least)} | {self.shown(self.measured)} | {verdict} |"


def report(machine: str, rates: dict[str, Any], plan: list[Stage], records: Records, outcomes: Path) -> str:
    """Return the page in Markdown.

    Args:
        machine: its name.
        rates: what the first stage measured.
        plan: all stages.
        records: of the stages that were run.
        outcomes: the folder with this machine's outcomes of claims.
    """
    lines = [f"# {machine}", ""]
    if rates:
        products = ", ".join(f"{name} {quantity(rate)}" for name, rate in rates["product_tflops"].items())
        versions = ", ".join(f"{name} {version}" for name, version in rates["versions"].items() if version)
        lines += [
            f"Products, 10^12 FLOP/s: {products}. Copies: {quantity(rates['copy_gb_per_s'])} GB/s. {versions}.",
            "",
        ]
    lines += ["| stage | | time | measured |", "| --- | --- | --- | --- |"]
    for stage in plan:
        record = records.get(stage.name)
        if record is None:
            lines.append(f"| {stage.name}: {stage.about} | not run yet | about {in_words(stage.usual_s)} | |")
        else:
            time, measured = in_words(record["seconds"]), _measured(stage, record)
            lines.append(f"| {stage.name}: {stage.about} | {record['status']} | {time} | {measured} |")
    lines += ["", "| goal on an H200 | at least | measured | |", "| --- | --- | --- | --- |"]
    lines += [goal.row() for goal in goals(records, outcomes)]
    return "\n".join(lines) + "\n"


def goals(records: Records, outcomes: Path) -> list[Goal]:
    """Return the goals with what was measured: the best of the runs of a model, the median of a claim."""
    gpt2, resnet = KEPT[PROFILES["gpt2"]][1], KEPT[PROFILES["resnet50"]][1]
    ladder = read_object(outcomes / "gpt2_ladder.json")
    of_all = [
        finding["median"]
        for finding in ladder.get("findings", [])
        if finding["criterion"]["arm"] == ["fused"] and finding["criterion"].get("over") == ["fp32"]
    ]
    return [
        Goal("GPT-2 124M in bf16, tokens/s", 500_000, _best(records, GPT2, _speed), gpt2),
        Goal("the same, share of the measured rate of products", 0.5, _best(records, GPT2, _mfu), gpt2, _percent),
        Goal("ResNet-50 in bf16, images/s", 5_000, _best(records, RESNET, _speed), resnet),
        Goal("claim gpt2_ladder, all rungs over fp32", 10, of_all[0] if of_all else None, "its reasons", _times),
    ]


def _measured(stage: Stage, record: dict[str, Any]) -> str:
    if record.get("summary"):
        summary = record["summary"]
        speed, memory = summary.get("units_per_s"), summary.get("peak_memory_bytes")
        share = (summary.get("utilisation") or {}).get("mfu")
        parts = [
            "" if record["status"] == "done" else "until its end",
            f"{quantity(speed)} {summary.get('unit', 'units')}/s" if speed else "",
            f"{_percent(share)} of the rate of products" if share else "",
            f"{memory / 2**30:.1f} GiB" if memory else "",
        ]
        return ", ".join(filter(None, parts))
    if stage.name == TESTS or record["status"] != "done":
        return record["last_lines"][-1].strip("= ").replace("|", "/") if record["last_lines"] else ""
    return ""


def _best(records: Records, names: tuple[str, ...], measure: Callable[[dict[str, Any]], float | None]) -> float | None:
    return max((found for name in names if name in records and (found := measure(records[name]))), default=None)


def _speed(record: dict[str, Any]) -> float | None:
    return record.get("summary", {}).get("units_per_s") if record["status"] == "done" else None


def _mfu(record: dict[str, Any]) -> float | None:
    return (record.get("summary", {}).get("utilisation") or {}).get("mfu") if record["status"] == "done" else None


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x"
