"""The command line of scripts/gpu.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.budget import duration, in_words
from evidence.claims.reproduce import LEFT_FILE, machine_name
from evidence.claims.results import RESULTS
from evidence.programme.report import report
from evidence.programme.stages import CLAIMS, CLAIMS_FOLDER, KEPT, RATES, Stage, command, stages
from evidence.runs import in_a_process
from trainer.config.options import parse
from trainer.errors import UserError, nearest
from trainer.files import PRECISION_FILE, SUMMARY_FILE, make_folder, read_object, write_json, write_text
from trainer.hardware import Hardware, detect
from trainer.run.provenance import git_facts

DONE, FAILED, TOO_LONG, CUT = "done", "failed", "took too long", "not finished"
RECORD, PAGE, LOGS, OUTCOMES = "programme.json", "programme.md", "logs.txt", "outcomes.tar.gz"
_LEAST_S = 15.0
"""With less time than this no stage is begun."""
_LAST_LINES = 8
_START_S = 15.0
"""What reproduce.py takes until its own budget begins."""
_GRACE_S = 45.0
"""What the claims may take longer than their own budget, which they keep themselves."""
_STOP_S = 40.0
"""What a stage at its limit may take to end: longer than what it gives its own processes."""
_KEEP_EVERY_S = 20.0
"""While claims are tested, their outcomes are kept this often: the machine may end before the stage does."""


@dataclass
class ProgrammeOptions:
    """Of the command line; see scripts/gpu.py."""

    budget: str = "28min"
    only: list[str] = field(default_factory=list)
    reduced: bool = False
    device: str = "auto"
    output_dir: Path = Path("outputs/programme")


@dataclass
class Programme:
    """Runs stages one after the other; what each gives is written before the next begins."""

    folder: Path
    hardware: Hardware
    seconds: float
    """For all stages of this call."""
    launch: Callable[[list[str], Path, float], int] = lambda line, log, limit_s: in_a_process(
        line, log, limit_s, _STOP_S
    )
    """Runs a command with a log and a limit in seconds, beyond which it raises ``subprocess.TimeoutExpired``."""
    clock: Callable[[], float] = time.monotonic
    git: dict[str, str] = field(default_factory=git_facts)
    keep_every_s: float = _KEEP_EVERY_S

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    def run(self, plan: list[Stage], again: list[str]) -> dict[str, dict[str, Any]]:
        """Run the stages that are not done at this commit, or are named; return the records of all, by name.

        Args:
            plan: all stages.
            again: those to run although they are done; if there are any, only they are run.
        """
        make_folder(self.folder)
        records = {name: record for name, record in self._before().items() if name in {stage.name for stage in plan}}
        for number, stage in enumerate(plan):
            if again and stage.name not in again:
                continue
            if not again and records.get(stage.name, {}).get("status") in (DONE, FAILED, TOO_LONG):
                print(f"{stage.name}: {records[stage.name]['status']} before")
                continue
            left = self._left()
            if stage.name == CLAIMS:  # they take all the time that there is; some of it is for what follows
                rest = (each for each in plan[number + 1 :] if not again and each.name not in records)
                after = sum(each.usual_s + _START_S for each in rest)
                left -= after if left > 3 * after else 0.0
            limit = min(stage.limit_s, left)
            if limit < max(_LEAST_S, stage.usual_s):
                print(f"{stage.name}: left for the next call; it takes about {in_words(stage.usual_s)}")
                continue
            records[stage.name] = self._stage(stage, limit)
            self._keep(plan, records)
        return records

    def _left(self) -> float:
        return self._end - self.clock()

    def _before(self) -> dict[str, dict[str, Any]]:
        """Return the records of earlier calls at this commit."""
        found = read_object(self.folder / RECORD).get("stages", {})
        return {name: record for name, record in found.items() if record.get("git") == self.git}

    def _stage(self, stage: Stage, limit: float) -> dict[str, Any]:
        """Run one stage and return its record."""
        began, log = self.clock(), self.folder / f"{stage.name}.log"
        line = command(stage)
        if stage.name == CLAIMS:
            line.append(f"budget={limit - _START_S:.0f}s")
            limit += _GRACE_S
            (self.folder / CLAIMS_FOLDER / LEFT_FILE).unlink(missing_ok=True)
        elif stage.run:
            shutil.rmtree(self.folder / "runs" / stage.name, ignore_errors=True)
        print(f"{stage.name}: {stage.about} (at most {in_words(limit)})")
        try:
            with _repeated(self._keep_outcomes, self.keep_every_s) if stage.name == CLAIMS else nullcontext():
                code = self.launch(line, log, limit)
            status = DONE if code == 0 else FAILED
        except subprocess.TimeoutExpired:
            code, status = -1, TOO_LONG if limit >= stage.limit_s else CUT
        if stage.name == CLAIMS and code >= 0 and read_object(self.folder / CLAIMS_FOLDER / LEFT_FILE):
            status = CUT
        record: dict[str, Any] = {
            "status": status,
            "exit_code": code,
            "seconds": round(self.clock() - began, 1),
            "command": line,
            "git": self.git,
            "last_lines": _last_lines(log),
        }
        if stage.run:
            run = self.folder / "runs" / stage.name
            record["summary"] = read_object(run / SUMMARY_FILE)
            record["precision"] = read_object(run / PRECISION_FILE).get("effective")  # with the attention that ran
        print(f"{stage.name}: {status}, {in_words(record['seconds'])}")
        return record

    def _keep(self, plan: list[Stage], records: dict[str, dict[str, Any]]) -> None:
        """Write what is worth keeping: few files, also to the folder that the variable OUT names."""
        machine = machine_name(self.hardware)
        before = read_object(self.folder / RECORD)  # perhaps of a call on another machine of the same name
        kept = before.get("rates", {}) if before.get("machine") == machine and RATES in records else {}
        rates = read_object(self.folder / "rates.json") or kept
        write_json(self.folder / RECORD, {"machine": machine, "rates": rates, "stages": records})
        write_text(self.folder / PAGE, report(machine, rates, plan, records, RESULTS / machine))
        logs = (self.folder / f"{stage.name}.log" for stage in plan)
        texts = [
            f"===== {log.stem}\n{log.read_text(encoding='utf-8', errors='replace')}" for log in logs if log.exists()
        ]
        write_text(self.folder / LOGS, "\n".join(texts))
        for name, (source, target) in KEPT.items():
            path = self.folder / "runs" / name / source
            if path.exists():
                shutil.copyfile(path, self.folder / target)
        self._copy_out(RECORD, PAGE, LOGS, "bench.json", *(target for _, target in KEPT.values()))
        self._keep_outcomes()

    def _keep_outcomes(self) -> None:
        """Pack this machine's outcomes of claims."""
        machine = machine_name(self.hardware)
        if (RESULTS / machine).is_dir():
            packed = self.folder / f".{OUTCOMES}"  # the last whole one stays until there is another
            with tarfile.open(packed, "w:gz") as archive:
                for path in sorted((RESULTS / machine).rglob("*.json")):
                    archive.add(path, Path(machine) / path.relative_to(RESULTS / machine))
            packed.replace(self.folder / OUTCOMES)
            self._copy_out(OUTCOMES)

    def _copy_out(self, *names: str) -> None:
        if out := os.environ.get("OUT"):
            for name in names:
                if (self.folder / name).exists():
                    Path(shutil.copyfile(self.folder / name, Path(out) / f".{name}")).replace(Path(out) / name)


