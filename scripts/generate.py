"""Generate text with a trained model: ``python scripts/generate.py run=outputs/gpt2-bf16-s0 prompt="def "``.

  run=…             a run folder, its best/, mlflow:RUN_ID, or a folder that save_pretrained wrote (gpt2, llama, t5)
                    (run= may be left out, as in: outputs/gpt2-bf16-s0 prompt="def ")
  prompt=…          the beginning of the text; for t5, a text with gaps: "The <extra_id_0> fox"
  n=1               how many texts
  temperature=1     below 1 more probable tokens are preferred; 0: always the most probable one
  top_k=50          only so many of the most probable tokens
  top_p=1           only the most probable tokens whose probabilities add up to this
  seed=0            the same seed gives the same texts
  max_new_tokens=256  at most so many; beyond the context, each follows from the last tokens that it has room for
It computes in the precision of the run, or in precision=…; device=… chooses where.
Exit code: 0, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("inference.generate:generate", __doc__))
