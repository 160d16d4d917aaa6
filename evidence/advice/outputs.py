"""What follows from the advice: tests on request, the picture, the experiment, and MLflow."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evidence.advice import cache, exhaustive, experiment, plots
from evidence.advice.checkup import quality
from evidence.advice.rounds import Bench
from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, MEASURED, Advice, Candidate, Entry
from evidence.advice.text import sentence
from trainer.config.compose import CONF
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.files import PROJECT, read_object, write_json
from trainer.hardware import Hardware
from trainer.profiling.ledger import MIB
from trainer.tracking.mlflow.store import connect, create_run, cut, tracking_uri, valid_key
from trainer.tracking.ui import run_address, server_address

if TYPE_CHECKING:
    from mlflow import MlflowClient

PICTURE, SENT = "advice.png", "mlflow.json"
RESULTS = PROJECT / "results"


class Grid(NamedTuple):
    """What ``exhaustive=true`` measures."""

    candidates: Sequence[Candidate]
    bench: Bench
    """With a log of its own."""


@dataclass
class Outputs:
    """Adds to the advice what it lacks, and writes its files; for one that is complete, nothing is done again."""

    advice: Advice
    config: Config
    """Of the user's own overrides."""
    hardware: Hardware
    folder: Path
    command: str
    """That was given."""
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    """For the user, in sentences; more are added here."""

    def test_quality(self, left_s: float) -> None:
        """Test the winner's equivalence, unless that was done."""
        if "pairs" not in self.advice.quality:
            self.advice.quality = quality(self.advice, self.folder, left_s, self.say)

    def compare_with_all(self, grid: Callable[[], Grid]) -> None:
        """Measure every combination, unless that was done, and write the outcome to ``results/``."""
        if self.advice.exhaustive:
            return
        candidates, bench = grid()
        try:
            self.advice.exhaustive = exhaustive.compare(self.advice, candidates, bench, self.folder, self.say)
        finally:
            bench.close()
        try:
            self.say(f"outcome {exhaustive.write(self.advice, self.command, RESULTS)}")
        except OSError as error:
            self.notes.append(f"results/ cannot be written ({error.strerror}); the outcome is in {self.folder}")

    def write(self) -> list[str]:
        """Write the files and send them to MLflow; return lines to print: how to take the advice, where things are."""
        said = sentence(self.advice)
        path = cache.write(self.advice, self.folder)
        written = experiment.write(self.advice, said, self.folder, CONF)
        lines = [f"  {written.command}", ""]
        if written.note:
            self.notes.append(written.note)
        picture = plots.picture(self.advice, self.folder / PICTURE)
        files = [each for each in (path, picture, written.path) if each is not None]
        lines += [str(each) for each in files]
        key = self.advice.key
        lines += (sent := record(self.advice, self.config, said, files))
        write_json(self.folder / SENT, {"key": key, "lines": lines if not sent or "in MLflow" in sent[0] else []})
        return lines

    def known(self) -> list[str]:
        """Return the lines of an earlier ``write`` of this advice; none: it has to be done, or done again."""
        found = read_object(self.folder / SENT)
        return list(found["lines"]) if found.get("key") == self.advice.key else []


EXPERIMENT = "-advice"
"""What follows the recipe's experiment in the name of the advice's: its runs have no curves to draw beside others."""
_STATUS = {MEASURED: "FINISHED", FAILED: "FAILED", HUNG: "KILLED"}
_LONGEST = 500
"""Characters of a param or a tag."""


def record(advice: Advice, config: Config, sentence: str, files: list[Path]) -> list[str]:
    """Send what MLflow lacks of the advice; nothing is sent twice, and with ``tracking=local`` nothing at all.

    Args:
        advice: to send; it is known again by its measurements, so a check-up or a comparison may be added later.
        config: of the baseline: where it is tracked.
        sentence: that says what was found.
        files: of the advice.

    Returns:
        Lines to print: the address of MLflow's page, or why there is none.
    """
    if not config.tracking.mlflow:
        return []
    uri = tracking_uri(config.tracking.uri)
    experiment = f"{config.tracking.experiment or advice.recipe}{EXPERIMENT}"
    try:
        client = connect(uri)
        parent = _parent(client, advice, uri, experiment, sentence, files)
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return [f"the advice is not in MLflow ({first_line(error)}); run the same command again to retry"]
    base = uri if uri.startswith(("http://", "https://")) else server_address()
    where = "" if base == uri else ", while python scripts/ui.py runs"
    return [f"in MLflow{where}: {run_address(base, parent.info.experiment_id, parent.info.run_id)}"]


