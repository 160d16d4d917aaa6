"""Run folders in which one file is changed: what reads them refuses that in one sentence, or does as without it.

python -m tests.mutations [count=500] [seed=0]

Each attempt copies the folder of a finished or an unfinished run, changes one file of it, and resumes, evaluates,
generates text or sends it to MLflow. Outcomes: ``refused`` (exit code 2, one sentence), ``equal`` (tensors of the last
checkpoint and the metric log, the evaluation's metrics, the text, MLflow's points and params, all as without the
change), ``said`` (something else, and the output names the file), and what must not be: ``SILENT``, ``TRACEBACK``,
``HANG`` and ``MEMORY``: the peak of resident memory, as the system counts it (VmHWM), is more than 1 GiB above that of
the same command on the unchanged folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from evidence.certificate.certify import COMMON, DEFAULTS
from evidence.certificate.child import metrics
from tests import forks
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import steps as saved_steps

PROJECT = Path(__file__).resolve().parents[1]
GPT2 = ["recipe=gpt2", *DEFAULTS["gpt2"][:3], "data=text", "data.path=../text.txt", "data.vocab_size=1024"]
JOBS = {
    "ema": [*GPT2, "ema=default"],
    "muon": [*GPT2, "optimizer=muon", "epochs=0.05"],
    "fp16": [*GPT2, "precision=fp16", "scaler.init=67108864", "scaler.interval=3"],
}
STEPS = 8
LONGEST_S = 60
MOST_BYTES = 2**30
BAD = ("SILENT", "TRACEBACK", "HANG", "MEMORY")
Draw = random.Random


def commands(finished: bool) -> dict[str, list[str]]:
    """Script and arguments by what is done with the folder ``run``."""
    more = [f"steps={STEPS + 4}"] if finished else []
    found = {"resume": ["train.py", "resume=run", "output_dir=.", *more]}
    if finished:
        found["evaluate"] = ["evaluate.py", "run=run"]
        found["generate"] = ["generate.py", "run=run", "prompt=the ", "max_new_tokens=8", "seed=1"]
        found["sync"] = ["sync.py", "run", "uri=sqlite:///mlflow.db"]
    return found


def make(folder: Path, name: str, finished: bool) -> Path:
    """Train the run of a job in ``folder/run``; an unfinished one has neither its last checkpoints nor its end."""
    folder.mkdir(parents=True)
    words = Draw(0).choices(["the", "norm", "of", "a", "step", "scale", "is", "not"], k=6000)
    (folder.parent / "text.txt").write_text(" ".join(words))
    own = JOBS[name] if "epochs" in str(JOBS[name]) else [*JOBS[name], f"steps={STEPS}"]
    job = [*COMMON, *own, "checkpoint.keep=9", "output_dir=.", "run_name=run"]
    done = run(["train.py", *job], folder)
    assert done.code == 0, done.text
    if not finished:
        path = folder / "run"
        for step in saved_steps(path / "checkpoints")[1:]:
            shutil.rmtree(path / "checkpoints" / f"step-{step:08d}")
        for each in ("best", "serving"):
            shutil.rmtree(path / each, ignore_errors=True)
        (path / "summary.json").unlink()
    return folder / "run"


class Done:
    """How a command ended."""

    def __init__(self, code: int | None, text: str, peak: int) -> None:
        self.code, self.text, self.peak = code, text, peak


def run(command: list[str], folder: Path) -> Done:
    """Run a script in a folder; the code is None where it took too long."""
    log, peak = folder / "log.txt", 0
    with log.open("wb") as out:
        process = forks.Popen(
            [sys.executable, str(PROJECT / "scripts" / command[0]), *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < LONGEST_S:
            with suppress(OSError, IndexError):
                peak = int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
            time.sleep(0.02)
        if late := process.poll() is None:
            process.kill()
        process.wait()
    return Done(None if late else process.returncode, log.read_text(errors="replace"), peak)


def result(what: str, path: Path, done: Done) -> Any:
    """Return what a command has found out or written."""
    if what == "resume":
        saved = load(path / "checkpoints")
        tensors = {name: tensor.numpy().tobytes() for name, tensor in saved.tensors().items()}
        return saved.step, tensors, metrics(path)
    if what == "evaluate":
        return json.loads((path / "evaluation" / "evaluation.json").read_text())["metrics"]
    if what == "generate":
        return [line for line in done.text.splitlines() if "tokens/s" not in line]
    with closing(sqlite3.connect(path.parent / "mlflow.db")) as database:
        tables = ("select key, step, value from metrics", "select key, value from params")
        return [sorted(database.execute(query).fetchall()) for query in tables]


# ---- changes of one file


def _bytes(change: Callable[[Draw, bytes], bytes]) -> Callable[[Draw, Path], None]:
    return lambda draw, path: path.write_bytes(change(draw, path.read_bytes())) and None


def _flip(draw: Draw, content: bytes) -> bytes:
    at = draw.randrange(max(1, len(content)))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :] if content else b"x"


def _lines(change: Callable[[Draw, list[bytes]], Any]) -> Callable[[Draw, Path], None]:
    def changed(draw: Draw, content: bytes) -> bytes:
        lines = content.splitlines(keepends=True)
        if len(lines) > 1:
            change(draw, lines)
        return b"".join(lines)

    return _bytes(changed)


def _swap(draw: Draw, lines: list[bytes]) -> None:
    one, other = draw.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]


def _value(draw: Draw, path: Path) -> None:
    """Change one value of JSON, wherever it is, or one digit of another file."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        digits = [at for at, byte in enumerate(path.read_bytes()) if 48 <= byte < 58]
        text = bytearray(path.read_bytes())
        if digits:
            at = draw.choice(digits)
            text[at] = 48 + (text[at] - 47) % 10
        path.write_bytes(text)
        return
    where = content
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        if not keys:
            break
        key = draw.choice(keys)
        if not isinstance(where[key], dict | list) or not where[key]:
            where[key] = draw.choice([1, -1, 0.5, 10**30, True, None, "abc", "", [], {}, float("nan"), float("inf")])
            break
        where = where[key]
    path.write_text(json.dumps(content))


