"""Forecast a step's memory without allocating it: ``python scripts/memory.py recipe=gpt2 precision=fp32,bf16``.

Takes what train.py takes; a key with several values makes a column for each (precision=fp32,bf16
activation_checkpointing=none,blocks micro_batch_size=8,16), a combination of keys one for each of theirs.
check=true also takes two real steps for each, every one in a fresh process, and shows the forecast's error.
Exit code: 0, 2 for a mistake, 1 where a step cannot be forecast or fails.
"""

from __future__ import annotations

import logging
import sys

from trainer.errors import RunError, UserError


def main(arguments: list[str]) -> int:
    """Forecast every combination, check it if asked, show the table."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    from trainer.config.compose import combinations, compose

    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    checks = [argument for argument in arguments if argument.partition("=")[0] == "check"]
    try:
        if set(checks) - {"check=true", "check=false"}:
            raise UserError(f"{checks[-1]} must be check=true or check=false")
        wanted = combinations([argument for argument in arguments if argument not in checks])
        configs = {label: compose(overrides) for label, overrides in wanted.items()}  # mistakes before any work
        from evidence.memory.trial import trial
        from trainer.run.forecast import Forecast, forecast, table

        columns = [Forecast(label or "forecast", forecast(config)) for label, config in configs.items()]
        for column, overrides in zip(columns, wanted.values(), strict=True):
            if checks[-1:] == ["check=true"]:
                column.measured_bytes = trial([*overrides, "compile.mode=off"], ledger=True).peak_bytes
        print("Forecast of an optimizer step, at its peak, of the model without torch.compile:\n")
        print(table(columns))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
