"""Find the layers that need more bits than a format has: python scripts/layers.py recipe=gpt2 precision=nvfp4

  precision=nvfp4     the format, which linear layers multiply in; the question is which of them to keep in bf16
  seeds=4             how many seeds a verdict is of, or which; the confirmation uses as many fresh ones (default: 4)
  margin=0.3%         the difference in final validation loss that is too small to matter
  output_dir=outputs  runs and report go to <output_dir>/layers/<name>
  name=<name>         name of that folder (default: the recipe and the format)
All other arguments are those of train.py, for every run. After a stop, the same command continues.

1. The format against bf16, by compare.py's rules; where they are equal within the margin, nothing is needed.
2. Each block, and each kind of linear layer, in bf16 for a quarter of the steps: what lowers the loss most comes first.
3. The most promising sets in whole runs, the smallest first, until one is as good as bf16.
4. The best of them on fresh seeds: only what compare.py's rules confirm there is printed to be set.
Exit code: 0, 1 when bf16 itself fails, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.layers.command:main", __doc__, continues=True))
