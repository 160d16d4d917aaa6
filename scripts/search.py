"""Search for good options: python scripts/search.py recipe=gpt2 "space.optimizer.lr=tag(log,interval(1e-4,1e-2))"

  space.<key>=…       for each key to search, in Hydra's grammar: interval(low,high),
                      tag(log,interval(low,high)), int(interval(low,high)), range(low,high,step) or choice(a,b,c)
  trials=20           trials of the whole study; each is a run with a folder of its own
  pruner=median       ends a trial that is worse than the median of the earlier ones; or none
  metric=valid/loss   what is compared, at each trial's best checkpoint; another one is valid/top1
  study=<name>        name of the study (default: the recipe, precision and seed)
All other arguments are those of train.py, for every run. After a stop, the same command continues; in a second
terminal, it works on the same study. Optuna's database is <output_dir>/optuna.db.
Exit code: 0, 1 when no trial was complete, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.search.search:main", __doc__, continues=True))
