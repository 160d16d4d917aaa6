"""The search on machines of which every time is known, and what it concludes."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace

import pytest

from evidence.advice.schema import AHEAD, BUDGET, FAILED, LEFT_OUT, SEVERAL, Advice, Entry, _entry
from evidence.advice.search import FINAL_TURNS, LEAST_PAIRS, LEVELS, MOST_FAULTS, PAIRS
from mantissa.statistics import ratio_interval
from tests.evidence.advice.machine import SPACE, Machine, every, new, space, times
from trainer.errors import RunError

BEST = "bf16 + compile, micro=32"
PAIR = space("fp32", "bf16")


def winner(advice: Advice) -> Entry:
    return advice.entry(advice.winner)


def entries(advice: Advice) -> dict[str, Entry]:
    return {entry.label: entry for entry in advice.entries}


def again(advice: Advice) -> Advice:
    """The advice as a later command reads it."""
    content = asdict(advice)
    return Advice(**content | {"entries": [_entry(each) for each in content["entries"]]})


def test_the_changes_that_help_are_combined_and_the_ratio_is_of_fresh_processes() -> None:
    here = Machine()
    found = here.advise()
    assert (found.winner, found.baseline, found.stopped) == (BEST, "fp32", AHEAD)
    assert len(set(here.started)) < len(every(SPACE)) / 2, "the whole grid was not needed"
    best = winner(found)
    assert len(best.final) == PAIRS
    assert sorted(here.fresh) == sorted([BEST, "fp32"] * PAIRS), "new processes of both"
    ratios = [statistics.median(base / own for own, base in pair) for pair in best.final]
    assert all(len(pair) == FINAL_TURNS for pair in best.final)
    assert best.interval == ratio_interval(ratios, LEVELS[0]), (
        "one number for each pair of processes, so their spread counts"
    )
    assert best.interval.low < 1 / (0.5 * 0.6 * 0.8) < best.interval.high
    assert best.compile_s == pytest.approx(10, rel=0.05)
    assert best.pays_after_steps == pytest.approx(10 / (0.02 * 0.5 * 0.8 * 0.4), rel=0.05)
    assert here.alive == []


def test_the_chance_between_processes_is_in_the_interval_and_advises_no_equal_setting() -> None:
    """Processes of one setting differ by 1.7 %: intervals of their blocks alone would hold the truth in half of all.

    Another program slows down single blocks.
    """
    among = space("fp32", "bf16", micro=["8", "16", "32"])
    wrong = sum(
        Machine(times({}), between=0.017, noise=0.01, seed=seed).advise(among=among, budget_s=300.0).winner != "fp32"
        for seed in range(120)
    )
    assert wrong <= 8, "a two-sided interval of 95 % is wrong on this side in one of forty"
    held = [
        winner(
            Machine(times({"bf16": 0.8}), between=0.017, noise=0.01, spikes=0.03, seed=seed).advise(
                among=PAIR, budget_s=120.0
            )
        )
        for seed in range(120)
    ]
    intervals = [entry.interval for entry in held if entry.interval]
    assert len(intervals) == 120
    assert sum(each.low < 1 / 0.8 < each.high for each in intervals) >= 0.9 * 120


def test_the_simplest_of_equal_settings_is_advised() -> None:
    found = Machine(times({"bf16": 0.5, "micro=32": 0.995}), compile_s=1.0).advise()
    assert (found.winner, found.stopped) == ("bf16", SEVERAL)
    assert "bf16, micro=32" in found.equal


def test_a_choice_that_fresh_processes_do_not_confirm_is_not_advised() -> None:
    found = Machine(final=lambda label: 2.2 if label == "bf16" else 1.0, step_s=times({"bf16": 0.5})).advise(among=PAIR)
    assert found.winner == "fp32"
    (note,) = found.notes
    assert note.startswith("bf16 was the best until the final round, which did not confirm it: 0.91x")
    assert entries(found)["bf16"].speed == pytest.approx(1 / 1.1, rel=0.02)
    slightly = Machine(times({"bf16": 0.5}), between=0.03, final=lambda label: 1.94 if label == "bf16" else 1.0)
    found = slightly.advise(among=PAIR)
    interval = entries(found)["bf16"].interval
    assert interval is not None
    assert interval.low < 1 < interval.mean
    assert found.winner == "fp32", "its whole interval must be above 1"


def test_a_short_run_is_not_compiled_and_it_says_when_it_would_pay() -> None:
    """Compiled, a step of 0.01 s takes 0.6 of that: 10 s are saved after 2500 steps."""
    here = Machine(noise=0.0)
    found = here.advise(steps=100)
    assert (found.winner, found.stopped) == ("bf16, micro=32", AHEAD)
    assert entries(found)["bf16 + compile"].pays_after_steps == pytest.approx(2500, rel=0.01)
    assert winner(found).speed == pytest.approx(1 / (0.5 * 0.8), rel=0.02)
    always = Machine(times({"bf16": 0.9}), compile_s=30.0, noise=0.0)
    assert always.advise(among=space("fp32", "bf16", compiles=True), steps=100).winner == "bf16 + compile"


def test_compiling_must_be_faster_in_a_whole_run_of_fresh_processes() -> None:
    """10 s to compile and 3000 steps of 0.02 s: with half of the time for a step it pays, with 0.9 it does not."""
    among = space("fp32", compile=["default"])
    here = Machine(times({"compile": 0.5}), noise=0.001, final=lambda label: 1.8 if "compile" in label else 1.0)
    found = here.advise(among=among, steps=3000)
    assert found.winner == "fp32"
    assert found.notes[0].endswith("as fast as fp32 in a run of 3000 steps, compile time included")
    compiled = entries(found)["fp32 + compile"]
    assert compiled.interval is not None
    assert compiled.run_interval is not None
    assert compiled.interval.low > 1.1
    assert compiled.run_interval.high < 1.0


def test_the_interval_of_a_whole_run_has_the_spread_of_the_times_to_compile() -> None:
    search = Machine(noise=0.001).search(steps=6000)
    search.run()
    best = winner(search.advice)
    assert best.candidate.compiles
    assert best.interval is not None
    assert best.run_interval is not None
    best.warm_up_s[0] += 5  # of 10 s, in a run of 39 s
    assert search._final_interval(best, whole=False) == best.interval
    wider = search._final_interval(best, whole=True)
    assert wider is not None
    assert wider.low < 0.95 * best.run_interval.low
    assert wider.high >= 0.99 * best.run_interval.high


def test_what_fails_or_hangs_is_named_and_the_others_go_on() -> None:
    broken = {"fp16": "RuntimeError: no such kernel", "bf16, attention=eager": "hangs", "bf16, micro=32": "later"}
    here = Machine(broken=broken)
    found = here.advise()
    known = entries(found)
    assert (known["fp16"].status, known["fp16"].reason) == (FAILED, "RuntimeError: no such kernel")
    assert (known["bf16, attention=eager"].status, found.stopped) == (LEFT_OUT, BUDGET)
    assert known["bf16, micro=32"].status == FAILED
    assert found.winner.startswith("bf16")
    assert here.started.count("fp16") == 1
    assert here.alive == []
    later = Machine()
    later.advise(advice=again(found))
    assert "bf16, attention=eager" in later.started, "what there was no time for is tried again"
    assert "fp16" not in later.started


def test_a_choice_that_fails_in_the_final_round_gives_its_place_to_the_next() -> None:
    found = Machine(broken={BEST: "in the final round"}).advise()
    assert entries(found)[BEST].status == FAILED
    assert found.winner.startswith("bf16 + compile")
    assert len(winner(found).final) >= LEAST_PAIRS


def test_a_default_that_fails_gives_its_place_to_the_first_that_works() -> None:
    """Where it fails later, the command ends and the next call goes on without it."""
    found = Machine(broken={"fp32": "out of memory"}).advise()
    assert (found.baseline, found.winner) == ("bf16", BEST)
    here = Machine(broken={"fp32": "in the final round"})
    search = here.search()
    with pytest.raises(RunError, match="the reference fp32 failed: it broke later; run the"):
        search.run()
    found = Machine().advise(advice=again(search.advice))
    assert (found.baseline, found.winner) == ("bf16", BEST)


def test_where_all_fail_the_first_error_is_reported() -> None:
    broken = {candidate.label: f"error {number}" for number, candidate in enumerate(every(SPACE))}
    with pytest.raises(RunError, match="the first error: fp32: error 0") as caught:
        Machine(broken=broken).advise()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("budget_s", "start_s"), [(40.0, 1.0), (120.0, 3.0), (600.0, 1.0)])
def test_the_budget_is_kept_and_what_there_was_no_time_for_is_listed(budget_s: float, start_s: float) -> None:
    here = Machine(start_s=start_s)
    found = here.advise(budget_s=budget_s)
    assert here.now < 1.25 * budget_s
    late = [entry for entry in found.entries if entry.status == LEFT_OUT]
    assert all("no time" in entry.reason for entry in late)
    assert (found.stopped == BUDGET) == bool(late) or budget_s == 120.0
    if found.winner != "fp32":
        assert len(winner(found).final) >= LEAST_PAIRS


def test_processes_that_do_not_fit_together_run_one_after_the_other() -> None:
    among = replace(SPACE, refused=lambda candidate: "forecast too large" if "eager" in candidate.label else "")
    here = Machine(room=2000)
    assert here.advise(among=among).winner == BEST
    assert here.most_alive <= 2
    assert not [label for label in here.started if "eager" in label]
    sizes = {"fp16": 9000, "bf16": 4500}
    here = Machine(device_bytes=5000, memory=lambda label: next((sizes[each] for each in sizes if each in label), 1000))
    found = here.advise()
    fp16 = entries(found)["fp16"]
    assert found.winner.startswith("bf16")
    assert (fp16.status, fp16.reason) == (FAILED, "out of memory: beside 0 others")


def test_least_memory_in_at_most_one_and_a_half_times_the_time() -> None:
    def memory(label: str) -> int:
        return 1000 - 100 * ("micro=8" in label) - 300 * ("bf16" in label) - 600 * ("eager" in label)

    factors = {"bf16": 0.8, "micro=8": 1.2, "attention=eager": 2.0}
    found = Machine(times(factors), memory=memory).advise(goal="memory")
    assert found.winner == "bf16, micro=8"
    assert (found.entries[0].memory_bytes, found.entries[0].run_speed) == (600, None)
    slow = Machine(times({"compile": 1.1}), memory=lambda label: 500 if "compile" in label else 1000)
    compiled = slow.advise(steps=10, goal="memory")
    assert "compile" in compiled.winner, "memory counts however short the run is"
    assert compiled.entries[0].pays_after_steps is None


def test_a_setting_with_a_fault_is_not_advised_and_the_next_best_has_a_final_round() -> None:
    here = Machine(faults={BEST: ["overflow, forward: lm_head"]})
    found = here.advise()
    assert found.winner != BEST
    assert found.winner.startswith("bf16")
    assert here.examined == [BEST, found.winner]
    reason = f"{BEST} is not advised, because the doctor found a fault in it: overflow, forward: lm_head"
    assert found.notes == [reason]
    assert len(winner(found).final) >= LEAST_PAIRS
    later = Machine()
    assert later.advise(advice=again(found)).winner == found.winner
    assert later.examined == [], "a known fault is not looked for again"
    among, broken = space("fp32", "bf16", micro=["8"]), {"fp32": "no"}
    found = Machine(broken=broken, faults={"bf16": ["overflow"]}).advise(among=among)
    assert found.winner == "bf16, micro=8"
    assert Machine(broken=broken).advise(among=among, advice=again(found)).winner == found.winner
    assert BEST not in later.fresh, "nor is the setting timed again"


@pytest.mark.parametrize("budget_s", [20.0, 30.0])
def test_a_larger_budget_examines_what_it_finds_whatever_had_a_fault_before(budget_s: float) -> None:
    faults = {candidate.label: ["a fault"] for candidate in every(SPACE) if candidate.label != BEST}
    short = Machine(faults=faults)
    found = short.advise(budget_s=budget_s)
    assert (found.winner, found.stopped, len(short.examined)) == ("fp32", BUDGET, MOST_FAULTS)
    later = Machine(faults=faults)
    assert later.advise(budget_s=900.0, advice=again(found)).winner == BEST
    assert later.examined == [BEST]
    assert not {*short.examined} & {*later.started, *later.fresh}, "a known fault is not timed again"


def test_after_three_faults_the_default_is_advised_and_not_examined() -> None:
    here = Machine(faults={candidate.label: ["a fault"] for candidate in every(SPACE)})
    found = here.advise()
    assert found.winner == "fp32"
    assert len(here.examined) == MOST_FAULTS
    assert "fp32" not in here.examined
    assert "3 settings have a fault, so no further one is examined or advised" in found.notes
    with pytest.raises(RunError, match="no candidate can be advised; the first error: bf16 is not advised"):
        Machine(faults={"bf16": ["overflow"]}, broken={"fp32": "no"}).advise(among=PAIR)


def test_an_interrupted_search_continues_where_it_was() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        if len(advice.entries) == 6:
            raise Stop

    advice, here = new(), Machine()
    with pytest.raises(Stop):
        here.search(advice=advice, save=stop).run()
    spent_s, later = advice.spent_s, Machine()
    found = later.advise(advice=again(advice))
    assert found.winner == BEST
    assert "fp16" not in later.started, "it was measured before"
    assert found.spent_s > spent_s
