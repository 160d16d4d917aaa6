"""Classify photos: python scripts/predict.py run=outputs/resnet-bf16-s0 path=photos

  run=…           folder of a run, its best/, mlflow:RUN_ID, or an exported folder (run= may be left out)
  path=…          a photo, or a folder of photos; each is cut and scaled as in the model's evaluation
  top=5           how many classes are shown for each; of several labels all above 0.5 are
  output=…        the CSV file (default: predictions.csv in the run's folder)
  batch_size=32   photos in a forward pass
It computes in the precision of the run, or in precision=…; device=… chooses where.
A file that cannot be read as an image is named, and left out of the CSV file.
Exit code: 0, 1 if there was such a file, 2 for a user error or if no file could be read, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("inference.predict:predict", __doc__))
