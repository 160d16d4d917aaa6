"""The final round and what follows it: new blocks for whatever is advised, also where time or memory is short."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from evidence.advice.candidates import Factor, Value
from evidence.advice.conclude import MOST_FAULTS, conclude, objections
from evidence.advice.plan import HALVING, Plan, in_words
from evidence.advice.schema import FAILED, FINAL, LEFT_OUT, MEASURED, Log
from evidence.advice.search import FINAL_LEAST, FINAL_REPEATS, Search
from evidence.advice.text import print_advice, sentence
from evidence.intervals import ratio_interval
from tests.evidence.advice.machine import SPACE, Machine, factor, space
from tests.evidence.advice.made import advice, measured
from tests.evidence.advice.test_rounds import machine, product_of
from trainer.errors import RunError


def of_new_blocks(search_log: Log, label: str, base: str) -> None:
    """Fail unless both were timed in a final round."""
    assert len(search_log.ratios(label, base, search_log.final)) >= 2


def before_the_final_round(search: Search, do: Callable[[], object]) -> None:
    """Let something happen when the final round begins."""
    base_round = search.bench.round

    def round_(kind: str, *of: object) -> object:
        if kind == FINAL:
            do()
        return base_round(kind, *of)  # type: ignore[arg-type]

    search.bench.round = round_  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("start_s", "compile_s", "room"), [(8.0, 10.0, 3000), (20.0, 10.0, 2000), (15.0, 40.0, 4000), (15.0, 20.0, 3000)]
)
def test_the_winner_has_new_blocks_where_processes_do_not_fit_together(
    start_s: float, compile_s: float, room: int
) -> None:
    here = machine(start_s=start_s, compile_s=compile_s, room=room)
    search = here.search(budget_s=300.0)
    chosen, _ = search.run()
    found = conclude(search.plan, chosen)
    assert found.winner != "fp32"
    of_new_blocks(search.log, found.winner, "fp32")
    assert found.entries[0].speed == ratio_interval(search.log.ratios(found.winner, "fp32", search.log.final))
    assert here.now < 1.35 * 300, [
        (done.kind, {k: len(v) for k, v in done.times.items()}) for done in search.log.rounds
    ]


def test_the_winner_has_new_blocks_when_a_search_continues_with_little_time_left() -> None:
    here = machine(start_s=8.0)
    search = here.search(budget_s=300.0)
    search.run()
    log = Log.from_dict(search.log.to_dict() | {"spent_s": 290.0})
    again = machine(start_s=8.0).search(budget_s=300.0, log=log)
    chosen, _ = again.run()
    assert again.plan.label(chosen) == "bf16 + compile, micro=32"
    of_new_blocks(again.log, again.plan.label(chosen), "fp32")


def test_a_default_that_fails_in_the_final_round_gives_its_place_to_the_next() -> None:
    here = machine()
    search = here.search()

    def break_the_default() -> None:
        if "fp32" not in here.broken:
            here.broken["fp32"] = "out of memory"
            search.bench.close()

    before_the_final_round(search, break_the_default)
    chosen, _ = search.run()
    found = conclude(search.plan, chosen)
    assert search.log.records["fp32"].status == FAILED
    assert found.baseline == "bf16"
    of_new_blocks(search.log, found.winner, "bf16")


def test_where_nothing_works_any_more_the_first_error_is_reported() -> None:
    here = Machine(product_of({}), broken={"bf16": "no"})  # type: ignore[arg-type]
    search = here.search(among=space(factor("precision", "fp32", "bf16")))

    def break_all() -> None:
        here.broken |= {"fp32": "gone", "fp32 (again)": "gone"}
        search.bench.close()

    before_the_final_round(search, break_all)
    with pytest.raises(RunError, match="can be advised; the first error: fp32: gone"):
        search.run()


def test_an_interval_that_happens_to_be_narrow_does_not_end_the_final_round_at_once() -> None:
    search = machine(noise=0.0).search()
    chosen, _ = search.run()
    assert len(search.log.ratios(search.plan.label(chosen), "fp32", search.log.final)) == FINAL_LEAST


def test_a_start_that_the_budget_cuts_off_is_tried_again_with_a_larger_one() -> None:
    """An uncompiled candidate that starts slowly is not hung."""
    among = space(factor("precision", "fp32", "bf16"), factor("attention", "", "attention=eager"))
    here = machine(start_s=1.0, broken={"bf16, attention=eager": "hangs"})
    search = here.search(among=among, budget_s=20.0)
    search.run()
    record = search.log.records["bf16, attention=eager"]
    assert record.status == LEFT_OUT
    assert "its start did not end within" in record.reason
    again = machine(start_s=1.0).search(among=among, budget_s=300.0, log=Log.from_dict(search.log.to_dict()))
    again.run()
    assert again.log.records["bf16, attention=eager"].status == MEASURED


def test_a_setting_with_a_fault_is_not_advised_and_the_next_best_has_a_final_round() -> None:
    faults = {"bf16 + compile, micro=32": ["overflow, forward: lm_head"]}
    here = machine()
    found, _ = here.advise(faults=faults)
    assert found.winner not in faults
    assert found.winner.startswith("bf16")
    assert here.examined == ["bf16 + compile, micro=32", found.winner]
    assert found.notes == [
        "bf16 + compile, micro=32 is not advised, because the doctor found a fault in it: overflow, forward: lm_head"
    ]
    entry = found.entries[0]
    assert entry.speed is not None
    assert FINAL_LEAST <= entry.speed.count <= FINAL_REPEATS, "of its own final round alone"


def test_where_all_have_faults_the_default_is_advised_and_not_examined() -> None:
    among = space(factor("precision", "fp32", "bf16"), factor("compile", "", "compile"))
    labels = [among.candidate(setting).label for setting in among.product()]
    here = machine()
    found, _ = here.advise(among=among, faults={label: ["a fault"] for label in labels})
    assert found.winner == "fp32"
    assert "fp32" not in here.examined
    assert len(found.notes) == len(here.examined) == 2


def test_after_three_faults_no_other_setting_is_examined() -> None:
    every = {SPACE.candidate(setting).label: ["a fault"] for setting in SPACE.product()}
    here = machine()
    found, _ = here.advise(faults=every)
    assert found.winner == "fp32"
    assert len(here.examined) == MOST_FAULTS
    assert "3 settings have a fault, so no further one is examined or advised" in found.notes


def test_where_the_final_round_does_not_confirm_the_choice_the_next_one_has_a_final_round_too() -> None:
    slow: set[str] = set()

    def step_s(label: str) -> float:
        return 0.02 * (1.2 if label in slow else 0.79 if label == "bf16, micro=32" else 0.8 if "bf16" in label else 1.0)

    here = Machine(step_s)
    search = here.search(among=space(factor("precision", "fp32", "bf16"), factor("micro", "", "micro=32")))
    before_the_final_round(search, lambda: slow.add("bf16"))
    healthy = {"faults": [], "notes": [], "healthy": True}
    chosen, _ = search.run(lambda chosen: objections(search.plan, chosen, lambda _: healthy)[0])
    found = conclude(search.plan, chosen)
    assert found.winner == "bf16, micro=32"
    (note,) = found.notes
    assert note.startswith("bf16 was the best until the final round, which did not confirm it: 0.83x")
    assert found.excluded == {}
    assert [done.kind for done in search.log.rounds].count(FINAL) == 2


def test_a_known_fault_is_not_looked_for_again() -> None:
    here = machine()
    search = here.search()
    best = "bf16 + compile, micro=32"
    plan = Plan(SPACE, search.log, "speed", 10**6, faults={best: ["overflow"]})
    search.plan = plan
    chosen, _ = search.run()
    assert plan.label(chosen) != best
    assert conclude(plan, chosen).notes == [in_words(best, ["overflow"])]


def test_a_setting_that_takes_the_place_of_a_default_that_fails_is_examined() -> None:
    """fp32 fails, all others have faults: nothing can be advised, and the first fault is named."""
    among = space(factor("precision", "fp32", "bf16"))
    here = machine(broken={"fp32": "out of memory", "fp32 (again)": "out of memory"})
    with pytest.raises(RunError, match="no candidate can be advised; the first error: fp32: out of memory"):
        here.advise(among=among, faults={"bf16": ["overflow"]})
    assert here.examined == ["bf16"]


def test_what_does_not_pay_is_replaced_by_the_best_that_does_not_compile() -> None:
    """Not by the same setting without compiling, which is slower than another one here."""

    def step_s(label: str) -> float:
        base, eager_form = 0.03 if "16" in label else 0.02, "attention=eager" in label
        if "compile" in label:
            return base * (0.3 if eager_form else 0.5)
        return base * (1.2 if eager_form else 0.8 if "micro=32" in label else 1.0)

    found, _ = Machine(step_s).advise(steps=10)
    assert found.winner == "fp32, micro=32"
    (note,) = found.notes
    assert note.startswith("compiling takes 10 s and makes a step")
    assert "this advice is for 10 steps," in note
    assert found.entries[0].speed is not None
    assert found.entries[0].speed.count >= FINAL_LEAST


def test_a_whole_run_is_compared_with_the_best_that_does_not_compile() -> None:
    """Compiling pays against its own form, but another setting without it is nearly as fast."""

    def step_s(label: str) -> float:
        base = 0.03 if "16" in label else 0.02
        return base * (0.3 if "compile" in label else 0.33 if "micro=32" in label else 1.0)

    short, _ = Machine(step_s, compile_s=60.0).advise(steps=5000, budget_s=1200.0)
    assert short.winner == "fp32, micro=32"
    long, _ = Machine(step_s, compile_s=60.0).advise(steps=500_000, budget_s=1200.0)
    assert "compile" in long.winner


def test_a_whole_run_must_be_faster_in_the_final_round_too() -> None:
    """Compiling takes 10 s, the default's 3000 steps 60 s: with 0.9 of the time for a step it does not pay."""
    slow: set[str] = set()
    here = Machine(lambda label: 0.02 * ((0.9 if slow else 0.5) if "compile" in label else 1.0), noise=0.001)
    search = here.search(among=space(factor("precision", "fp32"), factor("compile", "", "compile")), steps=3000)
    before_the_final_round(search, lambda: slow.add("compile"))
    chosen, _ = search.run()
    assert search.plan.label(chosen) == "fp32 + compile"
    found = conclude(search.plan, chosen)
    assert found.winner == "fp32"
    assert found.notes[0].endswith("as fast as fp32 in a run of 3000 steps, compile time included")
    steps = re.search(r"in a run of about (\d+) steps", found.notes[1])
    assert steps is not None
    assert int(steps[1]) == pytest.approx(10 / (0.1 * 0.02), rel=0.05)
    compiled = found.entries[1]
    assert compiled.speed is not None
    assert compiled.run_speed is not None
    assert compiled.speed.low > 1.1
    assert compiled.run_speed.high < 1.0


