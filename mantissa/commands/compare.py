"""``python -m mantissa compare "COMMAND" "COMMAND" …``: whether shell commands train equally well."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mantissa.commands import report_folder
from mantissa.comparison import Comparison, Run
from mantissa.errors import UsageError
from mantissa.printed import SEED, measured, name_of
from mantissa.quality import NULL

DESCRIPTION = f"""
Run each command with several seeds, in turns and in fresh processes, and say whether the others train as well as the
first: EQUIVALENT, WORSE, BETTER or INCONCLUSIVE. Write {SEED} in each command for the seed. A command may choose its
folder, commit or interpreter: "cd old && python train.py --seed {SEED}".

The null arm is the first command with other seeds, and shows the noise. What has ended is kept: the same command
continues after a stop, and more --seeds continue a comparison with stricter tests.

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
    parser.add_argument("--no-null", action="store_true", help="no null arm")
    parser.add_argument("--timeout", type=float, help="seconds after which a run is ended, and has failed")
    parser.add_argument("--report", type=Path, default=Path("mantissa-compare"), help="folder of runs and report")
    options = parser.parse_args(arguments)
    arms = _arms(options.commands) | ({} if options.no_null else {NULL: options.commands[0]})
    comparison = Comparison(arms, name_of(options.metric), options.margin, options.higher_is_better)
    path = report_folder(options.report) / "kept.jsonl"
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def keep(kind: str, content: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([kind, content]) + "\n")

    def run(arm: str, seed: int) -> Run:
        ended = measured(arm, seed, arms[arm], options.metric, options.report / "runs", options.timeout)
        keep("run", asdict(ended))
        return ended

    plan = {key: getattr(options, key) for key in ("commands", "metric", "margin", "higher_is_better", "no_null")}
    if not kept:
        keep("plan", plan)
    elif kept[0][1] != plan:
        raise UsageError(f"{options.report} holds another comparison; give this one another folder with --report")
    comparison.runs = [Run(**each) for kind, each in kept if kind == "run" and each["seed"] < options.seeds]
    comparison.looks = looks = [each for kind, each in kept if kind == "look"]
    if looks and (judged := len(looks[-1]["seeds"])) > options.seeds:
        raise UsageError(
            f"--seeds {options.seeds} leaves out seeds that were judged before, and a verdict on chosen ones means "
            f"nothing; give --seeds {judged} or more"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the run, too
    try:
        comparison.run_all(range(options.seeds), run)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        raise
    for look in comparison.looks[len(looks) :]:  # before a report shows it
        keep("look", look)
    page = comparison.write(options.report, f"python -m mantissa compare {shlex.join(arguments)}")
    print(f"\n{comparison.text()}\n\nreport {page}")
    return 0 if comparison.equivalent else 1


def _arms(commands: Sequence[str]) -> dict[str, str]:
    """Return the commands by label: the words that differ between them, or a letter.

    Raises:
        UsageError: they cannot be compared.
    """
    if len(commands) < 2:
        raise UsageError(f'give two commands or more: "python old.py --seed {SEED}" "python new.py --seed {SEED}"')
    for number, command in enumerate(commands):
        if SEED not in command:
            raise UsageError(f"`{command}` has no {SEED}; write {SEED} where it takes the seed")
        if command in commands[:number]:
            raise UsageError(f"`{command}` is given twice; leave one out: the null arm already shows the noise")
    words = [re.findall(r"\w(?:[\w.+-]*\w)?", command) for command in commands]
    common = set.intersection(*map(set, words))
    labels = ["-".join(dict.fromkeys(word for word in each if word not in common))[:40].strip("-.") for each in words]
    if "" in labels or NULL in labels or len(set(labels)) < len(labels):
        labels = [chr(ord("A") + number) for number in range(len(commands))]
    return dict(zip(labels, commands, strict=True))
