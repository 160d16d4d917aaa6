"""The command line of scripts/diff.py: what differs between two runs, and from which step on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.diff.logs import READERS, Compared, Log, Pair, compare, read_log, shown_step
from evidence.diff.replay import first_weights, parting
from evidence.diff.runs import CODE, DATA, Before, before, kept
from mantissa.display import columns, counted, listed, shortened
from trainer.config.options import parse
from trainer.errors import UserError, no_effect
from trainer.files import METRICS_FILE
from trainer.run.step_metrics import STEP_METRICS, last
from trainer.run_folder import RunFolder, is_in_mlflow

_MEANS = tuple(name for name, metric in STEP_METRICS.items() if metric.combine not in (None, last))
"""What a run logs of all steps since the line before."""
_SHOWN = 8
"""Metrics of a step that are shown at most."""


@dataclass
class DiffOptions:
    """Options of scripts/diff.py."""

    a: str = ""
    b: str = ""
    step: str = ""
    replay: bool = True


def main(arguments: list[str]) -> int:
    """Compare two runs, or two logs; return 0 where they are equal, 1 where they differ."""
    options, paths = parse(arguments, DiffOptions, "paths")
    left = iter(paths)
    given = {key: typed or next(left, "") for key, typed in (("a", options.a), ("b", options.b))}
    if not all(given.values()) or next(left, None):
        raise UserError(f"{len(paths) + bool(options.a) + bool(options.b)} given; give two run folders, or two logs")
    sides = {key: _opened(key, path) for key, path in given.items()}
    a, b = sides.values()
    if isinstance(a, RunFolder) and isinstance(b, RunFolder):
        return _of_runs(a, b, options)
    for key, side in sides.items():
        if isinstance(side, RunFolder):
            log = shlex.quote(f"{key}={side.path / METRICS_FILE}")
            raise UserError(f"{key} is a run folder, and the other one a file", log, mistake=shlex.quote(given[key]))
    assert isinstance(a, Path)
    assert isinstance(b, Path)
    logs = read_log(a, options.step), read_log(b, options.step)
    if options.step not in ("", *(log.counted_by for log in logs)):
        raise UserError(f"step={options.step} is no column of numbers in {a} or {b}", "", mistake="step")
    compared = compare(*logs)
    _head(a, b)
    differ = _print_logs(*logs, compared)
    if compared.first is None:
        print("equal as far as both go" if differ else "equal in all that was compared")
    return int(differ)


def _of_runs(a: RunFolder, b: RunFolder, options: DiffOptions) -> int:
    """Compare two runs: before their first step, in their logs, and where these differ in a replay."""
    if options.step:
        raise no_effect(f"step={options.step}", "the steps of runs are known")
    found = before(a, b)
    logs = read_log(a.path / METRICS_FILE), read_log(b.path / METRICS_FILE)
    compared = compare(*logs, means=_MEANS)
    _head(a.path, b.path)
    _print_before(found)
    weights_part = False
    if found.making and options.replay:
        print("building both models …", file=sys.stderr)
        built = first_weights(a, b)
        if isinstance(built, str):
            print(f"first weights, built anew: not compared ({built})")
        else:
            weights_part = bool(built.stage)
            print("\n".join(built.lines() if weights_part else ["first weights, built anew: equal bit for bit"]))
    print()
    differ = _print_logs(*logs, compared)

    # Where the logs differ, why; where they do not, whether the weights do.
    if compared.first is not None:
        if options.replay and not weights_part:
            step, values = compared.first
            _replay(a, b, max(1, int(step)), [each.name for each in values])
        return 1
    try:
        weights, why_not = kept(a, b), "the runs kept none of the same step"
    except UserError as error:
        weights, why_not = None, str(error)
    if weights is None:
        print(f"weights: not compared ({why_not})")
    elif weights.differing:
        print(f"{weights.what}: {listed(weights.differing, 'tensor')} differ")
        if options.replay and not weights_part:
            _replay(a, b, weights.step, [])
        return 1
    else:
        print(f"{weights.what}: equal bit for bit")
    if weights_part:  # and neither the logs nor the checkpoints show it
        return 1
    if differ:
        print("equal as far as both go")
    else:
        same = {row.group for row in found.rows} | found.unknown.keys() <= {CODE}
        at_the_end = weights is not None and weights.step == next(reversed(logs[0].points))
        proven = at_the_end and same and not compared.alone
        print("equal bit for bit" if proven else "equal in all that was compared")
    return int(differ)


def _replay(a: RunFolder, b: RunFolder, step: int, differing: list[str]) -> None:
    """Replay two runs up to a step at which these metrics differ, and print what parts first."""
    print("building both models, and replaying …", file=sys.stderr)
    replayed = parting(a, b, step)
    if isinstance(replayed, str):
        print(f"not replayed: {replayed}")
        return
    print("\n".join(replayed.lines()))
    if not replayed.stage:
        of_steps = not differing or any(name in STEP_METRICS for name in differing)
        print(
            "so the replays do not show what parted these runs"
            if of_steps
            else "what differs is of the evaluation, which is not replayed"
        )


def _opened(key: str, given: str) -> RunFolder | Path:
    """Return the run folder or the file that is given.

    Raises:
        UserError: it is neither.
    """
    path = Path(given).expanduser()
    if not is_in_mlflow(given) and not path.is_dir() and (path.exists() or path.suffix.lower() in READERS):
        if path.suffix.lower() not in READERS:
            raise UserError(f"{key}={given} is no log ({', '.join(READERS)}), and no run folder; give one of these")
        return path
    run = RunFolder.open(key, given, "outputs")
    run.config()
    return run


def _head(a: Path, b: Path) -> None:
    print(f"a  {a}\nb  {b}\n")


def _print_before(found: Before) -> None:
    if found.rows:
        print(columns([("before step 1", "a", "b"), *((row.name, row.a, row.b) for row in found.rows)]))
    else:
        print("before step 1: nothing that both record differs")
    for group, sides in found.unknown.items():
        print(f"{group}: not recorded by {' and '.join(sides)}")
    known = "seed and batch size" if DATA in found.unknown else "the data's fingerprint, seed and batch size"
    for what, differing, same in (
        ("samples of each step", found.ordering, known),
        ("first weights", found.making, "recipe, seed and init_from"),
    ):
        print(f"{what}: {f'may be others, by {shortened(differing)}' if differing else f'{same} are the same'}")


def _print_logs(a: Log, b: Log, compared: Compared) -> bool:
    """Print where two logs differ; return whether they do, or one ends before the other."""
    ends = [next(reversed(log.points)) for log in (a, b)]
    ended = ends[0] != ends[1]
    if compared.first is None:
        print(f"the logs are equal in {_in_words(compared)}")
    else:
        step, differences = compared.first
        equal = [each for each in compared.steps if each < step]
        until = f"equal up to step {shown_step(equal[-1])}, " if equal else ""
        print(f"the logs are {until}{'first ' if equal else ''}different at step {shown_step(step)}")
        print(_table(step, differences))
        if compared.large is None:
            print("at no step by more than 1e-3")
        elif compared.large[0] == step:
            print("there already by more than 1e-3")
        else:
            print(f"by more than 1e-3 first at step {shown_step(compared.large[0])}")
            print(_table(*compared.large))
        print(f"compared: {_in_words(compared)}")
    if ended:
        print(f"a ends at step {shown_step(ends[0])}, b at step {shown_step(ends[1])}")
    if notes := [*a.notes, *b.notes, *compared.notes]:
        print("\n".join(notes))
    print()
    return ended or compared.first is not None


def _table(step: float, differences: Sequence[Pair]) -> str:
    rows = [(f"step {shown_step(step)}", "a", "b", "relative difference")]
    rows += [(each.name, repr(each.a), repr(each.b), f"{each.relative:.1e}") for each in differences[:_SHOWN]]
    more = len(differences) - _SHOWN
    return columns(rows) + (f"\nand {counted(more, 'metric')} more" if more > 0 else "")


def _in_words(compared: Compared) -> str:
    first, last_one = shown_step(compared.steps[0]), shown_step(compared.steps[-1])
    several = f"{len(compared.steps):,} steps, {first} to {last_one}"
    at = f"step {first}" if len(compared.steps) == 1 else several
    return f"{counted(compared.values, 'value')} of {shortened(compared.names)} at {at}"
