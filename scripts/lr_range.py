"""Find a learning rate: ``python scripts/lr_range.py recipe=gpt2 precision=bf16`` (Smith's range test).

  min=1e-7      learning rate of the first step
  max=10        learning rate of the last step
  steps=100     optimizer steps; the learning rate rises by the same factor at each
All other arguments are as for train.py. One short training without checkpoints, which stops when the loss is far above
its lowest value; the plot goes to <output_dir>/lr_range. A key with several values (precision=fp32,bf16) gives
one curve per value. Paste one of the last lines into train.py.
Exit code: 0, 1 when the loss does not fall, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.search.lr_range:main", __doc__))
