"""Find the fastest setting of a recipe on this machine.

  python scripts/advise.py recipe=gpt2 time_budget=5min

  time_budget=5min   for all measurements (such as 90s, 5min or 2h); what would take longer is left out
  goal=speed         or equal_loss: then the default and the three fastest settings are trained with five seeds,
                     and the one that takes least time to the default's final loss is advised; this training
                     comes on top of time_budget
All other arguments are those of train.py. They hold for every candidate, and what they set is not varied.

It tries the precisions that are fast on this hardware, torch.compile, microbatches, attention and loss
implementations, channels_last, and threads on a CPU. Each change is timed in a fresh process, in turns with
train.py's default; those that help are combined. The doctor examines a step of the fastest setting. Then six
pairs of fresh processes (three at least, if time is short) time it against the default: that ratio is reported.

With goal=speed, quality is not tested: the last lines have the command that compares both settings.
The answer, its commands and a picture go to <output_dir>/advice/<recipe>.
Exit code: 0, 1 when no candidate works, 2 for a user error, 4 when nothing fits into memory, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.advice.command:main", __doc__))