def main(arguments: list[str]) -> int:
    """Run the programme and print its report; the exit code is 1 where a stage failed.

    Raises:
        UserError: an unknown option or stage, or no such device.
    """
    options, given = parse(arguments, ProgrammeOptions, "overrides")
    seconds = duration(options.budget)
    if others := [override for override in given if not override.startswith("data.path=")]:
        raise UserError(f"{others[0]} is not an option; data.path=… of a claim is the only override")
    folder = options.output_dir.absolute() / ("reduced" if options.reduced else "")
    plan = stages(folder, options.device, options.reduced, given)
    known = [stage.name for stage in plan]
    if unknown := [name for name in options.only if name not in known]:
        raise UserError(f"only={unknown[0]} is not a stage{nearest(unknown[0], known)} ({', '.join(known)})")
    if (out := os.environ.get("OUT")) and not Path(out).is_dir():
        raise UserError(f"OUT={out} is not a folder; create it, or unset OUT")
    hardware = detect(options.device)
    if not (hardware.is_gpu or options.reduced):
        raise UserError("there is no CUDA GPU here; set reduced=true to rehearse on a CPU")
    programme = Programme(folder, hardware, seconds)
    records = programme.run(plan, options.only)
    print("\n" + (folder / PAGE).read_text(encoding="utf-8") if (folder / PAGE).exists() else "nothing was run")
    return int(any(record["status"] in (FAILED, TOO_LONG) for record in records.values()))


@contextmanager
def _repeated(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something in a thread every so many seconds, until the context ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            with suppress(OSError):  # such as a full disk; the next time may succeed
                action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [line for line in lines if line.strip()][-_LAST_LINES:]
