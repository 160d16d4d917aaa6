"""``python -m mantissa certify "COMMAND"``: what a training command loses when it is killed and started again."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from glob import escape, glob
from pathlib import Path
from typing import Any

from mantissa.commands import report_folder
from mantissa.differences import Record, compare, counted, drop, unlike, values_in
from mantissa.errors import UsageError
from mantissa.killing import Attempt, Moment, planned, run
from mantissa.page import Section, page

OUT = "{out}"
NO_DATA = "(?!)()()"
"""Matches no line."""
DESCRIPTION = f"""
Run a training command twice undisturbed and once with SIGKILLs, starting it again each time, and say what is lost.

Each run has to begin from nothing. Write {OUT} for the folder of results, in the command and in --same, and each run
gets an empty one; or give --clean, which runs before each run and removes the results of the one before.

A kill comes so many seconds after the line of a step, drawn uniformly from the time of training and in the order of the
steps: each start comes further than the one before. Every fifth kill comes while the command starts.

Exit code: 0 BITWISE, 5 equal within --max-ulp, 6 DIVERGED or NOT RESUMED, 2 for a mistake in the command.
"""


def main(arguments: list[str]) -> int:
    """Certify, print the certificate and write it, and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m mantissa certify", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", help='resumes by itself when it is started again: "python train.py --resume"')
    parser.add_argument("--metric", required=True, help=r"regular expression, step and value: 'step (\d+) loss (\S+)'")
    parser.add_argument(
        "--data", default=NO_DATA, help=r"regular expression, step and samples: 'step (\d+) samples (.*)'"
    )
    parser.add_argument("--same", action="append", default=[], help="a file to compare, or a glob; repeatable")
    parser.add_argument("--kills", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="decides when it is killed (default: 0)")
    parser.add_argument("--clean", help="shell command that removes all results: 'rm -rf out'")
    parser.add_argument("--max-ulp", type=float, default=4, help="so many units in the last place are rounding; 4")
    parser.add_argument("--report", type=Path, default=Path("mantissa-certificate"), help="folder of runs and report")
    options = parser.parse_args(arguments)
    options.report = options.report.absolute()
    if options.report.exists():
        raise UsageError(f"{options.report} exists; remove it, or give another with --report")
    if options.clean is None and OUT not in options.command:
        raise UsageError(f"write {OUT} for the folder of results in the command, or give --clean 'rm -rf …'")
    if options.kills < 1:
        raise UsageError(f"--kills {options.kills} certifies nothing; give 1 or more")
    for name in ("metric", "data"):
        setattr(options, name, _pattern(name, getattr(options, name)))
    report_folder(options.report)
    found = certify(options) | {"command": f"python -m mantissa certify {shlex.join(arguments)}"}
    text = "\n".join([found["verdict"], *(f"- {sentence}" for sentence in found["lost"]), *found["facts"]])
    print(text)
    answer, done = [found["verdict"], *found["lost"]], [Section("What was done", found["facts"])]
    html = page("Certificate", options.command, answer, found["command"], f"Machine: {platform.platform()}.", done)
    for suffix, content in {"json": json.dumps(found, indent=1), "txt": text + "\n", "html": html}.items():
        (options.report / f"certificate.{suffix}").write_text(content, encoding="utf-8")
    return int(found["exit_code"])


