"""Find the largest microbatch: ``python scripts/max_batch.py recipe=gpt2 precision=bf16 memory_budget=8GiB``.

  memory_budget=8GiB or device   for the model and its training; 5 % of it are left free (default: device, which is all
                                 of a GPU, or what is free now of a machine)
All other arguments are as for train.py. Each trial takes two optimizer steps in a fresh process, in which allocations
beyond it fail. Paste the last line: it has the same batch_size, in microbatches that fit.
Exit code: 0, 2 for a user error, 1 when a trial fails for another reason, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.memory.command:max_batch", __doc__))
