"""How often scripts/layers.py finds one planted delicate layer, and how often it lifts one where there is none.

    python benchmarks/layers.py            ten searches of each kind, about ten minutes
    python benchmarks/layers.py searches=2

The delicate layer is in another block each time. Found means that it is confirmed, and no block but its own is lifted.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from benchmarks.planted.delicate import Delicate
from evidence.layers.command import asked, search
from evidence.layers.search import Search
from evidence.layers.training import InProcess
from trainer.config.options import parse, run

PLANTED = Path(__file__).parent / "planted"
SEEDS = 3
MARGIN = "margin=10%"
"""Healthy layers in nvfp4 raise the loss of this model by 2 %, the delicate one by 30 %."""


@dataclass
class Options:
    """Options of this script."""

    searches: int = 10


def searched(layer: int, number: int, folder: Path, *overrides: str, margin: str = MARGIN) -> Search:
    """Search the model whose block ``layer`` (from 1; 0: none) has a delicate layer, with seeds of its own.

    All runs are in this process, by the same trainer, so that a search takes seconds.
    """
    few = ",".join(str(number * SEEDS + seed) for seed in range(SEEDS))
    typed = [f"recipe_path={PLANTED}", "recipe=delicate", f"recipe.layer={layer}", "precision=nvfp4", margin]
    typed += ["device=cpu", f"seeds={few}", f"output_dir={folder}", f"name={layer}-{number}", *overrides]
    with redirect_stdout(StringIO()):
        return search(asked(typed, InProcess))


def found(result: Search, layer: int) -> bool:
    """Return whether a search has confirmed the delicate layer of a block, and lifts nothing outside of that."""
    lifted = result.lifted.layers if result.lifted else frozenset()
    block = f"h.{layer - 1}"
    return f"{block}.up" in lifted and all(each.startswith(block) for each in lifted)


def main(arguments: list[str]) -> int:
    """Search, and print each result and the counts."""
    options, _ = parse(arguments, Options)
    counts = [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.searches):
            for planted in (True, False):
                layer = 1 + number % Delicate.depth if planted else 0
                result = searched(layer, number, Path(folder))
                counts[planted] += found(result, layer) if planted else result.lifted is not None
                what = result.lifted.label if result.lifted else "nothing"
                print(f"{f'delicate: h.{layer - 1}.up' if planted else 'none delicate'}: {what} lifted", flush=True)
    print(f"found {counts[True]} of {options.searches}; lifted without need {counts[False]} of {options.searches}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
