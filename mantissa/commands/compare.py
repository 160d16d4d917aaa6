"""``python -m mantissa compare "COMMAND" "COMMAND" …``: whether shell commands train equally well."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from mantissa.commands import report_folder
from mantissa.display import counted
from mantissa.errors import UsageError
from mantissa.verdict import shell
from mantissa.verdict.comparison import Comparison
from mantissa.verdict.report import report, write
from mantissa.verdict.runs import SEED_SHIFT, Run, Store

SEED = "{seed}"
"""What a command has in the place of the seed."""
DESCRIPTION = f"""
Run each command with several seeds, in turns and in fresh processes, and say whether the others train as well as the
first: EQUIVALENT, WORSE, BETTER or INCONCLUSIVE. Write {SEED} in each command for the seed. A command may choose its
folder, commit or interpreter: "cd old && python train.py --seed {SEED}".

A command that is given again runs with other seeds (plus {SEED_SHIFT}), which shows the noise.

Runs that have ended are kept. --continue goes on after a stop, retries what failed, and runs more --seeds, with
stricter tests. It refuses if a file that a command names has changed. It does not notice changes of modules or
packages: after one, name another --report.

Exit code: 0 where all are EQUIVALENT to the first, 1 where not, 2 for a mistake, 130 when interrupted.
"""
_NUMBER = r"[-+]?(?:(?:nan|inf(?:inity)?|null|none|n/a)(?!\w)|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
"""A number as programs print it, or what they print for one that is not finite, or for none."""
_RUNS_ON = re.compile(r"[^\W\d]|#|[.,:'’\u00a0\u2007\u2009\u202f]\d| ?[×*·] ?10")
"""What makes a number ambiguous when it follows directly: ``1,234``, ``1.2.3``, ``1:30``, ``12_345``, ``1.2k``."""


def main(arguments: list[str]) -> int:
    """Compare, print the report and write it, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m mantissa compare", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.allow_abbrev = False  # --seed is of a command that is not in quotes
    parser.add_argument("commands", nargs="+", help=f'shell commands, such as "python train.py --seed {SEED}"')
    parser.add_argument(
        "--metric", required=True, help="text before the number, such as 'val loss'; the last one counts"
    )
    parser.add_argument("--step", help="text before the step, such as 'step': adds how many each takes to be as good")
    parser.add_argument("--seeds", type=int, metavar="COUNT", default=4, help="how many (default: 4)")
    parser.add_argument("--margin", type=float, default=0.003, help="a difference too small to matter (default: 0.003)")
    parser.add_argument("--higher-is-better", action="store_true", help="the metric is one such as accuracy")
    parser.add_argument("--timeout", type=float, help="seconds after which a run is ended, and has failed")
    parser.add_argument("--report", type=Path, default=Path("mantissa-compare"), help="folder of runs and report")
    parser.add_argument("--continue", dest="continues", action="store_true", help="reuse the runs that are kept there")
    options, others = parser.parse_known_args(arguments)
    if others:
        raise UsageError(f"{shlex.join(others)} is no option of this command; put each command to run in quotes")
    arms = _arms(options.commands)
    for option in ("metric", "step"):
        if getattr(options, option) is not None and not getattr(options, option).strip():
            raise UsageError(f"--{option} is empty; give the text that is printed before the number, such as 'loss'")

    # What is compared, and what is known of it.
    comparison = Comparison(arms, options.metric, options.margin, options.higher_is_better)
    store = _store(options)
    times_before = {label: list(arms.values())[:place].count(arms[label]) for place, label in enumerate(arms)}

    def run(arm: str, seed: int) -> Run:
        command = arms[arm].replace(SEED, str(seed + SEED_SHIFT * times_before[arm]))
        ended = _run(arm, seed, command, options)
        if ended.failure and not any(kept.arm == arm and not kept.failure for kept in store.runs):
            raise UsageError(f"{arm}, seed {seed}: {ended.failure}")
        return ended

    # All runs, in turns. A mistake in the first ones names how to begin anew.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the run, too
    try:
        comparison.run(range(options.seeds), run, store)
    except UsageError as error:
        if options.continues or not store.runs:
            raise
        why = f"since {options.report} keeps {counted(len(store.runs), 'run')}"
        raise UsageError(f"{error}; for a corrected comparison name another folder with --report, {why}") from None
    except KeyboardInterrupt:
        print("interrupted; the same command with --continue goes on", file=sys.stderr)
        raise

    # The answer.
    command = f"python -m mantissa compare {shlex.join(arguments)}"
    page = write(comparison, options.report, command)
    print(f"\n{report(comparison, command).text()}\n\nreport {page}")
    return 0 if comparison.equivalent else 1


def _arms(commands: Sequence[str]) -> dict[str, str]:
    """Return the commands by label: the words that differ between them, or a letter, numbered where one is repeated.

    Raises:
        UsageError: they cannot be compared.
    """
    if len(commands) < 2:
        raise UsageError(f'give two commands or more: "python old.py --seed {SEED}" "python new.py --seed {SEED}"')
    for command in commands:
        if SEED not in command:
            raise UsageError(f"`{command}` has no {SEED}; write {SEED} where it takes the seed")
    different = list(dict.fromkeys(commands))
    words = [re.findall(r"\w(?:[\w.+-]*\w)?", command) for command in different]
    common = set.intersection(*map(set, words))
    labels = ["-".join(dict.fromkeys(word for word in line if word not in common))[:40].strip("-.") for line in words]
    if "" in labels or len(set(labels)) < len(labels):
        labels = [chr(ord("A") + number) for number in range(len(different))]
    arms: dict[str, str] = {}
    for command in commands:
        name = label = labels[different.index(command)]
        number = 1
        while name in arms:
            number += 1
            name = f"{label}-{number}"
        arms[name] = command
    return arms


