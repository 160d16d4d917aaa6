"""Write what README and docs show of results/, and docs/options.md: ``python benchmarks/pages.py``.

  python benchmarks/pages.py                            write the blocks and the picture that are out of date
  python benchmarks/pages.py add outputs/compare/NAME   first append a finished comparison, a certificate, or an advice

Of several results of one thing the newest comes first and the earlier ones follow, each in one line; none is left out.
Exit code: 0, 2 for a user error.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks import kernels, peers, ratios, records
from benchmarks.records import Result
from benchmarks.rows import Row
from evidence import blocks
from evidence.advice import schema
from evidence.advice.command import ANSWER as ADVICE
from evidence.advice.report import sentence as said
from evidence.claims import results as claims
from evidence.claims.criteria import shown
from evidence.comparison import compare, judge, plots, report
from evidence.measures import LOSS
from evidence.runs import Arm, Outcome, Runner
from mantissa.quality import NULL_SHIFT
from trainer.config.help import markdown
from trainer.config.options import run
from trainer.devices import DEVICE_KINDS
from trainer.errors import UserError
from trainer.files import PROJECT, read_json, write_text
from trainer.hardware import detect

FRONT = "precisions"
"""The comparison of README's first picture, and of docs/comparing.md."""
IMAGES = Path("docs") / "images"
PICTURE, TERMINAL = IMAGES / "compare.png", IMAGES / "terminal.svg"
OF_A_RUN = (
    "status",
    "units_per_s",
    "units",
    "peak_memory_bytes",
    "skipped_steps",
    "fp32_arithmetic",
)
"""What is kept of a run's summary, beside its validation losses, its device and its ledger."""


RUN = ("arm", "seed", "exit_code", "failure", "wall_time_s")
"""And of its outcome; since 2026-11-25 also ``others_cpu``."""


def main(arguments: list[str]) -> int:
    """Add a comparison, if one is named; write the pages and the picture."""
    if arguments:
        if len(arguments) != 2 or arguments[0] != "add":
            raise UserError(f"{' '.join(arguments)} is unknown; say add outputs/compare/NAME, or nothing")
        print(f"appended to {add(Path(arguments[1]))}")
    changed = blocks.write(contents())
    if (options := PROJECT / "docs" / "options.md").read_text(encoding="utf-8") != (explained := markdown()):
        write_text(options, explained)
        changed.append(options)
    for path, (results, picture) in pictures().items():
        if shows(path) != digest(results):
            picture(results)
            changed.append(PROJECT / path)
    print("\n".join(f"wrote {path.relative_to(PROJECT)}" for path in changed) or "all pages are up to date")
    return 0


def contents() -> blocks.Blocks:
    """Return what stands in each block of each page."""
    docs = Path("docs")
    found = {
        Path("README.md"): {
            "comparison": front(),
            "first": first(),
        },
        docs / "advice.md": {"outcomes": outcomes_of_advice()},
        docs / "comparing.md": {"comparison": comparisons([FRONT])},
        IMAGES / "README.md": {"pictures": origins()},
        docs / "getting-started.md": {"start": bench("documented")},
        docs / "measurements.md": {
            "comparisons": comparisons([name for name in names() if name != FRONT]),
            "costs": bench("ema", "diagnostics", "optimizers", "loader"),
        },
        docs / "scaling.md": {"devices": devices()},
        docs / "speed.md": {
            "bf16": bf16_over_fp32(),
            "targets": bench("precision", "trainer", "memory", "saving", "generation", "parallel", "startup"),
            "kernels": kernels.tables(),
            "peers": side_by_side(),
            "nanogpt": bench("nanogpt"),
            "roofline": roofline(),
        },
    }
    return {page: {name: _explained(content) for name, content in of_page.items()} for page, of_page in found.items()}


def _explained(content: str) -> str:
    if records.FROM_A_PAGE not in content:
        return content
    return f"{content}\n\n({records.FROM_A_PAGE.capitalize()}: known from an earlier page alone; raw values not kept.)"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))


# --- rows of benchmarks/bench.py ---