def _parent(client: MlflowClient, advice: Advice, uri: str, experiment: str, sentence: str, files: list[Path]) -> Any:
    key, now = advice.key, time.time()
    run = create_run(client, uri, experiment, f"advice: {advice.recipe}", key, now - advice.spent_s)
    params = {
        "goal": advice.goal,
        "steps": str(advice.steps),
        "overrides": " ".join(advice.overrides),
        "baseline": advice.baseline,
        "machine": advice.machine,
        "torch": str(advice.versions.get("torch")),
        "commit": advice.git.get("commit", "unknown"),
    }
    tags = {
        "winner": advice.winner,
        "equal": ", ".join(advice.equal),
        "stopped": advice.stopped,
        "quality": str(advice.quality.get("verdict", "")),
        "mlflow.note.content": sentence,
    }
    numbers = _numbers(advice.entry(advice.winner)) | {"noise": advice.noise, "minutes": advice.spent_s / 60}
    if share := advice.exhaustive.get("share_of_the_best"):
        numbers["share_of_the_best"] = share["mean"]
    _log(client, run, params, tags, numbers)
    for file in files:
        client.log_artifact(run.info.run_id, str(file))
    tried = [entry for entry in advice.entries if entry.status != LEFT_OUT]
    for entry in tried:
        _child(client, entry, uri, experiment, f"{key}-{entry.candidate.label}", run, now)
    client.set_terminated(run.info.run_id, "FINISHED", int(now * 1000))
    return run


def _child(client: MlflowClient, entry: Entry, uri: str, experiment: str, key: str, parent: Any, now: float) -> None:
    """Send a candidate, unless it is there; what was measured of it does not change."""
    hashed = hashlib.sha256(key.encode()).hexdigest()[:32]  # labels may hold quotes, which a search could not read
    run = create_run(client, uri, experiment, entry.candidate.label, hashed, now - sum(entry.step_s))
    params = {"overrides": " ".join(entry.candidate.overrides), "threads": str(entry.candidate.threads or "default")}
    tags = {"mlflow.parentRunId": parent.info.run_id, "status": entry.status, "reason": entry.reason}
    _log(client, run, params, tags, _numbers(entry))
    if run.info.status == "RUNNING":
        client.set_terminated(run.info.run_id, _STATUS[entry.status], int(now * 1000))


def _log(
    client: MlflowClient, run: Any, params: dict[str, str], tags: dict[str, str], numbers: dict[str, float]
) -> None:
    """Log what the run does not have yet. MLflow would keep both points of a metric, and refuse another param."""
    from mlflow.entities import Metric, Param, RunTag

    now, known = int(time.time() * 1000), run.data
    client.log_batch(
        run.info.run_id,
        [Metric(valid_key(name), value, now, 0) for name, value in numbers.items() if known.metrics.get(name) != value],
        [Param(name, cut(value, _LONGEST)) for name, value in params.items() if value and name not in known.params],
        [RunTag(name, cut(value, _LONGEST)) for name, value in tags.items() if value or name in known.tags],
    )


def _numbers(entry: Entry) -> dict[str, float]:
    speed = entry.speed
    found = {
        "speed": speed.mean if speed else None,
        "speed_low": speed.low if speed else None,
        "speed_high": speed.high if speed else None,
        "run_speed": entry.run_speed.mean if entry.run_speed else None,
        "memory_mib": entry.memory_bytes and entry.memory_bytes / MIB,
        "step_time_ms": 1e3 * statistics.median(entry.step_s) if entry.step_s else None,
        "compile_s": entry.compile_s or None,
        "pays_after_steps": entry.pays_after_steps,
        "rounds": entry.rounds,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
