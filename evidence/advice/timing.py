"""Times one candidate in a fresh process, by the steps of train.py's loop without tracking and checkpoints."""

from __future__ import annotations

import hashlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from evidence.advice.candidates import Candidate
from evidence.isolated import answer, measure_isolated
from evidence.memory.trial import peak_of
from evidence.runs import merge_overrides
from evidence.stopwatch import Block, over, stopwatch
from trainer.config.schema import Config
from trainer.config.settle import plan_of, settle
from trainer.hardware import detect
from trainer.run.fit import keep_memory
from trainer.trainer import Trainer

COMPILED = "compiled"
"""Folder below the advice's for what torch.compile keeps."""
WARM_UP_S = 0.3
"""Seconds that the steps of the warm-up after the first take together, or they are two."""
BLOCK_S = 0.3
"""Seconds of a block, unless a single step takes longer."""
WHOLE, TIMED = 4, 2
"""Microbatches of a step that is timed as a whole, at most; and how many of a larger one are timed."""
LIMIT_S = 1800.0
"""Seconds after which a candidate counts as hung."""


@dataclass(frozen=True)
class Times:
    """What a candidate takes."""

    step_s: float
    """Seconds of an optimizer step: a quarter of the blocks was faster, so that those which other work on the machine
    disturbed have little effect."""
    compile_s: float
    """Seconds by which its first steps took longer than later ones; 0: it does not compile."""
    memory_bytes: int
    """Peak of a step: allocated on a GPU; elsewhere the tensors that training keeps and the most that a step adds."""
    composed: bool = False
    """Whether ``TIMED`` microbatches were timed with the update and without, and the others count as the latter."""


def time_candidate(candidate: Candidate, blocks: int, limit_s: float, common: Sequence[str], folder: Path) -> Times:
    """Return the times of a candidate, by blocks of steps in a fresh process with its own places in memory.

    Args:
        candidate: what is trained.
        blocks: number of blocks.
        limit_s: seconds after which it has failed, as after ``LIMIT_S``.
        common: overrides of all candidates.
        folder: for what torch.compile keeps.

    Raises:
        RunError: it failed.
    """
    # Each candidate compiles anew, as on a machine that sees it for the first time; a second start of it is quick.
    compiled = folder / COMPILED / hashlib.sha256(candidate.label.encode()).hexdigest()[:16]
    # No run is that long: the data and the schedule must not end while blocks are taken.
    env, endless = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}, [f"steps={10**7}", "epochs=null"]
    overrides = merge_overrides(common, candidate.overrides, endless)
    return Times(**measure_isolated(__name__, overrides, {"blocks": blocks}, env, min(limit_s, LIMIT_S)))


def measure(config: Config, blocks: int) -> Times:
    """Return the times of a config in this process."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    plan = plan_of(config, detect(config.device))
    # A whole step may have dozens of microbatches, whose time differs by nothing: the others are counted, not taken.
    batching, others = plan.batching, 0
    if batching.accumulation > WHOLE:
        others = batching.accumulation - TIMED
        plan = replace(plan, config=replace(plan.config, batch_size=TIMED * batching.micro_batch_size))
    trainer = Trainer(settle(plan))
    keep_memory(trainer.plan)  # as in training
    batches = trainer.batches()
    block = stopwatch(over(batches, trainer.train_step), trainer.device)
    first_s = [block(1), block(1)]
    while sum(first_s[1:]) < WARM_UP_S and len(first_s) < 10:
        first_s.append(block(1))
    compile_s = 0.0 if config.compile.mode == "off" else sum(first_s) - len(first_s) * min(first_s)
    steps = max(1, round(BLOCK_S / (2 if others else 1) / min(first_s)))
    step_s, peak = _seconds(block, steps, blocks), peak_of(trainer, lambda: block(1))
    if others:
        of_gradients = stopwatch(over(batches, trainer.gradients), trainer.device)
        step_s += others / TIMED * _seconds(of_gradients, steps, blocks)
    return Times(step_s, compile_s, peak, composed=others > 0)


def _seconds(block: Block, steps: int, blocks: int) -> float:
    """Return the seconds of a step, which a quarter of the blocks was below."""
    return statistics.quantiles((block(steps) / steps for _ in range(blocks)), n=4)[0]


if __name__ == "__main__":
    sys.exit(answer(measure))
