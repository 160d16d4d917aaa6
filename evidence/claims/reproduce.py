"""Tests published claims: from a claim's file to a record with the verdict, what was measured, and why."""

from __future__ import annotations

import datetime
import errno
import getpass
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Collection, Container, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evidence.claims.claims import Claim, load
from evidence.claims.criteria import NOT_HERE, RELATED, Finding
from evidence.claims.reasons import reasons
from evidence.measures import MEASURES, TIMED, measured
from evidence.runs import DIVERGED, Arm, Launch, Outcome, Runner
from trainer.config.compose import key_of
from trainer.errors import UserError, redacted
from trainer.files import PROJECT, make_folder
from trainer.hardware import Hardware
from trainer.run.provenance import git_facts, versions

OUTCOMES = "claims.jsonl"
"""Of a machine: every outcome of a claim, one a line, the newest last."""
_PATH = re.compile(r"(?<![\w.~/])(?:/[^\s/'\":,;]+){2,}")
ORDER = PROJECT / "evidence" / "claims" / "order.yaml"


@dataclass
class Reproduction:
    """Tests claims on this machine; runs of the same file, commit and machine are kept."""

    hardware: Hardware
    folder: Path
    """For the runs."""
    given: list[str]
    """Overrides that claims leave to the user."""
    _: KW_ONLY
    reduced: bool = False
    """Make every run small; there is no verdict then."""
    launch: Launch | None = None
    """See ``Runner``."""
    until: float | None = None
    """See ``Runner``."""
    git: dict[str, str] = field(init=False, default_factory=git_facts)
    done: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    """The record of each claim that is tested, by its id."""

    def test(self, name: str) -> dict[str, Any]:
        """Test one claim, once, and return its record in plain JSON types.

        Raises:
            UserError: no such claim, or a mistake in its file.
            OutOfTime: there is no time left; the runs that are done are kept.
        """
        if name not in self.done:
            claim = load(name)
            if self.reduced:
                claim.reduce()
            if missing := claim.lacking(self.hardware, self.given):
                self.done[name] = self._record(claim, NOT_HERE, needs=missing)
            else:
                self.done[name] = self._tested(claim)
        return self.done[name]

    def _tested(self, claim: Claim) -> dict[str, Any]:
        names = list(claim.arms) if self.reduced else claim.to_run(self.hardware)
        timed = any(criterion.measure in TIMED for criterion in claim.criteria) and not self.reduced
        not_timed = claim.not_timed(self.hardware) if timed else {}
        not_run: dict[str, Any] = {"left_out": claim.arms_lack(self.hardware)}
        not_run |= {"not_timed": not_timed} if not_timed else {}
        if not names:
            return self._record(claim, NOT_HERE, **not_run)
        ledger = not self.hardware.is_gpu and any(criterion.measure == "memory" for criterion in claim.criteria)
        arms = claim.runs(names, self.given, self.hardware.device.type, ledger)
        seeds = list(range(claim.repeats))
        runner = Runner(self.folder / self._key(claim), launch=self.launch, until=self.until)
        print(f"\n{claim.id}: {claim.statement}\n{len(arms)} arms × {len(seeds)}, alternating; {runner.runs}")
        outcomes = runner.run_all(arms, seeds)
        verdict, findings = claim.judge(outcomes, self.hardware)
        commits = [run.summary["git"] for run in outcomes if run.summary.get("git")]
        return self._record(
            claim,
            verdict,
            # Also where a run was of another commit, pulled in the meantime.
            git=self.git | ({"dirty": "true"} if any(git != self.git for git in commits) else {}),
            findings=[plain(finding) | {"why": self._public(finding.why)} for finding in findings],
            why=reasons(findings, arms, outcomes),
            arms={arm.label: _arm(arm, claim, outcomes) for arm in arms},
            **not_run,
            **({"related": claim.only_related(self.hardware)} if verdict == RELATED else {}),
            failures=[
                self._public(f"{run.arm}, seed {run.seed}: {run.reason}")
                for run in outcomes
                if run.exit_code not in (0, DIVERGED)
            ],
        )

    def _public(self, text: str) -> str:
        """Remove the user's own values, and this machine's paths and names, from a message."""
        private = {override.partition("=")[2].strip("'\""): "…" for override in self.given}
        private |= {str(self.folder): "outputs", str(PROJECT): ".", str(Path.home()): "~"}
        for place in sorted(private, key=len, reverse=True):
            text = text.replace(place, private[place]) if len(place) > 1 else text
        names = [socket.gethostname()]
        with suppress(KeyError, OSError):  # a container's user without a name
            names.append(getpass.getuser())
        for name in names:
            text = re.sub(rf"\b{re.escape(name)}\b", "…", text)
        return _PATH.sub("…", redacted(text))

    def _record(self, claim: Claim, verdict: str, **measured_here: Any) -> dict[str, Any]:
        asked = [f"{key}=…" for key in claim.asks]
        record = {
            "claim": claim.id,
            "verdict": "reduced: no verdict" if self.reduced else verdict,
            "claim_sha256": claim.digest,
            "git": self.git,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine_name(self.hardware),
            "hardware": self.hardware.facts(),
            "versions": versions() | ({"driver": _driver()} if self.hardware.is_gpu else {}),
            "command": " ".join(["python scripts/reproduce.py", f"claim={claim.id}", *asked]),
        }
        return record | measured_here

    def _key(self, claim: Claim) -> str:
        """Return the name of the folder of these runs: another one for another file, commit, machine or torch."""
        torch_version, threads = self.hardware.facts()["torch"], self.hardware.facts()["threads"]
        given = [override for override in self.given if key_of(override) in claim.asks]
        parts = [claim.digest, self.git.get("commit"), machine_name(self.hardware), torch_version, threads, given]
        digest = hashlib.sha256(json.dumps([*parts, self.reduced]).encode()).hexdigest()
        return f"{claim.id}-{'reduced-' * self.reduced}{digest[:10]}"


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None: it cannot be read."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def ordered(claims: Collection[str], tested: Collection[str]) -> list[str]:
    """Return claims in order of value, those without an outcome first.

    Args:
        claims: their ids. What is not in ``order.yaml`` comes first.
        tested: those that have an outcome on this machine, valid or not.
    """
    place = {name: number for number, name in enumerate(yaml.safe_load(ORDER.read_text(encoding="utf-8")))}
    return sorted(claims, key=lambda name: (name in tested, place.get(name, -1), name))


