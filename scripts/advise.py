"""Find the fastest setting of a recipe on this machine: ``python scripts/advise.py recipe=gpt2 budget_minutes=5``.

  budget_minutes=5   time for all measurements, about
  goal=speed         or memory: the least memory, in at most 1.5 times the default's time
  fresh=false        true: measures again what an earlier call has measured
All other arguments are for train.py: they hold for every candidate, and what they set is not varied.

Tried are the precisions that this hardware computes fast, torch.compile, microbatches, forms of attention and of the
loss, the order of images in memory, the optimizer's kernel, threads on a CPU; for memory, activation checkpointing.
Each candidate runs in a process of its own and takes turns with train.py's default. Those that look good are combined
and measured longer; the chosen one is timed once more against the default, both in several new processes, and that
ratio is what is reported.

The doctor examines a step of the winner; one with a fault is not advised. Whether it trains as well as the default is
for scripts/compare.py to test; the command is printed at the end. Writes the answer, its commands and
a picture to <output_dir>/advice/<recipe>-<key>, and a run to MLflow.
After a stop, the same command continues; where options, data, code, hardware and versions are the same, it answers
at once.
Exit code: 0, 1 when no candidate works, 2 for a user error, 4 when nothing fits into memory, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.advice.command:main", __doc__, continues=True))