def test_where_the_default_compiles_a_short_run_does_not() -> None:
    """The sentence then gives the ratio of whole runs: 10 s and 100 steps of 0.012 s over 100 of 0.02 s."""
    compiled = space(
        factor("precision", "fp32"), Factor("compile", (Value("compile", ()), Value("", ("compile=off",))))
    )
    found, _ = Machine(lambda label: 0.02 * (0.6 if "compile" in label else 1.0), noise=0.0).advise(
        among=compiled, steps=100
    )
    assert (found.baseline, found.winner) == ("fp32 + compile", "fp32")
    (note,) = [note for note in found.notes if note.startswith("compiling takes 10 s")]
    assert "makes a step 1.67x as fast" in note
    said = sentence(replace(advice(), entries=found.entries, baseline=found.baseline, winner=found.winner, steps=100))
    assert said.startswith("fp32: 5.6x [5.6, 5.6] as fast as fp32 + compile in a run of 100 steps, compile time incl")


def test_compile_times_that_differ_by_chance_decide_nothing_where_all_compile() -> None:
    times = iter([13.0, 9.0, 8.0, 14.0] * 10)

    class Uneven(Machine):
        @property
        def compile_s(self) -> float:  # type: ignore[override]
            return next(times)

        @compile_s.setter
        def compile_s(self, value: float) -> None:
            pass

    among = space(factor("precision", "fp32 + compile", "bf16 + compile"), factor("micro", "", "micro=8"))
    found, _ = Uneven(lambda label: 0.02).advise(among=among, steps=100)
    assert found.winner == found.baseline == "fp32 + compile"
    faster, _ = Uneven(lambda label: 0.018 if "bf16" in label else 0.02).advise(among=among, steps=100)
    assert faster.winner == "bf16 + compile", "their compile times are alike, so steps are compared"


