"""Find a learning rate (Smith's range test): python scripts/lr_range.py recipe=gpt2 precision=bf16

  min=1e-7    learning rate of the first step
  max=10      learning rate of the last step
  steps=100   optimizer steps; from each to the next, the learning rate rises by the same factor
All other arguments are those of train.py. It is one short training without checkpoints, which stops when the
smoothed loss is four times its lowest value. The plot goes to <output_dir>/lr_range. A key with several values
(precision=fp32,bf16) gives a curve for each. Paste one of the last lines into train.py.
Exit code: 0, 1 when the loss does not fall, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.search.lr_range:main", __doc__))
