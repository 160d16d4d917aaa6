"""Find the fastest setting of a recipe on this machine: ``python scripts/advise.py recipe=gpt2 time_budget=5min``.

  time_budget=5min   time for all measurements; what would take longer is left out, or ended
  goal=equal_loss    then train the default and the three fastest settings with five seeds, and advise what takes least
                     time to the default's final loss; time_budget does not count it (default: goal=speed)
All other arguments are for train.py: they hold for every candidate, and what they set is not varied.

Tried are the precisions that this hardware computes fast, torch.compile, microbatches, forms of attention and of the
loss, the order of images in memory, threads on a CPU. Each change runs in a fresh process and
takes turns with train.py's default; those that help are combined. The doctor examines a step of the fastest setting,
and six pairs of fresh processes (three at least, where time is short) time it against the default: that ratio is what
is reported.

With goal=speed, whether it trains as well as the default is for scripts/compare.py to test; the command is printed at
the end. Writes
the answer, its commands and a picture to <output_dir>/advice/<recipe>.
Exit code: 0, 1 when no candidate works, 2 for a user error, 4 when nothing fits into memory, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.advice.command:main", __doc__))