def machine_name(hardware: Hardware) -> str:
    """Return the machine's name for folders: the device's name; of a CPU also its bf16 instructions and used cores."""
    name = re.sub(r"\((r|tm)\)|cpu @.*", "", hardware.name.lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"
    if hardware.is_gpu:
        return name
    has = bf16_instructions(hardware.cpu_flags)
    return "-".join(filter(None, [name, has.lower().replace("_", "-"), f"{hardware.cpu_cores}-cores"]))


def bf16_instructions(cpu_flags: Container[str]) -> str:
    """Return what a CPU computes bf16 matmuls with, which the names of some do not tell; empty: nothing."""
    names = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16"}
    return next((name for flag, name in names.items() if flag in cpu_flags), "")


def save(record: dict[str, Any], results: Path) -> Path:
    """Append the outcome to ``results/<machine>/claims.jsonl``, as one line.

    Raises:
        UserError: it cannot be written.
    """
    path = results / record["machine"] / OUTCOMES
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    try:
        make_folder(path.parent)
        with path.open("ab+", buffering=0) as file:  # one write, so that lines of several processes do not mix
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # the last one was cut short: killed, or a full disk
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
    return path


def _finite(values: Iterable[float | None]) -> list[float | None]:
    """Return values as JSON can hold them: None in the place of infinity and NaN."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as it is recorded."""
    criterion = finding.criterion
    median, low, high = _finite((finding.median, finding.low, finding.high))
    return {
        "quantity": criterion.quantity(),
        "bounds": criterion.bounds(),
        "published": criterion.published,
        "verdict": finding.verdict,
        "median": median,
        "low": low,
        "high": high,
        "values": _finite(finding.values),
        "note": criterion.note,
        "why": finding.why,
        "criterion": {key: value for key, value in asdict(criterion).items() if value not in (None, [], "")},
    }


def _arm(arm: Arm, claim: Claim, outcomes: list[Outcome]) -> dict[str, Any]:
    asked = {key: f"{key}=…" for key in claim.asks}  # the user's paths are private
    overrides = [asked.get(key_of(override), override) for override in arm.overrides]
    mine = [outcome for outcome in outcomes if outcome.arm == arm.label]
    names = [*MEASURES, *{name for outcome in mine for name in outcome.summary.get("measures", {})}]
    values = {name: [measured(outcome, name) for outcome in mine] for name in names}
    return {
        "script": Path(arm.script).name,
        "overrides": overrides,
        "seeds": [outcome.seed + arm.seed_shift for outcome in mine],
        "others_cpu": [outcome.others_cpu for outcome in mine],
        "measures": {
            name: _finite(found) for name, found in values.items() if any(value is not None for value in found)
        },
    }
