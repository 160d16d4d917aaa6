"""Estimate a step on many GPUs: ``python scripts/scale.py recipe=gpt2 recipe.size=1558M micro_batch_size=16``.

  gpus=8,64,512          numbers of GPUs
  accumulation=1         microbatches a step and GPU
  rate=400               TFLOP/s that a GPU reaches on this model
  gpus_per_node=8
  link=450               GB/s between two GPUs of a node
  network=400            GB/s between nodes, all network cards of a node together (8 of 400 Gbit/s)
  link_latency=3.4 network_latency=14    microseconds a hop
All other arguments are as for train.py; parallel=fsdp shows that mode only. Weights and FLOPs are counted in a step of
the real model, taken without storage. What follows from them: evidence/scaling/arithmetic.py.
Exit code: 0, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.scaling.command:scale", __doc__))
