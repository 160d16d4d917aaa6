"""Forecast a step's memory without allocating it: ``python scripts/memory.py recipe=gpt2 precision=fp32,bf16``.

All arguments are as for train.py. A key with several values gives one line per value (precision=fp32,bf16
activation_checkpointing=none,blocks micro_batch_size=8,16); several such keys give one line per combination.
Exit code: 0, 2 for a user error, 1 when a step cannot be forecast or fails, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.memory.command:memory", __doc__))
