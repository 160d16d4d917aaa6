"""Generate text: python scripts/generate.py run=outputs/gpt2-bf16-s0 prompt="def "

  run=…               folder of a run, its best/, mlflow:RUN_ID, or a folder that save_pretrained wrote
                      (gpt2, llama, causal_lm, t5; run= may be left out)
  prompt=…            the text to continue; for t5, a text with gaps: "The <extra_id_0> fox"
  chat=false          true: the prompt is a user's message, for the tokenizer's chat template
  n=1                 number of texts
  temperature=1       below 1, likely tokens become likelier; 0 always takes the likeliest
  top_k=50            sample from this many of the likeliest tokens
  top_p=1             sample from the likeliest tokens whose probabilities add up to this
  seed=0              the same seed gives the same texts
  max_new_tokens=256  tokens of a text at most; from where the model's context is full, the last ones count
It computes in the precision of the run, or in precision=…; device=… chooses where.
Exit code: 0, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("inference.generate:generate", __doc__))