def test_where_new_blocks_speak_against_compiling_the_same_setting_without_it_is_advised() -> None:
    """10 s to compile and 4000 steps: 50 s instead of 80 s, until the steps take 0.019 s instead of 0.01 s."""
    slow: set[str] = set()
    here = Machine(
        lambda label: 0.04 if "16" not in label else (0.019 if slow else 0.01) if "compile" in label else 0.02
    )
    search = here.search(among=space(factor("precision", "fp32", "bf16"), factor("compile", "", "compile")), steps=4000)
    before_the_final_round(search, lambda: slow.add("compile"))
    healthy = {"faults": [], "notes": [], "healthy": True}
    chosen, _ = search.run(lambda chosen: objections(search.plan, chosen, lambda _: healthy)[0])
    found = conclude(search.plan, chosen)
    assert found.winner == "bf16"
    assert found.notes[0].startswith("bf16 + compile is not advised, because in the final round it was 0.9")
    assert found.notes[0].endswith("as fast as bf16 in a run of 4000 steps, compile time included")


def test_a_compiled_choice_that_is_not_confirmed_excludes_nothing_else() -> None:
    """The default fails, so bf16 takes its place; it is advised where compiling is slower in the final round."""
    slow: set[str] = set()
    here = Machine(lambda label: (0.019 if slow else 0.01) if "compile" in label else 0.02, broken={"fp32": "no"})
    here.broken |= {"fp32 (again)": "no", "fp32 + compile": "no"}
    search = here.search(among=space(factor("precision", "fp32", "bf16"), factor("compile", "", "compile")), steps=4000)
    before_the_final_round(search, lambda: slow.add("compile"))
    healthy = {"faults": [], "notes": [], "healthy": True}
    chosen, _ = search.run(lambda chosen: objections(search.plan, chosen, lambda _: healthy)[0])
    assert search.plan.excluded == {}
    assert conclude(search.plan, chosen).winner == "bf16"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (100, "fp32, train.py's default: no setting is clearly faster here in a run of 100 steps, numerics healthy"),
        (10_000, " steps; 1.82x [1.82, 1.82] as fast in a run of 10000 steps, compile time included"),
    ],
)
def test_the_sentence_tells_steps_from_whole_runs(steps: int, expected: str) -> None:
    """10 s to compile, and steps of 0.01 s instead of 0.02 s: 110 s instead of 200 s for 10,000 steps."""
    among = space(factor("precision", "fp32"), factor("compile", "", "compile"))
    found, _ = Machine(lambda label: 0.01 if "compile" in label else 0.02, noise=0.0).advise(among=among, steps=steps)
    said = sentence(
        replace(
            advice(),
            entries=found.entries,
            baseline=found.baseline,
            winner=found.winner,
            equal=found.equal,
            steps=steps,
            health={"healthy": True},
        )
    )
    assert expected in said, said


