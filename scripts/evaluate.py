"""Evaluate a trained model: python scripts/evaluate.py run=outputs/gpt2-bf16-s0

  run=…         folder of a run, its best/, mlflow:RUN_ID, or a folder of save_pretrained (run= may be left out)
  split=valid   or test, train, all
  output=…      folder of evaluation.json and the tables (default: evaluation/ in the run's folder)
Everything else is as in training, but for what you set: data=… data.path=… precision=… eval_samples=…
micro_batch_size=… recipe.image_size=… device=…
Of several precisions (precision=fp32,bf16,fp16), each is compared with the first.
Exit code: 0, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("inference.evaluate:evaluate", __doc__))