def devices() -> str:
    """Return the table of ``trainer/devices.py``."""
    heading = ["", "`device=`", "several processes", "pinned memory", "peak memory is of", "widest dtype", "formats"]
    heading += ["fused kernels in 16 bits", "here"]
    rows = [
        [
            kind.name,
            f"`{kind.type}`",
            kind.collectives or "no",
            "yes" if kind.pinned else "no",
            "torch's allocator" if kind.own_memory else "the process",
            str(kind.wide).removeprefix("torch."),
            "fp32, bf16, fp16" + ", TF32, fp8" * kind.nvidia,
            "used" if kind.fused_amp else "tried first",
            kind.ran,
        ]
        for kind in DEVICE_KINDS
    ]
    return table(heading, rows)


def rows_of(*measurements: str) -> Iterator[tuple[str, list[Result]]]:
    """Yield each machine that has results of these measurements, with all of these results."""
    for machine, results in records.read(records.BENCH).items():
        found = [result for name in measurements for result in results if result["measurement"] == name]
        if found:
            yield machine, found


def row(result: Result) -> Row:
    """Return the row of a result; the values of one that only a page had are the median, the lowest, the highest."""
    fields = {key: result[key] for key in ("name", "unit", "target", "at_most")}
    values = result["values"] if "values" in result else result["printed"]
    return Row(**fields, values=values, measured=result.get("measured", ""))


def figure(result: Result) -> str:
    """Return the median with its unit, and the range; of a page as it was printed."""
    one = row(result)
    if "values" in result:
        return f"{one.figure} {one.spread}".strip()
    middle, *ends = (f"{value:g}" for value in result["printed"])
    return f"{middle}{'' if one.unit == 'x' else ' '}{one.unit}" + (f" ({' to '.join(ends)})" if ends else "")


def bench(*measurements: str) -> str:
    """Return a table for each machine, with every result of these measurements."""
    parts = []
    for machine, found in rows_of(*measurements):
        lines = []
        for name in dict.fromkeys(result["name"] for result in found):
            own = sorted((each for each in found if each["name"] == name), key=lambda each: str(each["date"]))
            for number, result in enumerate(reversed(own)):
                about = (figure(result), row(result).bound, records.origin(result))
                lines.append((name if not number else "earlier", *about))
        heading = ("quantity", "median (lowest to highest)", "target", "measured")
        shown = [column for column, name in enumerate(heading) if name != "target" or any(line[2] for line in lines)]
        cut = [[line[column] for column in shown] for line in (heading, *lines)]
        parts += [f"`{machine}`:", table(cut[0], cut[1:])]
    return "\n\n".join(parts)


def roofline() -> str:
    """Return the shares of a step: for each call of the bench a table with a row for each step."""
    parts = []
    for machine, found in rows_of("roofline"):
        for origin in dict.fromkeys(records.origin(result) for result in found):
            cells: dict[str, dict[str, str]] = {}
            for result in [each for each in found if records.origin(each) == origin]:
                step, _, quantity = result["name"].partition(", ")
                quantity = quantity.removeprefix("share of ").replace("products", "matmuls")  # as older results say
                cells.setdefault(step, {})[quantity] = figure(result).partition(" (")[0]
            columns = list(dict.fromkeys(column for step in cells.values() for column in step))
            lines = [(step, *(of_step.get(column, "") for column in columns)) for step, of_step in cells.items()]
            parts += [f"`{machine}`, {origin}:", table(("step", *columns), lines)]
    return "\n\n".join(parts)


def side_by_side() -> str:
    """Return the tables of loops beside the trainer."""
    parts = []
    for machine, found in rows_of("peers"):
        for result in found:
            fields = {key: result[key] for key in ("title", "unit", "units", "how") if key in result}
            text = "\n".join(result.get("printed", []))
            if not text:
                text = str(peers.SideBySide(**fields, peers=[peers.Peer(**each) for each in result["peers"]]))
            heading, _, rest = text.strip().partition("\n")
            parts.append(f"{heading}\n\n`{machine}`, {records.origin(result)}:\n{rest}")
    return "\n\n".join(parts)


# --- comparisons and certificates ---


