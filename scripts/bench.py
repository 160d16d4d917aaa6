"""Measure the project's performance targets, as ratios from one run: ``python scripts/bench.py``.

  only=memory,precision   run only these measurements (default: all):
                          precision, trainer, peers, nanogpt, roofline, optimizers, diagnostics, ema,
                          memory, loader, generation, evaluation, startup, saving, parallel
  repeats=5               repeats; the median is shown
  device=auto             as for train.py
  modes=fp16              precisions to measure although their matrix products are too slow here
  text=FILE               text for nanogpt and roofline, such as tinyshakespeare's; else Python's library
  json=FILE               also write all measurements to FILE
  table=FILE              also write them as a page of Markdown to FILE
Each row is printed as soon as it is known; Ctrl-C keeps what is known. A measurement that fails is named, and the
others go on.
Exit code: 0, 1 when a measurement fails, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.bench.command:main", __doc__))
