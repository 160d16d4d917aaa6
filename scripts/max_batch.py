"""Find the largest microbatch: python scripts/max_batch.py recipe=gpt2 precision=bf16 memory_budget=8GiB

  memory_budget=8GiB   for the model and its training; 5 % of it are left free (default: device, which is all
                       memory of a GPU, or what is free now of a machine's)
All other arguments are those of train.py. Each trial is a fresh process that takes two optimizer steps; what it
allocates beyond memory_budget fails. Paste the last line: the same batch_size, in microbatches that fit.
Exit code: 0, 2 for a user error, 1 when a trial fails for another reason, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.memory.command:max_batch", __doc__))
