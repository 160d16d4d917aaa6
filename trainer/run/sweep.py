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

from mantissa.display import columns, loss, quantity, size
from trainer.config.compose import CONF, combinations, compose
from trainer.config.options import unquoted
from trainer.config.schema import Config
from trainer.errors import RunError
from trainer.hardware import detect
from trainer.parallel.world import World, launched_processes
from trainer.run.earlier import same_run, state_of
from trainer.run.resume import SAME

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
    keys = (override.get_key_element().lstrip("+") for override in parsed if override.is_sweep_override())
    return list(dict.fromkeys(keys))


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


def name_of(config: Config, values: dict[str, str]) -> str:
    """Return a run's name that tells it from the others of its sweep, the same whenever the sweep is begun again.

    Args:
        config: of the run, as composed.
        values: what is swept, see ``swept_values``; a choice of a config group stands without its group.
    """
    base, known = (config.name, _IN_EVERY_NAME) if config.run_name is None else (config.run_name, ())
    last = [key.rpartition(".")[2] for key in values]
    parts = [base]
    for key, value in values.items():
        if key in (*known, "run_name"):
            continue
        short = key.rpartition(".")[2]
        label = key if last.count(short) > 1 else short
        plain = re.sub(r"[^\w.+-]+", "_", value.replace("'", "").replace('"', "")).strip("_")
        parts.append(plain if (CONF / key).is_dir() else f"{label}_{plain}")
    name = "-".join(parts)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{zlib.crc32(name.encode()):08x}"


def _overrides(arguments: Sequence[str]) -> list[str]:
    """Return those of the training; if a key is given twice, the last one counts."""
    typed = [each for each in arguments if not each.startswith(("-", "hydra"))]
    return list({each.lstrip("+").partition("=")[0]: each for each in typed}.values())


@dataclass
class _Row:
    name: str
    values: dict[str, str]
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty for a run that did not finish."""
    ended: str = "failed"
    """How, where there is no summary."""

    @property
    def score(self) -> tuple[bool, float]:
        best, sign = self.summary.get("best"), -1 if self.summary.get("best_is") == "highest" else 1
        return best is None, sign * best["value"] if best else 0.0


@dataclass
class Sweep:
    """The runs of one command, as they begin and end."""

    keys: list[str]
    """What is swept, see ``swept_keys``."""
    jobs: Path | None = None
    """See ``jobs_folder``; from ``scratch`` on, the folder in it that is this sweep's own."""
    rows: list[_Row] = field(default_factory=list)
    stopped: bool = False
    """Whether a signal ended the sweep."""

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

    def named(self, config: Config, overrides: Sequence[str]) -> Config:
        """Return the config as the sweep trains it: with a name of its own, and continuing an earlier run.

        A sweep of ``run_name`` names its runs itself.
        """
        values = swept_values(self.keys, overrides)
        if values and "run_name" not in values:
            config = replace(config, run_name=name_of(config, values))
        return replace(config, resume=SAME) if self.keys and config.resume is None else config

    def begin(self, config: Config, overrides: Sequence[str]) -> Config:
        """Note that a run begins, and return its config: see ``named``."""
        config = self.named(config, overrides)
        self.rows.append(_Row(config.name, swept_values(self.keys, overrides)))
        return config

    def end(self, summary: dict[str, Any]) -> None:
        """Record the result of the run."""
        self.rows[-1].summary = summary

    def stop(self) -> None:
        """Record that a signal stopped the run, and the sweep with it."""
        self.stopped = True
        if self.rows:
            self.rows[-1].ended = "stopped"

    def leave(self, number: int, code: int) -> None:
        """Write down how this job ended, where it is not in the process that began the sweep.

        Args:
            number: of the job, from 0.
            code: exit code.
        """
        if self.jobs is not None and self.rows:
            content = {"row": asdict(self.rows[-1]), "code": code, "stopped": self.stopped}
            (self.jobs / f"{number}.json").write_text(json.dumps(content))

    def collect(self, arguments: Sequence[str]) -> list[int]:
        """Take over what the jobs of this command line left, and return their exit codes; 1 for one that left nothing.

        Empty where the runs were in this process.
        """
        if self.jobs is None:
            return []
        left = {int(path.stem): json.loads(path.read_text()) for path in self.jobs.glob("*.json")}
        try:
            runs = list(combinations(_overrides(arguments)).values())
        except HydraException:  # as in ``outlook``
            runs = [[]] * len(left)
        codes = []
        for number, overrides in enumerate(runs):
            values = swept_values(self.keys, overrides)
            found = left.get(number, {"row": {"name": " ".join(values.values()), "values": values}, "code": 1})
            self.rows.append(_Row(**found["row"]))
            self.stopped = self.stopped or found.get("stopped", False)
            codes.append(found["code"])
        return codes

    def outlook(self, arguments: Sequence[str]) -> str:
        """Return what is left to do of this command line, such as ``3 of 4 runs are complete, 1 to run``.

        Empty without a sweep, and where there is no earlier run.
        """
        if not self.keys:
            return ""
        try:
            runs = combinations(_overrides(arguments))
        except HydraException:  # glob(…) needs Hydra's own search for choices
            return ""
        states: Counter[str | None] = Counter()
        for overrides in runs.values():
            folder, state = self._earlier(overrides)
            if not folder.is_dir() and "output_dir" not in self.keys:
                return ""
            states[state] += 1
        if set(states) == {None}:
            return ""
        left = states["interrupted"] + states[None]
        said = f"{states['complete']} of {states.total()} runs are complete"
        if states["not finite"]:
            said += f", {states['not finite']} turned non-finite"
        return f"{said}, {left} to run" + (
            f" ({states['interrupted']} of them resumed)" if states["interrupted"] else ""
        )

    def _earlier(self, overrides: list[str]) -> tuple[Path, str | None]:
        """Return where the run with these options goes, and the state of the earlier one there; None: there is none."""
        folder = Path()
        try:
            config = self.named(compose(overrides), overrides)
            folder = Path(config.output_dir).expanduser()
            world = World()
            world.size = max(1, launched_processes())
            found = same_run(config, config.resolve(detect(config.device), world))
        except RunError:  # it is reported when it is the run's turn
            return folder, None
        return folder, state_of(found) if found else None

    def table(self) -> str:
        """Return the runs by their best score, the best first, those without one last; empty for fewer than two."""
        if len(self.rows) < 2:
            return ""
        headings = ["run", *self.keys, "best", "at step", "final", "throughput", "peak memory", "status"]
        return columns([headings, *(self._cells(row) for row in sorted(self.rows, key=lambda row: row.score))])

    def _cells(self, row: _Row) -> list[str]:
        summary = row.summary
        best, final, speed = summary.get("best"), summary.get("final") or {}, summary.get("units_per_s")
        memory = summary.get("peak_memory_bytes")
        wide = " (fp32 arithmetic)" if summary.get("fp32_arithmetic") else ""
        return [
            summary.get("run", row.name),
            *(row.values.get(key, "") for key in self.keys),
            loss(best["value"]) if best else "",
            f"{best['step']:.0f}" if best else "",
            loss(final["valid/loss"]) if "valid/loss" in final else "",
            f"{quantity(speed)} {summary['unit']}/s{wide}" if speed else "",
            size(memory) if memory else "",
            str(summary.get("status", row.ended)).lower(),
        ]
