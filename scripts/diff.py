"""Find where two runs part: python scripts/diff.py outputs/a outputs/b

  A B           two run folders (or mlflow:RUN_ID, which is fetched to outputs/), or two logs of any trainer: .jsonl,
                .csv, or transformers' trainer_state.json
  step=NAME     the column that counts the steps of such logs (default: step, global_step, iteration, …, epoch)
  replay=true   replay the step at which two runs part, and name the first operator whose results differ
It prints what differs before step 1 (options, data, machine, versions), the first step at which the logs differ at all,
and by more than 1e-3, and whether the weights that both kept are equal. It changes no run.
Exit code: 0 when all that was compared is equal, 1 when it differs, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.diff.command:main", __doc__))
