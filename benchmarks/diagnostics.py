"""What ``diagnostics=numerics`` costs: a measured step of GPT-2 nano beside one that is not, in turns, in CPU time.

python benchmarks/diagnostics.py [precision=mxfp8] [micro_batch_size=4] …
"""

from __future__ import annotations

import statistics
import sys
import time

from trainer.config.compose import compose
from trainer.trainer import Trainer

PAIRS = 8
JOB = ("recipe=gpt2", "recipe.size=nano", "data.tokenizer=bytes", "precision=nvfp4", "diagnostics=numerics")


def main(overrides: list[str]) -> None:
    """Print the ratio, the middle half of the pairs, and the share that it adds at the default interval."""
    given = {text.partition("=")[0] for text in overrides}
    job = [text for text in JOB if text.partition("=")[0] not in given]
    trainer = Trainer.from_config(compose([*job, *overrides, f"steps={2 * PAIRS + 2}", "diagnostics.every=2"]))
    config, world = trainer.config, trainer.world
    session = config.diagnostics.start(trainer.model, trainer.update, trainer.precision.half, world)
    seconds = []
    for number, microbatches in enumerate(trainer.batches(), 1):
        began = time.process_time()
        session.begin(number)
        trainer.train_step(microbatches)
        list(session.collect())
        seconds.append(time.process_time() - began)
    pairs = [measured / plain for plain, measured in zip(seconds[2::2], seconds[3::2], strict=True)]
    low, ratio, high = statistics.quantiles(pairs, n=4)
    print(
        f"{config.precision.mode}: a measured step takes {ratio:.2f} times as long ({low:.2f} to {high:.2f}, the middle"
    )
    print(f"half of {PAIRS} pairs), so every 50 steps {2 * (ratio - 1):.1f} % are added")


if __name__ == "__main__":
    main(sys.argv[1:])