def _store(options: argparse.Namespace) -> Store:
    """Open the report's store: a new one, or with ``--continue`` the one whose runs go on.

    Raises:
        UsageError: runs are kept, and they are not to be continued, or not as they began.
    """
    folder, anew = options.report, "name another folder with --report"
    path = report_folder(folder) / "runs.jsonl"
    store = Store(path)
    if not store.runs:
        path.unlink(missing_ok=True)  # without runs, another plan may begin here
        store = Store(path)
    elif not options.continues:
        kept = counted(len(store.runs), "run")
        raise UsageError(f"{folder} keeps {kept}; add --continue to go on with them, or {anew}")
    plan = {key: getattr(options, key) for key in ("commands", "metric", "step", "margin", "higher_is_better")}
    files = _files(options.commands)
    store.begin(plan, range(options.seeds), anew)
    if not store.of("files"):
        store.add("files", files)
    for name, digest in store.of("files")[0].items():
        if files.get(name) != digest:
            why = f"{name} has changed since the runs in {folder} began"
            if name not in files:
                why = f"the runs in {folder} began in another folder, or with a {name} that is gone from here"
            raise UsageError(f"{why}; {anew}")
    return store


def _files(commands: Iterable[str]) -> dict[str, str]:
    """Return the digests, by path, of the files that commands name as words and do not write with ``>``."""
    digests: dict[str, str] = {}
    written: set[str] = set()
    for command in commands:
        folder, before = Path(), ""
        for writes, word in re.findall(r"(>?)\s*([^\s'\"=;&|()<>]+)", command):
            path = folder / os.path.expandvars(os.path.expanduser(word))
            if before == "cd":
                folder = path
            elif writes:
                written.add(str(path))
            elif digest := _digest(path):
                digests[str(path)] = digest
            before = word
    return {path: digest for path, digest in digests.items() if path not in written}


def _digest(path: str | Path) -> str:
    """Return the SHA-256 digest of a file; empty: there is none that can be read."""
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(arm: str, seed: int, command: str, options: argparse.Namespace) -> Run:
    """Run an arm's command, with its seed, in a fresh process, and read its metric; a file takes what it prints."""
    folder, sought = options.report / "runs", options.metric
    folder.mkdir(parents=True, exist_ok=True)
    # In `python train.py | tee log` a crash must not pass for the end of training.
    words = ["bash", "-o", "pipefail", "-c", command] if shutil.which("bash") else command
    ended = shell.run(words, folder / f"{arm}-s{seed}.out", errors_apart=True, limit_s=options.timeout)
    numbers = ((last_number(sought, text), text) for text in (ended.output, ended.errors))
    value, text = next((number for number in numbers if number[0] is not None), (None, ""))

    # A run that diverged has an outcome, whatever its exit code.
    minutes = ended.seconds / 60
    if value is not None and not math.isfinite(value):
        return Run(arm, seed, {"loss": None, "minutes": minutes}, ended.seconds)
    if value is not None and ended.code == 0:
        curve = _curve(options, text) if options.step else ([], [])
        if not options.step or any(curve):
            return Run(arm, seed, {"loss": value, "minutes": minutes}, ended.seconds, curve=curve)
        sought = options.step

    # What it printed says why there is no number.
    lines = f"its last lines: {ended.last_lines() or 'none'}"
    if ended.code is None:
        failure = f"was still running after {options.timeout:g} s and was ended"
    elif ended.code:
        failure = f"ended with exit code {ended.code}"
    else:
        failure, lines = f"printed no number after the text {sought!r}", _close(sought, ended) or lines
    return Run(arm, seed, seconds=ended.seconds, failure=f"`{command}` {failure}; {lines}")


def _close(before: str, ended: shell.Ended) -> str:
    """Return the last lines that have a text, in any case and with any signs between its letters; empty: none has."""
    plain = partial(re.sub, r"[\W_]+", "")
    lines = [line.strip()[:200] for text in (ended.output, ended.errors) for line in text.splitlines()]
    near = [line for line in lines if plain(before).lower() in plain(line).lower()]
    return f"lines that are close: {' / '.join(near[-3:])}" if near else ""


def _curve(options: argparse.Namespace, text: str) -> tuple[list[float], list[float]]:
    """Return steps and losses of a log; a loss belongs to the last step that is printed up to the end of its line."""
    steps, losses, step = [], [], None
    for line in text.splitlines():
        printed = last_number(options.step, line)
        step = step if printed is None or not math.isfinite(printed) else printed
        value = last_number(options.metric, line)
        if step is not None and value is not None and math.isfinite(value):
            steps.append(step)
            losses.append(value)
    return steps, losses


def last_number(before: str, printed: str) -> float | None:
    """Return the number that a program printed last after a text; None: it printed none there.

    Between the two may be spaces, ``:``, ``=`` and quotes. ``loss`` is not found in ``aux_loss``. What is printed for
    no number, such as null, is a nan.

    Raises:
        UsageError: the number can be read in two ways.
    """
    text = r"[ \t]+".join(map(re.escape, before.split()))
    whole = rf"(?:(?<![\w/.-])|(?!\w)){text}(?:(?<!\w)|(?![\w.+-]))[ \t:=\"']*((?i:{_NUMBER}))"
    numbers = list(re.finditer(whole, printed))
    if not numbers:
        return None
    last = numbers[-1]
    if _RUNS_ON.match(printed, last.end()):
        shown = printed[last.start() : last.end()] + printed[last.end() :].split()[0]
        raise UsageError(f"{shown!r} can be read in two ways; print digits and a decimal point, and a space after them")
    try:
        return float(last[1])
    except ValueError:
        return math.nan
