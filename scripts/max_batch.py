"""Find the largest microbatch that fits: ``python scripts/max_batch.py recipe=gpt2 precision=bf16 budget=8GiB``.

  budget=8GiB or device     memory for the model and its training (default: device: all of a GPU, or what is free now)
  margin=5%                 the part of it that is left free
Everything else is as for train.py. Each trial takes two optimizer steps in a fresh process, in which allocating more
fails. The last line is what to paste: the same batch_size, in microbatches that fit.
Exit code: 0, 2 for a mistake, 1 when a trial fails for another reason, 130 when interrupted.
"""

from __future__ import annotations

import logging
import sys

from trainer.errors import RunError


def main(arguments: list[str]) -> int:
    """Parse the options, search, show the answer."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    from evidence.memory.max_batch import largest_micro_batch, parse_budget, parse_margin
    from trainer.config.compose import compose
    from trainer.hardware import detect

    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options = {"budget": "device", "margin": "5%"}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in options:
            options[key] = value
        else:
            overrides.append(argument)
    try:
        margin = parse_margin(options["margin"])
        budget_bytes = parse_budget(options["budget"], detect(compose(overrides).device))
        found = largest_micro_batch(overrides, budget_bytes, margin, lambda text: print(text, flush=True))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(f"\nlargest micro_batch_size in {options['budget']}, {options['margin']} of it left free: ", end="")
    print(f"{found.micro_batch_size} ({found.trials} trials)")
    print(f"of which batch_size={found.batch_size} is a multiple: {found.dividing}, to be pasted:")
    print(found.overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
