"""What follows from an advice: its check-up, tests on request, the picture, the experiment, and MLflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from evidence.advice import cache, exhaustive, experiment, mlflow, plots
from evidence.advice.checkup import check, first_without_fault, quality
from evidence.advice.rounds import Bench
from evidence.advice.schema import MEASURED, Advice, Candidate, Entry
from evidence.advice.text import sentence
from trainer.config.compose import CONF
from trainer.config.schema import Config
from trainer.files import PROJECT, read_object, write_json
from trainer.hardware import Hardware

PICTURE, SENT = "advice.png", "mlflow.json"
RESULTS = PROJECT / "results"


class Grid(NamedTuple):
    """What ``exhaustive=true`` measures."""

    candidates: Sequence[Candidate]
    bench: Bench
    """With a log of its own."""
    steps: int
    """Of the user's run."""


@dataclass
class Outputs:
    """Adds to an advice what it lacks, and writes its files; for one that is complete, nothing is done again."""

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

    def check_up(self) -> None:
        """Let the doctor examine the winner; one with a fault is not advised, and the next best is examined."""
        if self.advice.health or self.advice.winner == self.advice.baseline:
            return

        def health(entry: Entry) -> dict[str, object]:
            if entry.candidate.label == self.advice.baseline:
                return {"faults": [], "notes": [], "healthy": False}
            self.say(f"check-up by the doctor: {entry.candidate.label}")
            return check(experiment.overrides_of(self.advice, entry.candidate), self.hardware, self.folder)

        chosen, found, rejected = first_without_fault(self._ranked(), health)
        for label, faults in rejected.items():
            self.notes.append(f"{label} is not advised, because the doctor found a fault in it: {'; '.join(faults)}")
        if not found["healthy"] and found["notes"]:
            self.notes.append(f"numerics of {chosen.candidate.label}: {'; '.join(found['notes'])}")
        if chosen.candidate.label != self.advice.winner:
            self.advice.winner = chosen.candidate.label
            self.advice.equal = []
            self.advice.entries.sort(key=lambda entry: entry is not chosen)  # stable
            self.advice.quality, self.advice.exhaustive = {}, {}
        self.advice.health = found | {"rejected": rejected}

    def test_quality(self, left_s: float) -> None:
        """Test the winner's equivalence, unless that was done."""
        if "pairs" not in self.advice.quality:
            self.advice.quality = quality(self.advice, self.folder, left_s, self.say)

    def compare_with_all(self, grid: Callable[[], Grid]) -> None:
        """Measure every combination, unless that was done, and write the outcome to ``results/``."""
        if self.advice.exhaustive:
            return
        candidates, bench, steps = grid()
        try:
            self.advice.exhaustive = exhaustive.compare(self.advice, candidates, bench, self.folder, steps, self.say)
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
        key = mlflow.key_of(self.advice)
        lines += (sent := mlflow.record(self.advice, self.config, said, files))
        write_json(self.folder / SENT, {"key": key, "lines": lines if not sent or "in MLflow" in sent[0] else []})
        return lines

    def known(self) -> list[str]:
        """Return the lines of an earlier ``write`` of this advice; none: it has to be done, or done again."""
        found = read_object(self.folder / SENT)
        return list(found["lines"]) if found.get("key") == mlflow.key_of(self.advice) else []

    def _ranked(self) -> list[Entry]:
        """Return the winner, the entries that are better than the baseline, and the baseline."""
        base = self.advice.entry(self.advice.baseline)
        found = [self.advice.entry(self.advice.winner)]
        for entry in self.advice.entries:
            if entry in (*found, base) or entry.status != MEASURED or entry.speed is None:
                continue
            smaller = (entry.memory_bytes or 0) < (base.memory_bytes or 0)
            if smaller if self.advice.goal == "memory" else entry.speed.low > 1:
                found.append(entry)
        return [*found, base]
