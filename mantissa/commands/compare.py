"""``python -m mantissa compare "COMMAND" "COMMAND" …``: whether shell commands train equally well."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mantissa.commands import report_folder
from mantissa.compare import SEED_SHIFT, Comparison, Run, Store
from mantissa.errors import UsageError
from mantissa.printed import SEED, name_of, run_and_read

DESCRIPTION = f"""
Run each command with several seeds, in turns and in fresh processes, and say whether the others train as well as the
first: EQUIVALENT, WORSE, BETTER or INCONCLUSIVE. Write {SEED} in each command for the seed. A command may choose its
folder, commit or interpreter: "cd old && python train.py --seed {SEED}".

A command that is given again runs with other seeds (plus {SEED_SHIFT}), which shows the noise. What has ended is kept:
the same command continues after a stop, and more --seeds continue a comparison with stricter tests.

Exit code: 0 where all are EQUIVALENT to the first, 1 where not, 2 for a mistake, 130 when interrupted.
"""


def main(arguments: list[str]) -> int:
    """Compare, print the report and write it, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m mantissa compare", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", help=f'shell commands, such as "python train.py --seed {SEED}"')
    parser.add_argument("--metric", required=True, help="regular expression; its last match counts: 'loss ([0-9.]+)'")
    parser.add_argument("--seeds", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--margin", type=float, default=0.003, help="a difference too small to matter (default: 0.003)")
    parser.add_argument("--higher-is-better", action="store_true", help="the metric is one such as accuracy")
    parser.add_argument("--timeout", type=float, help="seconds after which a run is ended, and has failed")
    parser.add_argument("--report", type=Path, default=Path("mantissa-compare"), help="folder of runs and report")
    options = parser.parse_args(arguments)
    arms = _arms(options.commands)
    comparison = Comparison(arms, name_of(options.metric), options.margin, options.higher_is_better)
    store = Store(report_folder(options.report) / "kept.jsonl")
    plan = {key: getattr(options, key) for key in ("commands", "metric", "margin", "higher_is_better")}
    store.begin(plan, range(options.seeds), "give this one another folder with --report")
    times_before = {label: list(arms.values())[:place].count(arms[label]) for place, label in enumerate(arms)}

    def run(arm: str, seed: int) -> Run:
        command = arms[arm].replace(SEED, str(seed + SEED_SHIFT * times_before[arm]))
        ended = run_and_read(arm, seed, command, options.metric, options.report / "runs", options.timeout)
        if ended.failure and not any(kept["arm"] == arm and not kept["failure"] for kept in store.of("run")):
            raise UsageError(f"{arm}, seed {seed}: {ended.failure}")
        return ended

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the run, too
    try:
        comparison.run(range(options.seeds), run, store)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        raise
    command = f"python -m mantissa compare {shlex.join(arguments)}"
    page = comparison.write(options.report, command)
    print(f"\n{comparison.report(command).text()}\n\nreport {page}")
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
