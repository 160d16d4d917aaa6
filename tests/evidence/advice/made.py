"""Advice records made by hand."""

from __future__ import annotations

from typing import Any

from evidence.advice.candidates import Candidate
from evidence.advice.schema import FAILED, LEFT_OUT, Advice, Entry
from mantissa.statistics import Interval

MIB = 2**20
TINY = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=4")


def measured(label: str, speed: float, mib: int, *overrides: str, half: float = 0.05, **more: Any) -> Entry:
    """An entry that was timed in the final round, its interval ``half`` to both sides."""
    interval = Interval(speed, speed - half, speed + half, 0.95, 6)
    facts = {
        "processes": 3,
        "turns": [(0.1 / speed, 0.1)] * 6,
        "memory_bytes": mib * MIB,
        "speed": speed,
        "interval": interval,
    }
    return Entry(Candidate(label, overrides, "compile" in label), **facts | more)


def advice(*further: Entry, winner: str = "bf16 + compile", **changed: Any) -> Advice:
    """An advice in which bf16 + compile has won."""
    compiled = measured(
        "bf16 + compile", 2.9, 620, "precision=bf16", "compile=default", compile_s=14.0, pays_after_steps=140
    )
    entries = [
        compiled,
        measured("bf16", 2.1, 700, "precision=bf16", interval=None),
        *further,
        measured("fp32", 1.0, 1000, interval=None),
        Entry(Candidate("fp16", ("precision=fp16",)), FAILED, "the loss is not finite"),
        Entry(Candidate("tf32", ("precision=tf32",)), LEFT_OUT, "not available on this hardware"),
        Entry(Candidate("bf16, 1 thread", ("precision=bf16", "threads=1")), FAILED, "no step within 60 s"),
    ]
    facts: dict[str, Any] = {
        "recipe": "gpt2",
        "goal": "speed",
        "overrides": list(TINY),
        "command": "python scripts/advise.py recipe=gpt2",
        "machine": "a-cpu-2-cores",
        "hardware": {"name": "A CPU", "device": "cpu", "cpu_cores": 2, "torch": "2.15.0", "threads": 2},
        "versions": {"torch": "2.15.0"},
        "git": {"commit": "0123456789abcdef", "dirty": "false"},
        "steps": 1000,
        "baseline": "fp32",
        "entries": entries,
        "winner": winner,
        "spent_s": 180.0,
        "stopped": "one is ahead",
        "date": "2026-11-22",
    }
    return Advice(**(facts | changed))
