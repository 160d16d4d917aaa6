"""Test published claims about mixed precision on this machine:
  python scripts/reproduce.py                lists the claims, and which of them this machine can test
  python scripts/reproduce.py claim=two_x    tests one, or several: claim=two_x,amp_recipe

  device=cpu     as for train.py
  output_dir=…   folder of the runs (default: outputs)
  data.path=…    and other overrides that a claim needs
The published figure is printed beside the measured one, with a verdict if the claim's own statement was tested.
After a stop, the same command continues, with the same code.
Exit code: 0 whatever the verdict, 1 when a run failed, 2 for a user error or an untestable claim, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.claims.reproduce:main", __doc__, continues=True, bare=True))