def test_a_setting_that_compiles_and_fails_is_not_recommended_for_longer_runs() -> None:
    """It would gain most, before it fails."""
    usual = machine().step_s
    here = Machine(lambda label: usual(label) * (0.5 if label == "bf16 + compile" else 1.0))
    here.broken["bf16 + compile"] = "later"
    found, _ = here.advise(steps=100)
    assert [entry.status for entry in found.entries if entry.candidate.label == "bf16 + compile"] == [FAILED]
    (note,) = [note for note in found.notes if note.startswith("compiling takes 10 s")]
    assert "(bf16 + compile)" not in note


def test_a_setting_with_slower_steps_stays_where_its_run_is_as_short() -> None:
    """Compiled, 1900 steps take half of 19 s, and 10 s to compile: not clearly faster, so both are timed to the end."""
    among = space(factor("precision", "fp32", "bf16"), factor("compile", "", "compile"))
    here = Machine(product_of({"bf16": 0.5, "compile": 0.5}), noise=0.05)
    search = here.search(among=among, steps=1900)
    search.run()
    halving = [done for done in search.log.rounds if done.kind == HALVING]
    assert halving
    for done in halving:
        assert len(done.times["bf16"]) == len(done.times["bf16 + compile"]) > 2


def test_the_table_has_a_column_for_whole_runs_where_some_settings_compile() -> None:
    found, _ = machine(noise=0.0).advise(steps=100)
    shown = replace(advice(), entries=found.entries, baseline="fp32", winner=found.winner, steps=100)
    console = Console(file=io.StringIO(), width=200)
    print_advice(shown, console, [])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run of 100" in said
    (line,) = [line for line in said.splitlines() if line.startswith("bf16 + compile ")]
    assert line.split()[3:6] == ["3.33x", "[3.33,", "3.33]"], line
    assert line.split()[6] == f"{2 / (10 + 0.6):.3g}x", "2 s over 10 s and 100 steps of 0.006 s"
    console = Console(file=io.StringIO(), width=80)
    print_advice(replace(shown, steps=100_000), console, [])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "speed   run of 100000   step, ms   memory" in said, "the terminal is wide enough for all columns"
    assert "run of 100000: speed in a run of 100000 steps, compile time included" in said
    only_eager = [entry for entry in found.entries if "compile" not in entry.candidate.label]
    console = Console(file=io.StringIO(), width=200)
    print_advice(replace(shown, entries=only_eager), console, [])
    assert "run of 100" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_default_whose_second_start_the_budget_cuts_off_keeps_what_was_measured() -> None:
    here = machine()
    bench = here.bench(Log())
    fp32 = SPACE.candidate(SPACE.baseline)
    bench.round("precisions", [fp32], 2, 100.0)
    before = bench.log.times("fp32")
    bench.close()
    here.broken["fp32"] = "hangs"
    late = bench.round("halving", [fp32], 2, here.now + 2.0)
    assert late == [fp32]
    assert bench.log.ok("fp32")
    assert bench.log.times("fp32") == before


def test_memory_that_compiling_saves_counts_however_short_the_run_is() -> None:
    found, _ = machine({"compile": 1.1}, memory=lambda label: 500 if "compile" in label else 1000).advise(
        steps=10, goal="memory"
    )
    assert "compile" in found.winner
    assert found.entries[0].never_pays


def test_it_is_not_said_that_compiling_never_pays_where_its_eager_form_was_not_timed() -> None:
    unknown = measured("fp32 + compile", 1.5, 900, "compile=default", compile_s=9.0)
    never = measured("fp32 + compile, micro=8", 0.8, 900, "compile=default", compile_s=8.0, never_pays=True)
    console = Console(file=io.StringIO(), width=200)
    print_advice(advice(unknown, never), console, [])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "compiling took 9.0 s: fp32 + compile\n" in said
    assert "compiling took 8.0 s and never pays: fp32 + compile, micro=8\n" in said
    assert "compiling took 14.0 s and pays after 140 steps: bf16 + compile\n" in said
