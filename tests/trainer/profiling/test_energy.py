from __future__ import annotations

from pathlib import Path

from tests.helpers import compose
from trainer.run.run import Run
from trainer.run.start import train

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "profiler=none", "tracking=local")


class Metered(Run):
    """The first step, which compiles, takes 50 J, each other one 1 J."""

    def log(self, *arguments: object) -> None:
        self.energy._read = lambda: 50_000 + 1_000 * (self.trainer.step - 1)  # type: ignore[method-assign]
        super().log(*arguments)  # type: ignore[arg-type]


def test_the_energy_and_its_units_are_those_after_the_first_window(tmp_path: Path) -> None:
    steps = ("steps=8", "log_every=4", "eval_every=8", "checkpoint=none", "device=cpu", f"output_dir={tmp_path}")
    summary = train(compose(*BIGNET, *steps), run_class=Metered)
    assert (summary["energy_j"], summary["energy_units"], summary["units"]) == (7.0, 7 * 4, 8 * 4)
