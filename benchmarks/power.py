"""Simulate the verdicts of comparisons whose true difference is known, and write the tables of docs/comparing.md.

  python benchmarks/power.py [simulations=20000]

Losses are normal, at a margin of 0.3 %; the null arm is judged, too. Who follows a report adds the seeds that it names,
up to 4 looks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from mantissa.quality import NOT_JUDGED
from mantissa.statistics import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE, equivalence_family, mean_interval
from trainer.files import PROJECT, write_text

PAGE = PROJECT / "docs" / "comparing.md"
BEGIN, END = "<!-- power: made by benchmarks/power.py -->", "<!-- end of power -->"
MARGIN = 0.003
LOOKS = 4
PLANS = [(3, 0.001), (3, 0.002), (5, 0.001), (5, 0.002), (5, 0.004), (10, 0.002), (10, 0.004)]
"""First seeds and spread."""


def followed(mean: float, spread: float, seeds: int, generator: np.random.Generator) -> Iterator[str]:
    """Yield the verdict of each look at one comparison, until one decides or the report names no number of seeds."""
    losses = np.empty((0, 3))  # of the baseline, the arm and the null arm, in each pair as independent as they can be
    for look in range(1, LOOKS + 1):
        losses = np.concatenate([losses, generator.normal(0, spread / 2**0.5, (seeds - len(losses), 3))])
        arm, null = (losses[:, 1:] - losses[:, :1]).T
        (found,) = equivalence_family([arm + mean], MARGIN, look=look)
        withheld = mean_interval(null).excludes(0)
        yield NOT_JUDGED if withheld else found.verdict
        if withheld:
            seeds *= 2
        elif found.pairs_needed:
            seeds = found.pairs_needed
        else:
            return


def shares(mean: float, spread: float, seeds: int, simulations: int) -> dict[str, tuple[float, float]]:
    """Return for each verdict the share of comparisons that have it after the first look, and after the last."""
    generator = np.random.default_rng(0)
    runs = [list(followed(mean, spread, seeds, generator)) for _ in range(simulations)]
    return {
        verdict: (
            sum(run[0] == verdict for run in runs) / simulations,
            sum(run[-1] == verdict for run in runs) / simulations,
        )
        for verdict in (EQUIVALENT, WORSE, BETTER, INCONCLUSIVE)
    }


def tables(simulations: int) -> str:
    """Return the lines between the two markers."""
    lines = [
        f"Of {simulations:,} simulated comparisons of two arms each, at the first look → after up to {LOOKS} looks, "
        "with the seeds that the report names. The spread is the standard deviation of the paired differences:",
        "",
        "| seeds | spread | difference 1 %: WORSE | 0.5 %: WORSE | none: EQUIVALENT | 0.3 %, the margin: EQUIVALENT "
        "| WORSE or BETTER |",
        "|---|---|---|---|---|---|---|",
    ]
    for seeds, spread in PLANS:
        of = {mean: shares(mean, spread, seeds, simulations) for mean in (0.01, 0.005, 0.0, MARGIN)}
        beyond = tuple(worse + better for worse, better in zip(of[MARGIN][WORSE], of[MARGIN][BETTER], strict=True))
        cells = [of[0.01][WORSE], of[0.005][WORSE], of[0.0][EQUIVALENT], of[MARGIN][EQUIVALENT], beyond]
        lines.append(f"| {seeds} | {spread:.1%} | {' | '.join(f'{a:.1%} → {b:.1%}' for a, b in cells)} |")
    return "\n".join(lines).replace("%", " %").replace("  %", " %")


def main(arguments: list[str]) -> int:
    """Write the tables."""
    simulations = int(dict(argument.split("=", 1) for argument in arguments).get("simulations", 20_000))
    head, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    write_text(PAGE, f"{head}{BEGIN}\n{tables(simulations)}\n{END}{after.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
