"""The command line of scripts/advise.py."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from evidence.advice.candidates import COMPILE, space_of
from evidence.advice.checkup import check
from evidence.advice.commands import overrides_of
from evidence.advice.publish import publish
from evidence.advice.report import print_advice, sentence, write_report
from evidence.advice.schema import BUDGET, SPEED, Advice, Entry, read
from evidence.advice.search import Search
from evidence.advice.timing import Timer
from evidence.advice.worker import COMPILED, Worker, prepare
from evidence.options import AdviseOptions
from evidence.runs import recorded
from mantissa.display import duration
from trainer.config.compose import compose
from trainer.config.options import parse
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.data.fingerprint import fingerprint
from trainer.files import PROJECT, check_output_dir, in_use, make_folder, write_json
from trainer.hardware import Hardware, available_bytes, detect
from trainer.run.provenance import git_facts, versions

ANSWER, OUTCOMES = "advice.json", "outcomes.jsonl"
BLOCKS = 600
"""Blocks that fit into a budget, about: a twentieth of a second to a second each."""
_CODE = ("mantissa", "trainer", "recipes", "conf")
_ELSEWHERE = ("output_dir", "tracking", "run_name")
"""Options that change nothing that is measured."""


def main(arguments: list[str]) -> int:
    """Find the best setting of a recipe here, and print it.

    Raises:
        UserError: a mistake in the options.
        RunError: no candidate works.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, AdviseOptions, "overrides")
    config = _checked(options, overrides)
    hardware = detect(config.device)
    resolved = config.resolve(hardware)  # mistakes before any work
    key = _key(config, overrides, options.goal, hardware)
    folder = Path(config.output_dir).expanduser() / "advice" / f"{config.recipe.name}-{key}"
    make_folder(folder)
    console = Console(highlight=False)
    advice = Advice(
        recipe=config.recipe.name,
        goal=options.goal,
        overrides=recorded(overrides),
        command=shlex.join(["python", "scripts/advise.py", *recorded(arguments)]),
        steps=resolved.plan.steps,
        machine=hardware.name,
        hardware=hardware.facts(),
        versions=versions(),
        git=git_facts(),
        budget_minutes=options.budget_minutes,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    with in_use(folder):
        known = None if options.fresh else read(folder / ANSWER)
        if known and known.winner and not (known.stopped == BUDGET and options.budget_minutes > known.budget_minutes):
            console.print(f"Nothing has changed since the last measurement (fresh=true measures again; {folder}).")
            advice = known
        else:
            if known:
                advice.entries, advice.spent_s = known.entries, known.spent_s
            _search(advice, overrides, options, hardware, folder, console)
        print_advice(advice, console)
        files = [write_report(advice, folder), folder / ANSWER]
        print("\n".join(map(str, files)))
        if sent := publish(advice, config, sentence(advice), files):
            print(sent)
    return 0


def _checked(options: AdviseOptions, overrides: list[str]) -> Config:
    (own,) = options.commands(overrides)
    config = compose(own)
    check_output_dir(config.output_dir)
    return config


def _key(config: Config, overrides: list[str], goal: str, hardware: Hardware) -> str:
    """Return a hash of what an answer depends on: what is typed, options, data, hardware, versions and code."""
    typed = sorted(each for each in overrides if re.split(r"[.=]", each)[0] not in _ELSEWHERE)
    options = {key: value for key, value in flatten(config).items() if key.partition(".")[0] not in _ELSEWHERE}
    data = fingerprint(config.resolve(hardware).config.open_datasets())
    digest = hashlib.sha256(repr([goal, typed, options, data, hardware.facts(), versions()]).encode())
    for path in sorted(path for top in _CODE for path in (PROJECT / top).rglob("*")):
        if path.suffix in (".py", ".yaml"):
            digest.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _search(
    advice: Advice, overrides: list[str], options: AdviseOptions, hardware: Hardware, folder: Path, console: Console
) -> None:
    """Search, and write the advice; it is saved after each measurement, so that the same command continues."""
    began = time.monotonic() - advice.spent_s

    def say(line: str) -> None:
        console.print(f"[{duration(time.monotonic() - began)}] {line}", markup=False, soft_wrap=True)

    space, common = space_of(overrides, hardware, options.goal)
    advice.overrides = recorded(common)
    say(f"varied: {', '.join(space.choices) or 'nothing, all options are set'}")
    for label, why in space.left_out.items():
        say(f"left out: {label} ({why})")
    if COMPILE in space.choices and options.goal == SPEED:  # otherwise all compile, or none
        say(f"ranked by the time of a run of {advice.steps} steps, compile time included")
    budget_s = 60 * options.budget_minutes
    timer = Timer(
        lambda candidate, fresh: Worker(candidate, common, folder, fresh),
        lambda: available_bytes(hardware.device),
        min(1.0, max(0.05, budget_s / BLOCKS)),
    )

    def check_up(entry: Entry) -> dict[str, Any]:
        timer.close()  # the doctor has the memory for itself
        say(f"check-up by the doctor: {entry.label}")
        return check(overrides_of(common, entry.candidate), hardware, folder)

    prepare()
    advice.spent_s = time.monotonic() - began

    def save() -> None:
        write_json(folder / ANSWER, asdict(advice))

    try:
        Search(space, advice, timer, budget_s, check_up, save, say).run()
    finally:
        timer.close()
        shutil.rmtree(folder / COMPILED, ignore_errors=True)
    with (folder / OUTCOMES).open("a", encoding="utf-8") as file:  # kept whatever is measured later
        file.write(json.dumps(asdict(advice)) + "\n")
