"""The runs of one command line, which Hydra starts: a single one, or with ``-m`` several, with names and a table."""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mantissa.display import columns, loss, quantity, size
from trainer.config.command_line import CommandLine
from trainer.config.compose import prepare
from trainer.config.registration import CONF, by_key, name_of_composed, precision_of
from trainer.errors import RunError, UserError
from trainer.files import SAME
from trainer.terminal import WIDTH
from trainer.tracking.store import GROUP_TAG, SWEPT_TAG, cut

_IN_EVERY_NAME = ("recipe", "precision", "seed")
_LONGEST = 150
"""Characters of a name; file systems take 255 bytes, and a folder that exists gets a number."""


def _results(summaries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return scores, throughput and memory by column; of several runs ``2.5 ± 0.1``, with the sample deviation."""

    def shown(values: Sequence[float | None], text: Callable[[float], str]) -> str:
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return ""
        deviation = [statistics.stdev(known)] if len(known) > 1 else []
        return " ± ".join(map(text, [statistics.fmean(known), *deviation]))

    from trainer.precision.kernels import in_short  # it imports torch

    best = [each.get("best") or {} for each in summaries]
    rate = shown([each.get("units_per_s") for each in summaries], quantity)
    return {
        "best": shown([each.get("value") for each in best], loss),
        "step": f"{best[0]['step']:.0f}" if best[0] and len(best) == 1 else "",
        "final": shown([(each.get("final") or {}).get("valid/loss") for each in summaries], loss),
        "throughput": rate and f"{rate} {summaries[0]['unit']}/s{in_short(summaries[0].get('not_timed'))}",
        "memory": shown([each.get("peak_memory_bytes") for each in summaries], size),
    }


def name_of(name: str, values: dict[str, str], typed: bool = False) -> str:
    """Return a run's name that tells it from the others of its sweep, the same whenever the sweep is begun again.

    Args:
        name: that it has without a sweep.
        values: what is swept, by key; a choice of a config group stands without its group.
        typed: whether the name is the user's, so that nothing of what is swept is in it. A sweep of ``run_name`` names
            its runs itself.
    """
    if "run_name" in values:
        return name
    last = [key.rpartition(".")[2] for key in values]
    parts = [name]
    for key, value in values.items():
        if not typed and key in _IN_EVERY_NAME:
            continue
        short = key.rpartition(".")[2]
        label = key if last.count(short) > 1 else short
        plain = re.sub(r"[^\w.+-]+", "_", value.replace("'", "").replace('"', "")).strip("_")
        parts.append(plain if (CONF / key).is_dir() else f"{label}_{plain}")
    name = "-".join(parts)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{zlib.crc32(name.encode()):08x}"


class Row(NamedTuple):
    """A run of a sweep, and how it ended."""

    name: str
    values: dict[str, str]
    """What is swept, by key."""
    code: int
    """Exit code of this attempt."""
    summary: dict[str, Any]
    """Content of summary.json; empty for a run that did not finish."""
    ends_all: bool = False
    """Whether no other run may begin."""

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.code > 128

    @property
    def score(self) -> tuple[bool, float]:
        """What rows are sorted by."""
        summary = self.summary
        best, sign = summary.get("best"), -1 if summary.get("best_is") == "highest" else 1
        return best is None, sign * best["value"] if best else 0.0

    def cells(self) -> dict[str, str]:
        """Return the row of the table, by column: what is swept, and the results."""
        status = self.summary.get("status", "stopped" if self.stopped else "failed").lower()
        return (self.values or {"run": self.name}) | _results([self.summary]) | {"status": status}


TrainOne = Callable[[DictConfig, list[str], Mapping[str, Any], bool], tuple[int, dict[str, Any], bool]]
"""Trains a run from what Hydra composed, its overrides, and what it was composed on, see ``compose.prepare``, and
shows all of it or a line; returns ``code``, ``summary`` and ``ends_all`` of its row."""


class Sweep:
    """The runs of one command line, which may be a single one; Hydra begins them."""

    def __init__(self, line: CommandLine) -> None:
        self.line = line
        self.keys = line.swept_keys
        """What is swept."""
        self.rows: list[Row] = []
        """The runs of this process."""
        self.jobs: Path | None = None
        """Where jobs on other machines, which Hydra's launcher starts, leave what they print."""

    def run(self, train_one: TrainOne) -> None:
        """Let Hydra call ``train_one`` for every run.

        After a failed run, a sweep continues with the next one.

        Raises:
            HydraException: the command line cannot be composed.
            UserError: it resumes a run that cannot be resumed.
            Exception: whatever the launcher of jobs elsewhere raises, such as the error of a job.
        """
        composition = prepare(self.line)
        sys.argv[1:] = composition.arguments  # which Hydra reads

        @hydra.main(version_base="1.3", config_path=str(CONF), config_name=composition.name)
        def task(composed: DictConfig) -> None:
            if self.rows:
                if self.rows[-1].ends_all:
                    return
                from trainer.run.fit import release_memory

                release_memory()
            if swept := OmegaConf.select(HydraConfig.get(), "sweeper.params"):
                typed = " ".join(f"{key}={value}" for key, value in swept.items())
                raise UserError(f"hydra.sweeper.params is a sweep in a YAML file; remove it there, and type -m {typed}")
            # As given: Hydra would resolve ${…} in them against its own keys.
            given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            overrides = cast("list[str]", given)
            own, values = self.set_name(composed, overrides)
            brief = bool(self.keys) and self.jobs is None
            self.rows.append(Row(own, values, *train_one(composed, overrides, composition.recorded, brief)))
            if self.jobs is not None and (code := self.rows[-1].code):
                raise RunError(f"{own} ended with exit code {code}")

        with self._scratch() as scratch:
            os.environ["MANTISSA_SCRATCH"] = scratch  # for what Hydra writes about a sweep; see conf/config.yaml
            task()

    @contextmanager
    def _scratch(self) -> Iterator[str]:
        """Make the folder for what Hydra and its launcher write, and remove it; that of jobs stays, for their logs."""
        if self.line.value("hydra/launcher", "basic") == "basic":
            with tempfile.TemporaryDirectory(prefix="mantissa-") as path:
                yield path
            return
        folder = Path(str(self.line.value("output_dir", "outputs"))).expanduser().absolute() / ".jobs"
        folder.mkdir(parents=True, exist_ok=True)
        self.jobs = Path(tempfile.mkdtemp(prefix="sweep-", dir=folder))
        try:
            yield str(self.jobs)
        finally:
            with suppress(OSError):  # what is not empty stays: no job was begun in the others
                for empty in (self.jobs, folder, folder.parent):
                    empty.rmdir()

    def set_name(self, composed: DictConfig, overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Give a run of a sweep a name of its own and the sweep's tag ``group``, and let it continue an earlier run.

        Args:
            composed: of the run; changed in place.
            overrides: of the run.

        Returns:
            The name, and the swept values, by key.
        """
        typed = by_key(overrides)
        values = {key: typed[key] for key in self.keys if key in typed}
        if values.get("precision") == "auto":
            values["precision"], _ = precision_of(composed)
        if self.keys:
            composed.run_name = name_of(name_of_composed(composed), values, composed.run_name is not None)
            composed.resume = composed.resume or SAME
            if GROUP_TAG not in composed.tags:
                group = self.line.value("run_name") or "-".join(["sweep", *self.keys])
                OmegaConf.update(composed, f"tags.{GROUP_TAG}", str(group), force_add=True)
            OmegaConf.update(composed, f"tags.{SWEPT_TAG}", " ".join(self.keys), force_add=True)
        return str(composed.run_name), values

    def table(self) -> str:
        """Return the runs by their best score, the best first, those without one last; empty for fewer than two.

        Where seeds are swept, their means follow. Results that are the same in all runs are left out. A run that the
        command line names twice counts once.
        """
        if len(self._distinct) < 2:
            return ""
        ranked = sorted(self._distinct, key=lambda row: row.score)
        rows = [row.cells() for row in ranked] + (self._over_seeds() if "seed" in self.keys else [])
        table = {key: [key.rpartition(".")[2], *(row.get(key, "") for row in rows)] for key in rows[0]}
        swept = [table.pop(key) for key in self.rows[0].values or ("run",)]
        best = table["best"]
        values = {key: {*column[1:]} - {""} for key, column in table.items() if column[1:] != best[1:]}
        told = [best, *(table[key] for key, own in values.items() if len(own) > 1 or own & {"failed", "stopped"})]
        room = (WIDTH - sum(2 + max(map(len, column)) for column in told)) // len(swept) - 2
        short = [[cut(text, max(8, room)) for text in column] for column in swept]
        lines = columns([*zip(*short, *told, strict=True)])
        return f"{lines}\n\nbest: {ranked[0].summary['run']}" if ranked[0].summary else lines

    @property
    def _distinct(self) -> list[Row]:
        """The runs by their folder, those that have none by their place."""
        return list({row.summary.get("run", place): row for place, row in enumerate(self.rows)}.values())

    def _over_seeds(self) -> list[dict[str, str]]:
        """Return a row for each combination of what is swept but seeds: mean ± sample standard deviation of its runs.

        Only of finished runs, and where there are at least two.
        """
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self._distinct:
            if row.summary.get("status") == "FINISHED":
                alike.setdefault(tuple((row.values | {"seed": ""}).values()), []).append(row)
        found = [rows for rows in alike.values() if len(rows) > 1]
        found.sort(key=lambda rows: statistics.fmean(row.score[1] for row in rows))
        return [
            rows[0].values | {"seed": f"mean of {len(rows)}"} | _results([row.summary for row in rows])
            for rows in found
        ]
