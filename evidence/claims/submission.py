"""One outcome of a claim as a file to send, and what is checked before it joins the recorded ones."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

from evidence.claims.claims import Claim, load
from evidence.claims.criteria import NOT_HERE, RELATED, Criterion, combine, evaluate
from evidence.claims.reproduce import machine_name, plain, save
from evidence.claims.results import Record, has_the_arms, machine_of, read, runs_of
from trainer.errors import UserError
from trainer.files import make_folder, read_json, write_json

_REQUIRED = {
    **dict.fromkeys(("claim", "verdict", "claim_sha256", "date", "machine", "command"), str),
    **dict.fromkeys(("git", "hardware", "versions", "arms", "left_out"), dict),
    **dict.fromkeys(("findings", "why", "failures"), list),
}
"""The keys of an outcome in which something was measured, and their types."""
_OPTIONAL = {"not_timed": dict, "related": str}


def write(record: Record, folder: Path) -> Path:
    """Write an outcome as one JSON file with its SHA-256 in it, and return its path."""
    make_folder(folder)
    path = folder / f"{record['claim']}-{record['machine']}.json"
    write_json(path, record)
    return path


def add(path: Path, results: Path) -> Path:
    """Check a file that ``write`` made elsewhere, append it to the recorded outcomes, and return their file.

    The hash shows damage and careless edits. Whoever edits the values can compute it anew.

    Raises:
        UserError: the file is not as it was written, is there already, or says what does not follow from its values.
    """
    try:
        record = read_json(path)
        why = _unfit(record) or untrue(record)
    except OSError as error:
        raise UserError(f"add={path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, ValueError) else "its values are not those of an outcome"
    if why:
        raise UserError(f"add={path} is refused: {why}; ask its sender for the file of a new run")
    if record in read(results).get(record["machine"], {}).get(record["claim"], []):
        raise UserError(f"add={path} is refused: it is in results/{record['machine']} already")
    return save(record, results)


def _unfit(record: Record) -> str:
    """Return why an outcome cannot join the others, in words; empty: it can."""
    types = _REQUIRED | _OPTIONAL
    wrong = [key for key in _REQUIRED if key not in record]
    wrong += [key for key, value in record.items() if not isinstance(value, types.get(key, ()))]
    if wrong:
        return f"{wrong[0]} is missing, unknown, or of another type"
    claim = load(record["claim"])
    datetime.date.fromisoformat(record["date"])
    if record["machine"] != machine_name(machine_of(record)):
        return "machine is not the name of its hardware"
    if record["git"].get("dirty") != "false" or len(record["git"]["commit"]) != 40:
        return "it was measured by code that is no commit"
    if record["claim_sha256"] != claim.digest or not has_the_arms(record, claim):
        return f"it is of another version of evidence/claims/published/{claim.id}.yaml"
    return "" if record["verdict"] != NOT_HERE else "nothing was measured"


def untrue(record: Record) -> str:
    """Return what in an outcome does not follow from its raw values, in words; empty: everything does."""
    runs, claim = runs_of(record), load(record["claim"])
    findings, verdicts = record.get("findings", []), []
    for stored in findings:
        found = plain(evaluate(Criterion(**stored["criterion"]), runs))
        if record["verdict"] == RELATED and found["verdict"] != NOT_HERE:
            found["verdict"] = ""
        verdicts.append(found["verdict"])
        for key in ("verdict", "median", "low", "high", "values"):
            if not _same(found[key], stored[key]):
                return f"{key} of {found['quantity']} does not follow from the values of the runs"
    if record["verdict"] != RELATED and record["verdict"] != combine(verdicts):
        return f"the verdict {record['verdict']} does not follow from those of its criteria"
    if record["claim_sha256"] == claim.digest and findings and not _is_judged_so(record, claim):
        return f"the verdict {record['verdict']} is not the one that evidence/claims/published/{claim.id}.yaml gives"
    return ""


def _is_judged_so(record: Record, claim: Claim) -> bool:
    verdict, findings = claim.judge(runs_of(record), machine_of(record))
    criteria = [Criterion(**stored["criterion"]) for stored in record["findings"]]
    return verdict == record["verdict"] and criteria == [finding.criterion for finding in findings]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return math.isclose(one, other) if isinstance(one, float) and isinstance(other, float) else bool(one == other)
