"""Find the fastest setting: python scripts/advise.py recipe=gpt2 time_budget=5min

  time_budget=5min   for all measurements (such as 90s, 5min or 2h); what would take longer is left out
All other arguments are those of train.py; what they set is not varied.

It times precisions, torch.compile, microbatches, attention and loss implementations, channels_last and CPU threads,
each in a fresh process beside train.py's default, and combines those that help. The doctor examines a step of the
fastest setting. Six pairs of fresh processes, or at least three, then time it against the default. Quality is not
tested: the last lines have the command that compares the fastest settings with the default, by loss and by the time to
an equal loss.
The answer, its commands and a picture go to <output_dir>/advice/<recipe>.
Exit code: 0, 1 when no candidate works, 2 for a user error, 4 when nothing fits into memory, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.advice.command:main", __doc__))
