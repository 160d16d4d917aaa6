"""Measure one thing without a training run: ``python scripts/probe.py gemm size=4096 precision=bf16``.

  gemm         one square matrix product, its speed and its error
    size=4096  precision=fp32, tf32, bf16 or fp16  repeats=10  rows=64 (that are compared with fp64)
  clip_order   what clip_grad_norm_ sees before and after unscale_, in a plain loop with torch's scaler
    order=after or before  max_norm=1  scale=65536
  max_batch    the largest batch that trains within a budget of memory, in one microbatch
    budget=1GiB  by=trials or forecast
All take device=auto, seed=0, output_dir=outputs and run_name; clip_order and max_batch also what train.py takes.
Exit code: 0, 1 when the measurement fails, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.probes:main", __doc__))