def _replace(make: Callable[[Path], object]) -> Callable[[Draw, Path], None]:
    def change(draw: Draw, path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _others(draw: Draw, path: Path) -> None:
    """The same file of another run, or another file of this one."""
    top = next(each for each in path.parents if each.name == "run")
    other = OTHER[0] / path.relative_to(top) if OTHER else path
    files = [each for each in top.rglob("*") if each.is_file()]
    shutil.copy(
        other if other.exists() and other != path else draw.choice([each for each in files if each != path]), path
    )


OTHER: list[Path] = []
CHANGES: dict[str, Callable[[Draw, Path], None]] = {
    "flip": _bytes(_flip),
    "truncate": lambda draw, path: os.truncate(path, draw.randrange(max(1, path.stat().st_size))),
    "empty": lambda draw, path: os.truncate(path, 0),
    "swap lines": _lines(_swap),
    "repeat a line": _lines(lambda draw, lines: lines.insert(draw.randrange(len(lines)), draw.choice(lines))),
    "drop a line": _lines(lambda draw, lines: lines.pop(draw.randrange(len(lines)))),
    "value": _value,
    "value again": _value,
    "delete": _replace(lambda path: None),
    "pipe": _replace(os.mkfifo),
    "device": _replace(lambda path: path.symlink_to("/dev/zero")),
    "link outside": _replace(lambda path: path.symlink_to("/etc/passwd")),
    "broken link": _replace(lambda path: path.symlink_to("/nowhere/at/all")),
    "folder": _replace(Path.mkdir),
    "another file": _others,
    "huge": lambda draw, path: os.truncate(path, 2**36),
    "large": _replace(lambda path: path.write_text("[" + "{}," * 50_000_000 + "{}]")),
    "deep": _replace(lambda path: path.write_text("[" * 1_000_000)),
    "byte order mark": _bytes(lambda draw, content: b"\xef\xbb\xbf" + content),
    "not UTF-8": _bytes(lambda draw, content: content[:9] + b"\xff\xfe" + content[9:]),
    "order of keys": lambda draw, path: (
        path.suffix == ".json"
        and path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=2))
        and None
    ),
}


