"""Which parallel mode, activation checkpointing, precision and compilation work together: tested by running them.

docs/composition.md is this test's output; MANTISSA_WRITE_DOCS=1 writes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.parallel.conftest import PROJECT, Found
from tests.parallel.ranks import ACTIVATIONS, PRECISIONS

PAGE = PROJECT / "docs" / "composition.md"
COLUMNS = [("gpt2", precision, "off") for precision in PRECISIONS]
COLUMNS += [("resnet", "bf16", "off"), ("bignet", "bf16", "default")]
HEAD = """\
# Tested combinations of options

Every combination below ran two optimizer steps (of microbatches of two samples) and an evaluation on a CPU, `ddp` and
`fsdp` in two processes. The number is the training loss of the second step. Within a column of gpt2 and BigNet it must
be the same. (ResNet's batch norm sees one microbatch of one process, and FSDP2 stores weights in another layout, so
small differences grow there.) Compilation is tested on the smallest model. `tests/parallel/test_composition.py`
generates this page, and fails if it is out of date.

"""


def table(outcome: dict[str, str]) -> str:
    """Return the page."""
    titles = [f"{name} {precision}{' compiled' if compiled != 'off' else ''}" for name, precision, compiled in COLUMNS]
    rows = [f"| `parallel` | `activation_checkpointing` | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for mode in ("single", "ddp", "fsdp"):
        for activation in ACTIVATIONS:
            cells = [outcome[f"{name} {mode} {activation} {precision} {c}"] for name, precision, c in COLUMNS]
            rows.append(f"| {mode} | {activation} | {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def outcome(ranks: Callable[[str, int], Found]) -> dict[str, str]:
    (alone,) = ranks("composition", 1)
    first, second = ranks("composition", 2)
    assert first == second
    found: dict[str, str] = alone["composition"] | first["composition"]
    return found


def test_every_combination_trains_the_same(outcome: dict[str, str]) -> None:
    assert len(outcome) == 3 * len(ACTIVATIONS) * len(COLUMNS)
    for name, precision, compiled in COLUMNS:
        if name == "resnet":
            continue
        column = [
            loss for key, loss in outcome.items() if key.startswith(name) and key.endswith(f"{precision} {compiled}")
        ]
        losses = [float(loss) for loss in column]  # none was refused
        assert losses == pytest.approx([losses[0]] * len(losses), abs=0.003)


def test_the_page_is_up_to_date(outcome: dict[str, str]) -> None:
    """What runs and what is refused; the numbers are one machine's."""
    if os.environ.get("MANTISSA_WRITE_DOCS"):
        PAGE.write_text(table(outcome), encoding="utf-8")

    def refused(text: str) -> list[list[bool]]:
        return [["refused" in cell for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]

    assert refused(PAGE.read_text(encoding="utf-8")) == refused(table(outcome))