def add(folder: Path) -> Path:
    """Append a finished comparison, with what was measured of every run, a certificate, or an advice; return the file.

    Raises:
        UserError: the folder holds neither, it is of another machine, or it is in the file already.
    """
    kinds = {
        compare.RESULT_FILE: (records.COMPARISONS, comparison),
        "certificate.json": (records.CERTIFICATES, certified),
        ADVICE: (records.ADVICE, advised),
    }
    path = next((folder / name for name in kinds if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds no finished comparison, no certificate and no advice")
    name, kept = kinds[path.name]
    found = read_json(path)
    hardware = detect(found["hardware"]["device"])
    if hardware.facts() != found["hardware"]:
        raise UserError(f"{folder} is of another machine or version ({found['hardware']['name']}); add it there")
    ended = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    result = kept(folder, found) | {
        "date": found.get("date", ended),
        "commit": found["git"].get("commit", "unknown"),
        "dirty": found["git"].get("dirty"),
        "hardware": found["hardware"],
    }
    machine = records.machine_name(hardware)
    if result in records.read(name).get(machine, []):
        raise UserError(f"{folder} is in results/{machine}/{name} already")
    return records.add_line(records.RESULTS / machine / name, result)


def certified(folder: Path, found: Result) -> Result:
    """Return what is kept of a certificate."""
    recipe, precision = folder.name.split("-")[1:]
    of = found["comparison"]
    return {
        "recipe": recipe,
        "precision": precision,
        "verdict": found["verdict"],
        "kills": found["kills"],
        "steps": of["steps"],
        "steps_again": of["repeated_steps"],
        "tensors": of["tensors"],
        "skipped": found["skipped_steps"],
        "command": found["command"],
    }


def certificates() -> str:
    """Return the table of all certificates."""
    heading = (
        "recipe",
        "precision",
        "verdict",
        "SIGKILLs",
        "steps, replayed, skipped",
        "tensors",
        "where",
        "measured",
    )
    lines = []
    for machine, results in records.read(records.CERTIFICATES).items():
        for each in results:
            steps = f"{each['steps']}, {each['steps_again']}, {each['skipped']}"
            cells = (f"`{each['recipe']}`", f"`{each['precision']}`", each["verdict"], str(each["kills"]), steps)
            lines.append((*cells, str(each["tensors"]), f"`{machine}`", records.origin(each)))
    return table(heading, lines)


def resumes() -> str:
    """Return the table of what other loops lose when they are killed."""
    lines = []
    for machine, results in records.read(records.RESUMES).items():
        for each in results:
            used = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
            lost = " ".join(each["lost"][:3]) or "nothing"
            resumed = f"{each['kills']}, {each['resumes']}"
            lines.append((each["loop"], each["verdict"], lost, resumed, f"`{machine}`, {used}", records.origin(each)))
    return table(("loop", "verdict", "lost", "SIGKILLs, resumed", "where", "measured"), lines)


def comparison(folder: Path, found: Result) -> Result:
    """Return what is kept of a comparison: its plan, and the losses, speed and memory of every run."""
    runner, keys = (
        Runner(folder),
        ("name", "baseline", "seeds", "margin", "recipe", "unit", "steps", "versions", "looks"),
    )
    arms = [Arm(each["label"], tuple(each["overrides"]), NULL_SHIFT * each["is_null"]) for each in found["arms"]]
    failed = {each["label"]: each["failures"] for each in found["arms"]}
    runs = []
    for arm in arms:
        for seed in found["seeds"]:
            failure = Outcome(arm.label, seed, folder, 1, failed[arm.label].get(str(seed), ""))
            runs.append(_run(runner.done(arm, seed) or failure))
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    return {key: found[key] for key in keys} | {
        "arms": [[arm.label, list(arm.overrides), arm.seed_shift] for arm in arms],
        "runs": runs,
        "command": next(line.strip() for line in lines if line.startswith("    ")),
    }


def _run(outcome: Outcome) -> Result:
    steps, losses = outcome.series.get(LOSS, (np.array([]), np.array([])))
    summary = {key: outcome.summary[key] for key in OF_A_RUN if key in outcome.summary}
    if outcome.summary:
        summary |= {"hardware": {"device": outcome.summary["hardware"]["device"]}}
        summary |= {"final": {LOSS: outcome.summary["final"].get(LOSS)}}
    ledger = outcome.ledger and {key: outcome.ledger[key] for key in ("at_peak", "peak_bytes")}
    return {
        **{key: getattr(outcome, key) for key in (*RUN, "others_cpu")},
        "summary": summary,
        "losses": [steps.tolist(), [value if math.isfinite(value) else None for value in losses.tolist()]],
        "ledger": ledger,
    }


def judged(result: Result) -> compare.Result:
    """Judge a recorded comparison again, from the values of its runs."""
    arms = [Arm(label, tuple(overrides), shift) for label, overrides, shift in result["arms"]]
    outcomes = []
    for each in result["runs"]:
        values = {key: each[key] for key in (*RUN, "summary")}
        outcome = Outcome(**values, folder=Path(), others_cpu=each.get("others_cpu"))
        steps, losses = each["losses"]
        outcome.series = {LOSS: (np.array(steps, int), np.array(losses, float))} if steps else {}
        outcome.ledger = each["ledger"]
        outcomes.append(outcome)
    plan = compare.Comparison(arms, result["baseline"], result["seeds"], result["margin"], name=result["name"])
    facts = {key: result[key] for key in ("recipe", "unit", "steps", "hardware", "versions")} | {"git": {}}
    found = judge.judge(arms, plan.baseline, outcomes, plan.margin, result["looks"])
    return compare.Result(plan, found, outcomes, facts, result["looks"])


def recorded() -> list[tuple[str, Result]]:
    """Return machine and result of every comparison, the newest first."""
    found = records.read(records.COMPARISONS)
    every = [(name, result) for name, results in found.items() for result in results]
    return sorted(every, key=lambda each: str(each[1]["date"]))[::-1]


def names() -> list[str]:
    """Return the names of the recorded comparisons."""
    return sorted({result["name"] for _, result in recorded()})


def fronts() -> dict[str, Result]:
    """Return by machine, the newest first, its newest result of the comparison of the first picture."""
    newest: dict[str, Result] = {}
    for machine, result in recorded():
        if result["name"] == FRONT and "runs" in result:
            newest.setdefault(machine, result)
    return newest


def front() -> str:
    """Return what the comparison of the first picture says on each machine."""
    return "\n".join(
        f"- `{machine}`: {' '.join(report.lead(judged(result)))} *({records.origin(result)})*"
        for machine, result in fronts().items()
    )


def first() -> str:
    """Return how long the README's first command took on each machine, the newest result of each."""
    newest = {}
    for machine, found in rows_of("documented"):
        for result in sorted(found, key=lambda each: str(each["date"])):
            if result["name"] == f"`{ratios.FIRST}`: time":
                newest[machine] = f"{figure(result)} on `{machine}` ({records.origin(result)})"
    return f"The training takes {' and '.join(newest.values())}." if newest else ""


def comparisons(shown: Sequence[str]) -> str:
    """Return for each name of a comparison the newest one in full, and each earlier one in one line."""
    parts = []
    for name in shown:
        own = [each for each in recorded() if each[1]["name"] == name]
        for number, (machine, result) in enumerate(own):
            about = f"`{machine}`, {records.origin(result)}"
            found = None if "printed" in result else judged(result)
            sentences = report.sentences(found) if found else result["printed"]
            told = report.lead(found) if found else []
            if number:
                before = (
                    "Earlier, the same" if result["command"] == own[0][1]["command"] else f"Also, `{result['command']}`"
                )
                parts.append(f"{before} on {about}: {' '.join([*told, *sentences])}")
                continue
            parts += [f"### {name.capitalize().replace('-', ' ')}"] if len(shown) > 1 else []
            parts += told
            parts += [f"    {result['command']}", f"On {about}:", "\n".join(f"- {each}" for each in sentences)]
            if found:
                heading, *rows = report.rows(found)
                parts.append(table(heading, rows))
    return "\n\n".join(parts)


# --- pictures ---


def pictures() -> dict[Path, tuple[dict[str, Result], Callable[[dict[str, Result]], None]]]:
    """Return by picture the newest results that it can be drawn from, by machine, and what draws it."""
    found: dict[Path, tuple[dict[str, Result], Callable[[dict[str, Result]], None]]] = {}
    if fronts():
        found[PICTURE] = fronts(), draw
    outputs = [(name, each) for name, results in rows_of("documented") for each in results if "output" in each]
    if outputs:
        found[TERMINAL] = dict([max(outputs, key=lambda each: str(each[1]["date"]))]), draw_terminal
    return found


def origins() -> str:
    """Return a line on each picture that is drawn from results."""
    lines = []
    for path, (results, _) in pictures().items():
        file = records.BENCH if path == TERMINAL else records.COMPARISONS
        for machine, result in results.items():
            command = result["name"].split("`")[1] if path == TERMINAL else result["command"]
            about = records.origin(result)
            lines.append(f"- `{path.name}`: `{command}`; drawn from `results/{machine}/{file}`; {about}.")
    return "\n".join(lines)


def digest(results: dict[str, Result]) -> str:
    """Return what names results: a hash of all that they say."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def shows(path: Path) -> str:
    """Return the digest of the results that a picture was drawn from; empty: of none."""
    found = re.search(rb"Source\W+([0-9a-f]{64})", (PROJECT / path).read_bytes())
    return found[1].decode() if found else ""


def draw_terminal(results: dict[str, Result]) -> None:
    """Draw what a command printed; a comment ``Source`` has the digest."""
    from rich.console import Console
    from rich.text import Text

    (result,) = results.values()
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(Text(result["output"].rstrip()))
    picture = console.export_svg(title=result["name"].split("`")[1], unique_id="terminal")
    write_text(PROJECT / TERMINAL, f"{picture}\n<!-- Source: {digest(results)} -->\n")


def draw(results: dict[str, Result]) -> None:
    """Draw the answers of comparisons; the picture's text chunk ``Source`` has the digest."""
    titles = {machine if len(results) > 1 else "": judged(result) for machine, result in results.items()}
    plots.answers(titles).savefig(PROJECT / PICTURE, metadata={"Source": digest(results)})


# --- advice ---


BEFORE = "by a search before 05c1253, whose interval is without the spread between processes"


def advised(folder: Path, found: Result) -> Result:
    """Return what is kept of an advice: the conclusion, and the sentence that said it."""
    known = schema.read(folder / ADVICE)
    if known is None or not known.winner:
        raise UserError(f"{folder} holds no finished advice")
    kept = {key: value for key, value in found.items() if key not in ("entries", "key")}
    interval = next(entry["interval"] for entry in found["entries"] if entry["candidate"]["label"] == known.winner)
    return kept | {"speed": interval, "said": said(known)}


def conclusion(found: Result) -> str:
    """Return what an advice has found in one sentence."""
    if "said" in found:
        return str(found["said"])
    equal = len(found["equal"])
    also = f"; {equal} other setting{'s are' if equal > 1 else ' is'} not clearly slower" if equal else ""
    if found["winner"] == found["baseline"]:
        return f"{found['winner']}, the default: no setting is clearly faster{also}"
    low, high = (f"{found['speed'][end]:.2f}" for end in ("low", "high"))
    return f"{found['winner']}: {found['speed']['mean']:.2f}x [{low}, {high}] as fast as {found['baseline']}{also}"


def all_advice() -> list[tuple[str, Result]]:
    """Return machine and result of every advice, the newest first."""
    every = [(name, found) for name, results in records.read(records.ADVICE).items() for found in results[::-1]]
    return sorted(every, key=lambda each: str(each[1]["date"]), reverse=True)


def about(found: Result) -> str:
    """Return the origin of an advice, and what is against it."""
    return ", ".join([records.origin(found), *([] if "said" in found else [BEFORE])])


def outcomes_of_advice() -> str:
    """Return a table of every advice."""
    cells = [
        (found["recipe"], f"`{machine}`", f"`{found['command']}`", conclusion(found), about(found))
        for machine, found in all_advice()
    ]
    return table(("recipe", "machine", "command", "advice", "measured"), cells)


def bf16_over_fp32() -> str:
    """Return every result on the speed of bf16 in its own arithmetic: of claims, of the bench, of comparisons."""
    lines: list[tuple[str, ...]] = []
    for machine, outcomes in claims.read().items():
        for record in chain.from_iterable(outcomes.values()):
            for finding in record.get("findings", []):
                of = finding["criterion"]
                (arm, *further), over = of["arm"], of.get("over", [""])[0]
                if of["measure"] == "speed" and not further and over and arm == over.replace("fp32", "bf16") != over:
                    what = f"{arm.removesuffix('bf16').strip('_')} (claim {record['claim']})".strip()
                    lines.append((what, machine, shown(finding), records.origin(record)))
    for machine, found in rows_of("precision"):
        for result in found:
            if result["name"].endswith("bf16 / fp32"):
                what = f"{result['name'].partition(',')[0]} (bench)"
                lines.append((what, machine, figure(result), records.origin(result)))
    for machine, result in recorded():
        for arm in judged(result).arms if "runs" in result else []:
            if arm.label == "bf16" and result["baseline"] == "fp32" and (ratio := arm.speed.ratio):
                shows = f"{ratio.mean:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"
                lines.append((f"comparison {result['name']}", machine, shows, records.origin(result)))
    return table(("what is trained", "machine", "bf16 over fp32", "measured"), lines)


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
