"""The final round and what follows it: new blocks for whatever is advised, also where time or memory is short."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evidence.advice.conclude import conclude
from evidence.advice.rounds import FINAL, Log
from evidence.advice.schema import FAILED, LEFT_OUT, MEASURED
from evidence.advice.search import FINAL_LEAST
from evidence.advice.text import print_advice
from evidence.intervals import ratio_interval
from tests.evidence.advice.machine import Machine, factor, space
from tests.evidence.advice.made import advice, measured
from tests.evidence.advice.test_rounds import machine, product_of
from trainer.errors import RunError


def of_new_blocks(search_log: Log, label: str, base: str) -> None:
    """Fail unless both were timed in a final round."""
    assert len(search_log.ratios(label, base, [FINAL])) >= 2


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
    assert found.entries[0].speed == ratio_interval(search.log.ratios(found.winner, "fp32", [FINAL]))
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
    of_new_blocks(again.log, again.plan.label(chosen), "fp32")


def test_a_default_that_fails_in_the_final_round_gives_its_place_to_the_next() -> None:
    here = machine()
    search = here.search()
    base_round = search.bench.round

    def round_without_the_default(kind: str, *of: object) -> object:
        if kind == FINAL and "fp32" not in here.broken:
            here.broken["fp32"] = "out of memory"
            search.bench.close()
        return base_round(kind, *of)  # type: ignore[arg-type]

    search.bench.round = round_without_the_default  # type: ignore[assignment, method-assign]
    chosen, _ = search.run()
    found = conclude(search.plan, chosen)
    assert search.log.records["fp32"].status == FAILED
    assert found.baseline == "bf16"
    of_new_blocks(search.log, found.winner, "bf16")


def test_where_nothing_works_any_more_the_first_error_is_reported() -> None:
    here = Machine(product_of({}), broken={"bf16": "no"})  # type: ignore[arg-type]
    search = here.search(among=space(factor("precision", "fp32", "bf16")))
    base_round = search.bench.round

    def round_without_anything(kind: str, *of: object) -> object:
        if kind == FINAL:
            here.broken |= {"fp32": "gone", "fp32 (again)": "gone"}
            search.bench.close()
        return base_round(kind, *of)  # type: ignore[arg-type]

    search.bench.round = round_without_anything  # type: ignore[assignment, method-assign]
    with pytest.raises(RunError, match="works any more; the first error: fp32: gone"):
        search.run()


def test_an_interval_that_happens_to_be_narrow_does_not_end_the_final_round_at_once() -> None:
    search = machine(noise=0.0).search()
    chosen, _ = search.run()
    assert len(search.log.ratios(search.plan.label(chosen), "fp32", [FINAL])) == FINAL_LEAST


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
    assert entry.speed.count >= 8


def test_where_all_have_faults_the_default_is_advised_and_not_examined() -> None:
    among = space(factor("precision", "fp32", "bf16"), factor("compile", "", "compile"))
    labels = [among.candidate(setting).label for setting in among.product()]
    here = machine()
    found, _ = here.advise(among=among, faults={label: ["a fault"] for label in labels})
    assert found.winner == "fp32"
    assert "fp32" not in here.examined
    assert len(found.notes) == len(here.examined) == 2


def test_what_does_not_pay_is_replaced_by_the_best_that_does_not_compile() -> None:
    """Not by the same setting without compiling, which is slower than another one here."""

    def step_s(label: str) -> float:
        base, eager_form = 0.03 if "16" in label else 0.02, "attention=eager" in label
        if "compile" in label:
            return base * (0.3 if eager_form else 0.5)
        return base * (1.2 if eager_form else 0.8 if "micro=32" in label else 1.0)

    found, _ = Machine(step_s).advise(steps=10)
    assert found.winner == "fp32, micro=32"
    assert any("and this run has 10, so the advice is without it" in note for note in found.notes)
    assert found.entries[0].speed is not None
    assert found.entries[0].speed.count >= FINAL_LEAST


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
