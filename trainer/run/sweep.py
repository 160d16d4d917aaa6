"""Several runs from one command (``train.py -m``): their names, and the table at their end."""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from mantissa.display import columns, loss, quantity, size
from trainer.config.compose import CONF, combinations, compose
from trainer.config.options import unquoted
from trainer.config.source import name_of_composed
from trainer.errors import RunError
from trainer.hardware import detect
from trainer.parallel.world import World, launched_processes
from trainer.run.resume import SAME, same_run, state_of

_IN_EVERY_NAME = ("recipe", "precision", "seed")
_LONGEST = 150
"""Characters of a name; file systems take 255 bytes, and a folder that exists gets a number."""


def swept_keys(arguments: Sequence[str]) -> list[str]:
    """Return the keys with several values on this command line, in its order; none without ``-m``.

    Raises:
        HydraException: an argument is no override.
    """
    if not {"-m", "--multirun"} & set(arguments):
        return []
    parsed = OverridesParser.create().parse_overrides([each for each in arguments if not each.startswith("-")])
    return list(dict.fromkeys(each.get_key_element().lstrip("+") for each in parsed if each.is_sweep_override()))


def jobs_folder(arguments: Sequence[str]) -> Path | None:
    """Return where a sweep keeps what its jobs write, where Hydra's launcher starts them on other machines.

    None: the runs are in this process.
    """
    typed = dict(each.partition("=")[::2] for each in arguments)
    if typed.get("hydra/launcher", "basic") == "basic":
        return None
    return Path(unquoted(typed.get("output_dir", "outputs"))).expanduser().absolute() / ".jobs"


