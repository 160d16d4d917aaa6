"""Forecast a step's memory: python scripts/memory.py recipe=gpt2 precision=fp32,bf16

All arguments are those of train.py; nothing is allocated. A key with several values, such as precision=fp32,bf16 or
micro_batch_size=8,16, gives a line for each; several such keys give a line for each combination.
Exit code: 0, 2 for a user error, 1 when a step cannot be forecast or fails, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.memory.command:memory", __doc__))