def _pattern(name: str, text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--{name} {text!r} is no regular expression: {error}") from None
    if pattern.groups != 2:
        raise UsageError(f"--{name} {text!r} has {pattern.groups} groups; give two, the step and what is compared")
    return pattern


def certify(options: argparse.Namespace, dying: Sequence[str] = ()) -> dict[str, Any]:
    """Run, kill and compare; return the certificate.

    Args:
        options: of the command line, ``metric`` and ``data`` as patterns.
        dying: commands that kill themselves, to be started in turn in the place of kills at random moments.

    Raises:
        UsageError: an undisturbed run fails, prints no line of a step or writes no such file; or two agree in nothing.
    """
    first, whole = _undisturbed(options, "whole")
    _, again = _undisturbed(options, "again")
    begin, unstable = min(whole.metrics[0]), unlike(whole, again)
    if not drop(whole, unstable):
        raise UsageError("two undisturbed runs of this command agree in nothing; let it set its seeds first")
    starts: list[Attempt] = []
    folder = _begin(options, "killed")
    plan: list[tuple[str, Moment | None]] = [(command, None) for command in dying]
    plan = plan or [(options.command, moment) for moment in planned(first, options.metric, options.kills, options.seed)]
    for command, moment in (*plan, (options.command, None)):
        starts.append(_start(options, command, folder, moment))
        if not starts[-1].killed:
            break
    killed = _record(options, folder, starts)
    spans = [(min(lines), max(lines)) if lines else None for lines in killed.metrics]
    resumes = sum(span is not None and span[0] > begin for span in spans[1:])
    drop(killed, unstable)
    found = compare(whole, killed)
    (verdict, code), lost = found.judge(options.max_ulp), found.lost
    if starts[-1].status:
        verdict, code = "NOT RESUMED", 6
        lost = [f"Start {len(starts)} ended with status {starts[-1].status}: {starts[-1].last_line}"]
    elif any(spans[1:]) and not resumes:
        verdict, code = "NOT RESUMED", 6
        lost = [f"None of {len(starts)} starts continued where the one before was: each began at step {begin}.", *lost]
    facts = [
        f"{len(starts) - 1} SIGKILLs, {resumes} resumed after the first step, {found.repeated_steps} steps replayed.",
        f"Compared: the lines of {found.steps} steps, {found.tensors} values in files ({found.elements:,} numbers).",
    ]
    for keys, noun in zip(unstable, ("metric line", "data line", "value"), strict=True):
        if keys:
            names = sorted(key if isinstance(key, int) else ": ".join(filter(None, key)) for key in keys)
            facts.append(f"Not judged, since two undisturbed runs differ: {counted(names, noun)}.")
    if unstable[0] or unstable[1]:
        verdict += " WHERE DETERMINISTIC"
    return {
        "verdict": verdict,
        "exit_code": code,
        "lost": lost,
        "facts": facts,
        "kills": len(starts) - 1,
        "resumes": resumes,
        "starts": [
            {"steps": span, "seconds": start.seconds, "killed": start.killed, "last_line": start.last_line}
            for span, start in zip(spans, starts, strict=True)
        ],
        "comparison": asdict(found),
    }


def _in(folder: Path, command: str) -> str:
    return command.replace(OUT, shlex.quote(str(folder)))


def _begin(options: argparse.Namespace, name: str) -> Path:
    """Return a run's own folder, when nothing is left of the run before."""
    folder: Path = options.report / name
    folder.mkdir(parents=True)
    if options.clean:
        done = subprocess.run(_in(folder, options.clean), shell=True)
        if done.returncode:
            raise UsageError(
                f"--clean {options.clean!r} ended with exit code {done.returncode}; give one that succeeds"
            )
    return folder


def _start(options: argparse.Namespace, command: str, folder: Path, moment: Moment | None = None) -> Attempt:
    print(f"{folder.name} …", file=sys.stderr, flush=True)
    return run(_in(folder, command), folder.with_suffix(".log"), options.metric, moment)


def _undisturbed(options: argparse.Namespace, name: str) -> tuple[Attempt, Record]:
    folder = _begin(options, name)
    done = _start(options, options.command, folder)
    if done.status:
        said = done.last_line or "it printed nothing"
        raise UsageError(f"the command ended with status {done.status}, undisturbed: {said}")
    record = _record(options, folder, [done])
    (metrics,), (data,), (values,) = record
    for option, found in {"metric": metrics, "data": data or options.data.pattern == NO_DATA}.items():
        if not found:
            raise UsageError(f"no line of {folder.with_suffix('.log')} matches --{option}, or it began at its end")
    if options.same and not values:
        raise UsageError(f"the command wrote no file {' or '.join(options.same)}, which --same names")
    return done, record


def _record(options: argparse.Namespace, folder: Path, starts: list[Attempt]) -> Record:
    values: dict[Any, Any] = {}
    for pattern in options.same if not starts[-1].status else ():
        for path in sorted(glob(pattern.replace(OUT, escape(str(folder))), recursive=True)):
            if Path(path).is_file():
                values |= values_in(Path(path), path.removeprefix(f"{folder}/"))
    metrics, data = ([start.by_step(pattern) for start in starts] for pattern in (options.metric, options.data))
    return Record(metrics, data, [values])
