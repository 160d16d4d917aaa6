"""Find the fastest setting: python scripts/advise.py recipe=gpt2 time_budget=5min

  time_budget=5min   for all measurements (such as 90s, 5min or 2h); what would take longer is left out
  goal=speed         or equal_loss: after that time, trains the default and the three fastest settings with five
                     seeds, and advises what takes least time to the default's final loss
All other arguments are those of train.py; what they set is not varied.

It times precisions, torch.compile, microbatches, attention and loss implementations, channels_last and CPU threads,
each in a fresh process beside train.py's default, and combines those that help. The doctor examines a step of the
fastest setting. Six pairs of fresh processes, or at least three, then time it against the default. With goal=speed,
quality is not tested: the last lines have the command that compares both settings.
The answer, its commands and a picture go to <output_dir>/advice/<recipe>.
Exit code: 0, 1 when no candidate works, 2 for a user error, 4 when nothing fits into memory, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.advice.command:main", __doc__))