def swept_values(keys: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """Return the values that one run of the sweep has, by key."""
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    return {key: typed[key] for key in keys if key in typed}


def name_of(name: str, values: dict[str, str], typed: bool = False) -> str:
    """Return a run's name that tells it from the others of its sweep, the same whenever the sweep is begun again.

    Args:
        name: that it has without a sweep.
        values: what is swept, see ``swept_values``; a choice of a config group stands without its group.
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


@dataclass
class Row:
    """A run of a sweep, and how it ended."""

    name: str
    values: dict[str, str]
    code: int = 1
    """Its exit code."""
    status: str = "failed"
    """Where there is no summary."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty for a run that did not finish."""

    @property
    def score(self) -> tuple[bool, float]:
        """What rows are sorted by."""
        best, sign = self.summary.get("best"), -1 if self.summary.get("best_is") == "highest" else 1
        return best is None, sign * best["value"] if best else 0.0

    def cells(self) -> list[str]:
        """Return the cells of the table that follow what is swept."""
        summary = self.summary
        best, final, speed = summary.get("best"), summary.get("final") or {}, summary.get("units_per_s")
        memory = summary.get("peak_memory_bytes")
        wide = " (fp32 arithmetic)" if summary.get("fp32_arithmetic") else ""
        return [
            loss(best["value"]) if best else "",
            f"{best['step']:.0f}" if best else "",
            loss(final["valid/loss"]) if "valid/loss" in final else "",
            f"{quantity(speed)} {summary['unit']}/s{wide}" if speed else "",
            size(memory) if memory else "",
            str(summary.get("status", self.status)).lower(),
        ]


@dataclass
class Sweep:
    """The runs of one command, as they begin and end."""

    keys: list[str]
    """What is swept, see ``swept_keys``."""
    jobs: Path | None = None
    """See ``jobs_folder``; from ``scratch`` on, the folder in it that is this sweep's own."""
    rows: list[Row] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the sweep."""
        return any(row.status == "stopped" for row in self.rows)

    @contextmanager
    def scratch(self) -> Iterator[str]:
        """Make the folder for what Hydra and its launcher write, and remove it; that of jobs stays, for their logs."""
        if self.jobs is None:
            with tempfile.TemporaryDirectory(prefix="mantissa-") as path:
                yield path
            return
        self.jobs.mkdir(parents=True, exist_ok=True)
        self.jobs = Path(tempfile.mkdtemp(prefix="sweep-", dir=self.jobs))
        yield str(self.jobs)

    def begin(self, composed: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Note that a run begins; give its config a name of its own, and let it continue an earlier run.

        Args:
            composed: of the run; changed in place.
            overrides: of the run.
        """
        values = swept_values(self.keys, overrides)
        self.rows.append(Row(" ".join(values.values()), values))
        if self.keys:
            name = name_of(name_of_composed(composed), values, composed.run_name is not None)
            self.rows[-1].name = composed.run_name = name
            composed.resume = composed.resume or SAME
        return composed

    def end(self, number: int, code: int, stopped: bool, summary: dict[str, Any]) -> None:
        """Record how the run ended, in a file where it is not in the process that began the sweep.

        Args:
            number: of the job, from 0.
            code: exit code.
            stopped: whether a signal ended it.
            summary: of a run that finished.
        """
        row = self.rows[-1]
        row.code, row.status, row.summary = code, "stopped" if stopped else "failed", summary
        if self.jobs is not None:
            (self.jobs / f"{number}.json").write_text(json.dumps(asdict(row)))

    def collect(self, arguments: Sequence[str]) -> None:
        """Take over what the jobs of this command line left on other machines; a job that left nothing has failed."""
        if self.jobs is None:
            return
        left = {int(path.stem): Row(**json.loads(path.read_text())) for path in self.jobs.glob("*.json")}
        for number, overrides in enumerate(_runs(arguments) or [[]] * len(left)):
            values = swept_values(self.keys, overrides)
            self.rows.append(left.get(number, Row(" ".join(values.values()), values)))

    def outlook(self, arguments: Sequence[str]) -> str:
        """Return what is left to do of this command line, such as ``3 of 4 runs are complete, 1 to run``.

        Empty without a sweep, and where there is no earlier run.
        """
        runs = _runs(arguments) if self.keys else []
        folders = {unquoted(swept_values(["output_dir"], each).get("output_dir", "outputs")) for each in runs}
        if not any(Path(folder).expanduser().is_dir() for folder in folders):
            return ""
        states = Counter(map(self._state, runs))
        if set(states) <= {None}:
            return ""
        left, resumed = states["interrupted"] + states[None], states["interrupted"]
        said = f"{states['complete']} of {states.total()} runs are complete"
        said += f", {states['not finite']} turned non-finite" if states["not finite"] else ""
        return f"{said}, {left} to run" + (f" ({resumed} of them resumed)" if resumed else "")

    def _state(self, overrides: list[str]) -> str | None:
        """Return the state of the earlier run with these options; None: there is none."""
        try:
            config = compose(overrides)
            name = name_of(config.name, swept_values(self.keys, overrides), config.run_name is not None)
            config = replace(config, run_name=name, resume=config.resume or SAME)
            world = World()
            world.size = max(1, launched_processes())
            found = same_run(config, config.resolve(detect(config.device), world))
        except RunError:  # it is reported when it is the run's turn
            return None
        return state_of(found) if found else None

    def table(self) -> str:
        """Return the runs by their best score, the best first, those without one last; empty for fewer than two."""
        if len(self.rows) < 2:
            return ""
        rows = [["run", *self.keys, "best", "at step", "final", "throughput", "peak memory", "status"]]
        for row in sorted(self.rows, key=lambda row: row.score):
            swept = [row.values.get(key, "") for key in self.keys]
            rows.append([row.summary.get("run", row.name), *swept, *row.cells()])
        return columns(rows)


def _runs(arguments: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep; none where glob(…) needs Hydra's own search for choices."""
    typed = [each for each in arguments if not each.startswith(("-", "hydra"))]
    last = {each.lstrip("+").partition("=")[0]: each for each in typed}  # of a key that is given twice
    try:
        return list(combinations(list(last.values())).values())
    except HydraException:
        return []