def attempt(
    base: Path, what: str, command: list[str], draw: Draw, here: Path, known: tuple[Any, int]
) -> tuple[str, str]:
    """Change a copy of a run's folder and run a command; return the outcome, and what was changed."""
    shutil.copytree(base.parent, here / "at", symlinks=True)
    shutil.copy(base.parents[1] / "text.txt", here)
    path = here / "at" / "run"
    tops = sorted(each.name for each in path.iterdir())
    top = path / draw.choice(tops)
    file = draw.choice(sorted(each for each in top.rglob("*") if each.is_file())) if top.is_dir() else top
    change = draw.choice(sorted(CHANGES))
    about = f"{what}: {change} of {file.relative_to(path)}"
    try:
        CHANGES[change](draw, file)
    except (ValueError, AttributeError):  # not of this kind of file
        return "equal", about
    done = run(command, here / "at")
    last = done.text.strip().rpartition("\n")[2]
    if done.code is None:
        return "HANG", about
    if done.peak > known[1] + MOST_BYTES:
        return "MEMORY", f"{about} ({done.peak / 2**20:.0f} MiB)"
    if "Traceback" in done.text or done.code not in (0, 2):
        return "TRACEBACK", f"{about}: exit code {done.code}, {last}"
    if done.code == 2:
        return ("refused", f"{about}: {last}") if last.startswith("error: ") else ("TRACEBACK", f"{about}: {last}")
    try:
        same = result(what, path, done) == known[0]
    except Exception as error:
        return "SILENT", f"{about}: {error}"
    return ("equal" if same else "said" if file.name in done.text else "SILENT"), about


def campaign(folder: Path, count: int, seed: int, names: tuple[str, ...] = tuple(JOBS)) -> Counter[str]:
    """Change run folders ``count`` times; return how often each outcome was found."""
    bases = {
        (name, finished): make(folder / "base" / f"{name}-{finished}", name, finished)
        for name in names
        for finished in (True, False)
    }
    OTHER[:] = [make(folder / "base" / "other", names[-1], True)]

    @cache
    def undisturbed(name: str, finished: bool, what: str) -> tuple[Any, int]:
        here = folder / "undisturbed"
        here.mkdir()
        shutil.copy(folder / "base" / "text.txt", here)
        shutil.copytree(bases[name, finished].parent, here / "at")
        done = run(commands(finished)[what], here / "at")
        assert done.code == 0, done.text
        found = result(what, here / "at" / "run", done), done.peak
        shutil.rmtree(here)
        return found

    counted, peak = Counter[str](), 0
    for number in range(count):
        draw = Draw(f"{seed} {number}")
        (name, finished), base = draw.choice(sorted(bases.items()))
        what, command = draw.choice(sorted(commands(finished).items()))
        known, here = undisturbed(name, finished, what), folder / str(number)
        here.mkdir()
        outcome, about = attempt(base, what, command, draw, here, known)
        counted[outcome] += 1
        peak = max(peak, known[1])
        print(f"{number:>4}  {outcome:<9}  {name} {about}", flush=True)
        if outcome not in BAD:  # what is kept is to be looked at
            shutil.rmtree(here)
    print(f"{count} changes: {dict(counted)}; undisturbed commands took up to {peak / 2**20:.0f} MiB")
    return counted


def main() -> int:
    """Run the long form in ``mutations/``; the exit code is 1 where anything was found that must not be."""
    options = {"count": "500", "seed": "0"} | dict(argument.split("=", 1) for argument in sys.argv[1:])
    os.environ.setdefault("MANTISSA_TEST_STORE", str(Path("mutations").resolve() / "empty.db"))
    Path("mutations").mkdir()
    counted = campaign(Path("mutations").resolve(), int(options["count"]), int(options["seed"]))
    return int(any(counted[each] for each in BAD))


if __name__ == "__main__":
    sys.exit(main())
