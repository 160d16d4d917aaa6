"""Find the largest microbatch that fits: ``python scripts/max_batch.py recipe=gpt2 precision=bf16 budget=8GiB``.

  budget=8GiB or device     memory for the model and its training (default: device: all of a GPU, or what is free now);
                            5 % of it are left free
All other arguments are as for train.py. Each trial takes two optimizer steps in a fresh process, in which allocations
beyond the budget fail. Paste the last line: it has the same batch_size, in microbatches that fit.
Exit code: 0, 2 for a user error, 1 when a trial fails for another reason, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.memory.command:max_batch", __doc__))
