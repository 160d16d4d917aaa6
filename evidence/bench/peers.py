"""Other frameworks beside the trainer: the same model, weights, batches, precision and optimizer, side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from evidence.bench.baselines import LOG_EVERY, Workload
from evidence.bench.frameworks import FRAMEWORKS, Framework, bare
from evidence.bench.jobs import TINY_MLP, Job, gpt2_job, resnet_job
from evidence.bench.measurement import Bench
from evidence.bench.overhead import PEAK_STEP, PeakWatch, alternate, trainer_peak
from evidence.bench.turns import Block
from mantissa.display import columns, size
from mantissa.formats import BASIC
from trainer.hardware import NATIVE, Hardware
from trainer.run.provenance import git_facts

ALIKE = 0.01
"""Loops train alike where their weights differ by less than this share of the distance that they went."""
BARE, MANTISSA = "bare loop", "Mantissa, everything on"
Weights = dict[str, Tensor]
HEADING = ("loop", "version", "step, ms", "over bare, ms", "{unit}/s", "of bare's", "peak memory", "of bare's")


@dataclass
class Peer:
    """One loop's figures; those that are missing were not measured."""

    name: str
    version: str
    seconds: list[float] = field(default_factory=list)
    """Of a repeat."""
    peak_bytes: int = 0
    drift: float = math.nan
    """How far its weights are from the bare loop's after three steps, as a share of the distance that those went."""
    note: str = ""
    """What differs."""
    error: str = ""
    """Why it was not measured."""


