"""Compare precisions, or any options: python scripts/compare.py recipe=gpt2 arms=fp32,bf16,fp16 seeds=5

  arms=fp32,bf16            precisions; one that is named twice (fp32,fp32,bf16) gets other seeds: the noise
  arm.<name>="key=value …"  an arm of any overrides, such as arm.compiled="precision=bf16 compile=default"
  baseline=<name>           the arm that the others are compared with (default: the first one)
  seeds=5 or seeds=3,4,5    how many seeds, or which; every arm is trained with each (default: 5)
  margin=0.3%               the difference in final validation loss that is too small to matter
  output_dir=outputs        runs and report go to <output_dir>/compare/<name>
  name=<name>               name of that folder (default: the recipe and the arms)
All other arguments are those of train.py, for every run. After a stop, the same command continues.
To compare any two commands that train: python -m mantissa compare --help
Exit code: 0, 1 when a run failed, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.comparison.command:main", __doc__, continues=True))
