"""The answer in words: what to set, the table of what was tried, and how it was decided."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from evidence.layers.groups import Group, override
from evidence.layers.search import CONFIRMED, LIFTED, NEEDED, TRYING_SEEDS, Search
from evidence.runs import merge_overrides, redacted_arguments
from mantissa.display import counted
from mantissa.formats import BF16
from mantissa.verdict.judge import Row
from mantissa.verdict.page import Report, Section, measured_on
from mantissa.verdict.report import METHOD, reach_cells, with_level

HEAD = ("setting", "low format", "runs", "quality", "difference to bf16", "steps to equal loss")


def report(search: Search) -> Report:
    """Return the report: what to set, the numbers, and how they were made."""
    assert search.needed is not None
    question, facts = search.question, search.needed.facts
    sections = [
        Section("Set this", text="\n".join(_to_set(search))),
        Section("What was compared", table=_rows(search)),
        Section("Which layers", _about_ranks(search), table=_ranks(search)),
        Section("How it was decided", _method(search), folded=True),
    ]
    origin = measured_on(*(facts[key] for key in ("hardware", "versions", "git")))
    title = f"Layers of {facts['recipe']} in {question.low}"
    return Report("Layers", title, [_answer(search)], question.command, origin, sections)


def _answer(search: Search) -> str:
    question, needed = search.question, search.needed
    assert needed is not None
    low, margin = question.low, f"{100 * question.margin:g} %"
    quality = needed.rows[low].quality
    all_low = (
        f"all in {low}: {quality.verdict} beside bf16, {with_level(quality.interval)}, {len(question.seeds)} seeds"
    )
    if not search.ranked:
        return f"Nothing is needed at a margin of {margin}: {all_low}."
    tried = (
        f"{len(search.ranked)} groups of layers were ranked, {counted(len(search.tried), 'set')} tried in whole runs"
    )
    if search.winner is None:
        return f"Nothing helps: no set of layers in bf16 has a lower loss; {all_low}. {tried}."
    assert search.confirmed is not None and search.gain is not None  # noqa: PT018
    name, rows = search.winner.group.label, search.confirmed.rows
    gain, to_high = search.gain.quality, rows[LIFTED].quality
    fresh = (
        f"on {len(question.fresh_seeds)} fresh seeds {name} in bf16 is {gain.verdict} beside all in {low}, "
        f"{with_level(gain.interval)}, and {to_high.verdict} beside bf16, {with_level(to_high.interval)}"
    )
    if search.lifted is None:
        why = f" ({gain.why})" if gain.why else ""
        return f"Nothing that helps is confirmed: {fresh}{why}; {all_low}. {tried}."
    return f"Confirmed at a margin of {margin}: {fresh}. {tried}."


def _to_set(search: Search) -> list[str]:
    """Return the winner as it is typed, and the command that trains with it."""
    if search.lifted is None:
        return []
    question = search.question
    (typed,) = override(search.lifted, question.own)
    training = merge_overrides(redacted_arguments([*question.common, *question.of_low]), [typed])
    return [shlex.quote(typed), shlex.join(["python", "scripts/train.py", *training])]


def _rows(search: Search) -> list[tuple[str, ...]]:
    """Return the head, and a row for each setting and the seeds that it was compared on."""
    question, needed = search.question, search.needed
    assert needed is not None
    low, high_share = question.low, _share(search, Group((), frozenset(search.layers.flops)))
    seeds = _listed(question.seeds)
    table: list[tuple[str, ...]] = [HEAD, _row(search, BF16.name, high_share, seeds, needed.rows[BF16.name], True)]
    table.append(_row(search, f"all {low}", _share(search), seeds, needed.rows[low]))
    seeds = _listed(question.seeds[:TRYING_SEEDS])
    for tried in search.tried:
        table.append(
            _row(search, tried.group.label, _share(search, tried.group), seeds, search.rows[tried.group.label])
        )
    if search.confirmed and search.winner:
        seeds, rows, group = _listed(question.fresh_seeds), search.confirmed.rows, search.winner.group
        table.append(_row(search, BF16.name, high_share, seeds, rows[BF16.name], True))
        table.append(_row(search, f"all {low}", _share(search), seeds, rows[low]))
        table.append(_row(search, group.label, _share(search, group), seeds, rows[LIFTED]))
    return table


def _row(search: Search, name: str, share: str, seeds: str, row: Row, is_baseline: bool = False) -> tuple[str, ...]:
    steps, _ = reach_cells(row.reach, is_baseline)
    verdict = row.quality.verdict or "(baseline)"
    return name, share, seeds, verdict, with_level(row.quality.interval) if not is_baseline else "", steps


def _share(search: Search, lifted: Group | None = None) -> str:
    share = search.layers.share(lifted)
    return "not known" if share is None else f"{100 * share:.3g} %"


def _listed(seeds: Iterable[int]) -> str:
    numbers = [*seeds]
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"seeds {numbers[0]}-{numbers[-1]}" if whole else f"seeds {','.join(map(str, numbers))}"


def _about_ranks(search: Search) -> list[str]:
    """Return what ranks, and by what."""
    if not search.ranked:
        return []
    question = search.question
    return [
        f"Ranked by the gain: by how much {question.short_steps} steps with these layers in bf16 end at a lower loss "
        f"than without, the mean over {len(search.ranked[0].gains)} seeds."
    ]


def _ranks(search: Search) -> list[tuple[str, ...]]:
    if not search.ranked:
        return []
    return [
        ("in bf16", "layers", "low format", "gain"),
        *(
            (each.group.label, str(len(each.group.layers)), _share(search, each.group), f"{100 * each.gain:+.2f} %")
            for each in search.ranked
        ),
    ]


def _method(search: Search) -> list[str]:
    question = search.question
    return [
        f"{question.steps} optimizer steps. Low format is the share of the multiplications, by FLOP of all matmuls and "
        "convolutions, forward and backward, that are in the format.",
        "The seeds of the search choose, and decide nothing. Fresh seeds decide, by compare's rules, in one look at "
        "one set of layers: better than nothing lifted by more than the margin; or as good as bf16, where nothing "
        "lifted is worse. The chance of a wrong verdict is at most 5 % for each of the two.",
        METHOD,
        f"The comparisons, with a page each: {question.folder / 'compare' / NEEDED}"
        + (f", {question.folder / 'compare' / CONFIRMED}." if search.confirmed else "."),
    ]