@dataclass
class SideBySide:
    """The table of one job; the first peer is the loop written by hand."""

    job: str
    command: str
    unit: str
    units: int
    """Of one optimizer step: tokens, images or samples."""
    steps: int
    """In a repeat."""
    memory: str
    """How the peak was measured."""
    peers: list[Peer]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the heading and one row of text for each peer."""
        return [tuple(cell.format(unit=self.unit) for cell in HEADING), *map(self._row, self.peers)]

    def _row(self, peer: Peer) -> tuple[str, ...]:
        bare = self.peers[0]
        peak = (size(peer.peak_bytes), f"{peer.peak_bytes / bare.peak_bytes:.3f}x") if peer.peak_bytes else ("–", "–")
        if not peer.seconds:
            return (peer.name, peer.version or "–", "–", "–", "–", "–", *peak)
        extra, share = self.overhead_ms(peer), self.throughput(peer)
        step_s = statistics.median(peer.seconds) / self.steps
        rate = self.units / step_s
        digits = 3 if step_s < 0.01 else 1
        time = (
            f"{1e3 * step_s:.{digits}f}",
            _range(extra, f"+.{digits}f"),
            f"{rate:,.{0 if rate >= 100 else 1}f}",
            _range(share, ".3f"),
        )
        return (peer.name, peer.version, *(time if peer is not bare else (time[0], "", time[2], "")), *peak)

    def overhead_ms(self, peer: Peer) -> list[float]:
        """Return what a step takes longer than the bare loop's, for each repeat."""
        pairs = zip(peer.seconds, self.peers[0].seconds, strict=True)
        return [1e3 * (own - bare) / self.steps for own, bare in pairs]

    def throughput(self, peer: Peer) -> list[float]:
        """Return the throughput as a multiple of the bare loop's, for each repeat."""
        return [bare / own for own, bare in zip(peer.seconds, self.peers[0].seconds, strict=True)]

    def notes(self) -> list[str]:
        """Return what the rows do not say."""
        alike = [peer for peer in self.peers[1:] if peer.drift < ALIKE]
        notes = []
        if alike:
            names, most = ", ".join(peer.name for peer in alike), max(peer.drift for peer in alike)
            same = f"after {PEAK_STEP} steps they differ by at most {most:.2%} of the distance that the weights moved"
            notes.append(f"the same weights as the bare loop's ({same}): {names}")
        for peer in self.peers[1:]:
            if peer.drift >= ALIKE:
                apart = f"its weights differ from the bare loop's by {peer.drift:.0%} of the distance that those moved"
                notes.append(f"{peer.name}: NOT the same training; after {PEAK_STEP} steps {apart}")
            notes += [f"{peer.name}: {each}" for each in (peer.error, peer.note if not peer.error else "") if each]
        return notes

    @property
    def how(self) -> str:
        """What was measured."""
        return f"{self.command}; {self.steps} steps a repeat; peak memory of the third step by {self.memory}"

    def text(self) -> str:
        """Return the table, and below it what was measured."""
        lines = [f"{self.job}", *columns(self.rows()).splitlines(), self.how, *self.notes()]
        return "\n".join(f"  {line}" for line in lines) + "\n"

    def markdown(self) -> str:
        """Return the table for a page."""
        heading, *rows = self.rows()
        table = [heading, ["---"] * len(heading), *rows]
        lines = ["| " + " | ".join(row) + " |" for row in table]
        notes = [f"- {note}" for note in (f"`{self.command}`{self.how.removeprefix(self.command)}", *self.notes())]
        return "\n".join([f"### {self.job}", "", *lines, "", *notes]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types: medians as in the table, and the values of each repeat."""
        return {
            "name": self.job,
            "measured": self.how,
            "unit": self.unit,
            "units_per_step": self.units,
            "steps": self.steps,
            "peers": [
                {
                    "name": peer.name,
                    "version": peer.version,
                    "seconds": peer.seconds,
                    "overhead_ms": self.overhead_ms(peer) if peer.seconds else [],
                    "throughput_of_bare": self.throughput(peer) if peer.seconds else [],
                    "peak_bytes": peer.peak_bytes or None,
                    "drift": peer.drift if math.isfinite(peer.drift) else None,
                    "note": peer.error or peer.note,
                }
                for peer in self.peers
            ],
        }


def _range(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def peers_jobs(hardware: Hardware) -> tuple[Job, ...]:
    """Return a language, a vision and a tiny model; on a CPU small enough for minutes."""
    tiny = Job(**{**vars(TINY_MLP), "rounds": 5})
    if hardware.is_gpu:
        return gpt2_job(hardware), resnet_job(hardware), tiny
    language = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096", "batch_size=4")
    vision = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=64", "data=synthetic", "data.classes=10")
    return Job("gpt2 mini", language, 1, 5), Job("resnet18", (*vision, "batch_size=32"), 2, 5), tiny


def peers_mode(bench: Bench) -> str:
    """Return the precision of the comparison: bf16 where the device has instructions for it, else fp32."""
    asked = [mode for mode in BASIC if mode in bench.modes]
    return asked[-1] if asked else "bf16" if bench.hardware.support("bf16") == NATIVE else "fp32"


def peers(bench: Bench, jobs: Sequence[Job] = (), frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterator[SideBySide]:
    """Measure a step's overhead, throughput and peak memory in each framework, beside a loop written by hand."""
    for job in jobs or peers_jobs(bench.hardware):
        vision = "recipe=resnet" in job.overrides
        yield _side_by_side(bench, job, [each for each in frameworks if vision or not each.vision_only])


class FirstSteps(PeakWatch):
    """Measures the peak memory of the third step, and keeps the weights after it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.weights: Weights = {}

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note whose step begins."""
        super().before(step, model, optimizer)
        self._model = model

    def after(self, step: int, last: int) -> None:
        """Read the peak, copy the weights to the CPU."""
        super().after(step, last)
        if step == PEAK_STEP:
            self.weights = {name: each.detach().cpu().clone() for name, each in self._model.named_parameters()}

    def distance(self, weights: Weights) -> float:
        """Return the Euclidean distance of its weights from others."""
        return math.sqrt(
            sum(float((own - weights[name]).double().square().sum()) for name, own in self.weights.items())
        )


def _commit() -> str:
    """Return the commit of this project: releases are rarer than changes of the step."""
    facts = git_facts()
    return f"commit {facts['commit'][:7]}" if facts else ""


def _side_by_side(bench: Bench, job: Job, frameworks: Sequence[Framework]) -> SideBySide:
    mode, device = peers_mode(bench), bench.hardware.device
    options = [f"precision={mode}", "clip=norm", "schedule=constant", "schedule.warmup_steps=0"]
    options += [f"log_every={LOG_EVERY}", "checkpoint=none"]
    bench.report(f"{job.name}: {MANTISSA}, first steps")
    ours = FirstSteps(device)
    workload = trainer_peak(bench, job, options, ours)
    baseline = FirstSteps(device)
    bare(workload, bench.folder).first_steps(baseline)
    way = baseline.distance(workload.weights)
    rows = [
        Peer(BARE, f"torch {version('torch').partition('+')[0]}", peak_bytes=baseline.bytes, drift=0.0),
        Peer(MANTISSA, _commit(), peak_bytes=ours.bytes, drift=ours.distance(baseline.weights) / way),
    ]
    tried: list[tuple[Peer, Framework]] = []
    for framework in frameworks:
        peer = Peer(framework.name, framework.version, note=framework.note(mode), error=framework.missing() or "")
        rows.append(peer)
        if not peer.error:
            tried.append((peer, framework))
            bench.report(f"{job.name}: {peer.name}, first steps")
            watch = FirstSteps(device)
            with _named(bench, job, peer):
                framework.make(workload, bench.folder).first_steps(watch)
                peer.peak_bytes, peer.drift = watch.bytes, watch.distance(baseline.weights) / way
    unit, units = workload.units()
    steps = _time(bench, job, options, rows, tried)
    return SideBySide(f"{job.name} {mode}", job.line(*options), unit, units, steps, baseline.how, rows)


def _time(bench: Bench, job: Job, options: Sequence[str], rows: list[Peer], tried: list[tuple[Peer, Framework]]) -> int:
    """Time the loops of all rows in turn; return the optimizer steps of a repeat."""

    def others(workload: Workload) -> tuple[dict[str, Block], dict[str, Block]]:
        blocks: dict[str, Block] = {}
        fits: dict[str, Block] = {}
        for peer, framework in tried:
            if peer.error:
                continue
            bench.report(f"{job.name}: building {peer.name}")
            with _named(bench, job, peer):
                block = framework.make(workload, bench.folder).block
                (fits if framework.whole_fit else blocks)[peer.name] = partial(_attempt, bench, job, peer, block)
        return blocks, fits

    found = alternate(bench, job, options, others)
    for peer in rows:
        if not peer.error:
            peer.seconds = found.times[{BARE: "bare", MANTISSA: "trainer"}.get(peer.name, peer.name)]
    return found.steps


def _attempt(bench: Bench, job: Job, peer: Peer, block: Block, steps: int) -> float:
    """Return the seconds of a block; 0 once it has failed."""
    if not peer.error:
        with _named(bench, job, peer):
            return block(steps)
    return 0.0


@contextmanager
def _named(bench: Bench, job: Job, peer: Peer) -> Iterator[None]:
    """Name a framework that fails; the others go on without it."""
    try:
        yield
    except Exception as error:
        peer.error = bench.failed(f"{job.name}, {peer.name}", error)
