"""A machine that only writes what a run would have left, and a claim to run on it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from evidence.claims.reproduce import Reproduction
from tests.helpers import CPU
from trainer.files import write_json

SPEED = {"fp32": 100.0, "bf16": 250.0}
CLAIM = {
    "statement": "bf16 is twice as fast",
    "source": "a hunch",
    "setups": {"net": "recipe=bignet"},
    "arms": {"fp32": "net precision=fp32", "bf16": "net precision=bf16"},
    "criteria": [
        {"measure": "speed", "arm": "bf16", "over": "fp32", "at_least": 2.0, "published": "2x"},
        {"measure": "loss", "arm": "bf16", "over": "fp32"},
    ],
}


class Machine:
    """Runs command lines by writing what a run would have left."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.exit_codes: dict[str, int] = {}
        self.words = "it broke"
        self.git: dict[str, str] = {}
        self.now = 0.0
        self.fp32_arithmetic: dict[str, str] = {}
        """By precision, what its runs say that they computed in fp32 arithmetic."""
        self.takes: dict[str, float] = {}
        """Seconds of an arm's runs; others take ten."""

    def __call__(self, command: list[str], log: Path, limit_s: float | None = None) -> int:
        options = dict(argument.split("=", 1) for argument in command[2:])
        name = options["run_name"]
        self.started.append(name)
        takes = self.takes.get(name.rpartition("-s")[0], 10.0)
        if limit_s is not None and takes > limit_s:
            self.now += limit_s
            raise subprocess.TimeoutExpired(command, limit_s)
        self.now += takes
        folder = Path(options["output_dir"].strip("'")) / name
        code = self.exit_codes.get(name, 0)
        if code:
            log.write_text(f"error: {self.words}\n")
            if code == 3:
                folder.mkdir(parents=True)
                (folder / "metrics.jsonl").write_text('{"step": 4, "lr": 0.1}\n{"step": 7, "lr": 0.1, "loss": null}\n')
            return code
        folder.mkdir(parents=True)
        summary = {
            "status": "FINISHED",
            "units_per_s": SPEED.get(options["precision"], 50.0) * (1 + 0.01 * int(options["seed"])),
            "final": {"valid/loss": 2.0},
            "best": {"value": 2.0},
            "git": self.git,
            "skipped_steps": 0,
            "fp32_arithmetic": self.fp32_arithmetic.get(options["precision"]),
            "step": 3,
            "hardware": {"device": "cpu"},
        }
        write_json(folder / "summary.json", summary)
        return 0


def reproduction(tmp_path: Path, made_up: Machine, **options: Any) -> Reproduction:
    return Reproduction(CPU, tmp_path / "runs", [], launch=made_up, **options)
