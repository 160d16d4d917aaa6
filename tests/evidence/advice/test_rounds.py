"""The search on machines of which every time is known."""

from __future__ import annotations

import math
import statistics

import pytest

from evidence.advice.conclude import conclude
from evidence.advice.schema import FAILED, FINAL, HUNG, LEFT_OUT, Candidate, Log
from evidence.advice.search import AHEAD, BUDGET, FINAL_REPEATS, SEVERAL
from evidence.intervals import ratio_interval
from tests.evidence.advice.machine import SPACE, Machine, factor, settings, space
from trainer.errors import RunError, UserError


def product_of(factors: dict[str, float], base: float = 0.02) -> object:
    def step_s(label: str) -> float:
        return base * math.prod(factor for words, factor in factors.items() if words in label)

    return step_s


FACTORS = {"bf16": 0.5, "fp16": 0.6, "compile": 0.6, "micro=32": 0.8, "micro=8": 1.3, "eager": 1.4, "fused=false": 1.1}


def machine(factors: dict[str, float] = FACTORS, **more: object) -> Machine:
    return Machine(product_of(factors), **more)  # type: ignore[arg-type]


def test_the_changes_that_help_are_combined() -> None:
    here = machine()
    found, stopped = here.advise()
    assert found.winner == "bf16 + compile, micro=32"
    assert stopped == AHEAD
    assert found.baseline == "fp32"
    speed = found.entries[0].speed
    assert speed is not None
    assert speed.low < 1 / (0.5 * 0.6 * 0.8) < speed.high
    assert len(set(here.started)) < len(settings()) / 3, "the whole grid was not needed"
    entry = found.entries[0]
    assert entry.compile_s == pytest.approx(10, rel=0.05)
    assert entry.pays_after_steps == pytest.approx(10 / (0.02 * 0.5 * 0.8 * 0.4), rel=0.05)


def test_a_pair_that_helps_only_together_is_found_beside_the_best() -> None:
    """The chunked loss costs time alone, and saves time once compiled: the neighbours of the best show it."""

    def step_s(label: str) -> float:
        return (
            0.02
            * (0.5 if "compile" in label else 1.0)
            * (1.0 if "eager" not in label else 0.7 if "compile" in label else 1.05)
        )

    found, _ = Machine(step_s).advise()
    assert found.winner == "fp32 + compile, attention=eager"


def test_the_reported_ratio_is_of_blocks_that_played_no_part_in_the_choice() -> None:
    here = machine(noise=0.05)
    search = here.search()
    chosen, _ = search.run()
    found = conclude(search.plan, chosen)
    final = search.log.rounds[-1]
    assert final.kind == FINAL
    own = [base / step for step, base in zip(final.times[found.winner], final.times["fp32"], strict=True)]
    assert found.entries[0].speed == ratio_interval(own)


def test_of_equal_settings_none_is_called_faster() -> None:
    """The best of many noisy settings looks faster than it is: the final round must not repeat that."""
    wrong = 0
    shown = []
    among = space(factor("precision", "fp32", "bf16"), factor("micro", "", "micro=8", "micro=16", "micro=32"))
    for seed in range(16):
        here = machine({}, noise=0.04, seed=seed)
        found, _ = here.advise(among=among, budget_s=300.0)
        wrong += found.winner != "fp32"
        shown += [math.log(entry.speed.mean) for entry in found.entries if entry.speed and entry.rounds > 1]
    assert wrong <= 1, "a two-sided interval of 95 % is wrong on this side in one of forty"
    assert abs(statistics.fmean(shown)) < 0.02


def test_the_simplest_of_equal_settings_is_advised() -> None:
    found, stopped = machine({"bf16": 0.5, "micro=32": 0.995}, compile_s=1.0).advise()
    assert found.winner == "bf16"
    assert stopped == SEVERAL
    assert "bf16, micro=32" in found.equal


def test_a_short_run_is_not_compiled() -> None:
    """Compiled, a step of 0.008 s takes 0.6 of that: 10 s are saved after 3125 steps."""
    here = machine(noise=0.0)
    found, stopped = here.advise(steps=100)
    assert found.winner == "bf16, micro=32"
    assert stopped == AHEAD
    assert found.notes == [
        "compiling takes 10 s and makes a step 1.67x as fast (bf16 + compile); if it does the same for bf16, micro=32, "
        "it saves time in a run of about 3125 steps or more; this advice is for 100 steps, so for a longer run call "
        "advise.py with steps="
    ]
    compiled = {label for label in here.started if "compile" in label}
    assert compiled == {"bf16 + compile"}, "once is enough to know that it does not pay"
    assert found.entries[0].speed is not None
    assert found.entries[0].speed.mean == pytest.approx(1 / (0.5 * 0.8), rel=0.02)
    assert found.entries[0].speed.count <= FINAL_REPEATS, "not of the blocks that decided against compiling"


def test_what_fails_or_hangs_is_named_and_the_others_go_on() -> None:
    broken = {"fp16": "RuntimeError: no such kernel", "bf16, attention=eager": "hangs", "bf16, micro=32": "later"}
    here = machine(broken=broken)
    found, _ = here.advise()
    entries = {entry.candidate.label: entry for entry in found.entries}
    assert (entries["fp16"].status, entries["fp16"].reason) == (FAILED, "RuntimeError: no such kernel")
    assert entries["bf16, attention=eager"].status == HUNG
    assert entries["bf16, micro=32"].status == FAILED
    assert found.winner.startswith("bf16")
    assert here.started.count("fp16") == 1


def test_a_compilation_without_an_end_is_left_out_and_tried_again_with_a_larger_budget() -> None:
    here = machine(broken={"bf16 + compile": "hangs"})
    search = here.search(budget_s=60.0)
    chosen, stopped = search.run()
    found = conclude(search.plan, chosen)
    entry = next(entry for entry in found.entries if entry.candidate.label == "bf16 + compile")
    assert entry.status == LEFT_OUT
    assert "compiling did not end within" in entry.reason
    assert stopped == BUDGET
    assert not [label for label in here.started if "compile" in label and label != "bf16 + compile"]
    found, _ = machine().advise(log=Log.from_dict(search.log.to_dict()))
    assert found.winner == "bf16 + compile, micro=32"


def test_a_default_that_fails_gives_its_place_to_the_first_that_works() -> None:
    found, _ = machine(broken={"fp32": "out of memory", "fp32 (again)": "out of memory"}).advise()
    assert found.baseline == "bf16"
    assert found.winner == "bf16 + compile, micro=32"


def test_where_all_fail_the_first_error_is_reported() -> None:
    broken = {SPACE.candidate(setting).label: f"error {number}" for number, setting in enumerate(settings())}
    broken["fp32 (again)"] = "also"
    with pytest.raises(RunError, match="the first error: fp32: error 0") as caught:
        machine(broken=broken).advise()
    assert caught.value.exit_code == 1


def test_a_budget_without_time_for_a_pair_is_refused_with_what_it_needs() -> None:
    here = machine(start_s=30.0)
    with pytest.raises(
        UserError, match=r"budget_minutes=0\.5 is too short .* need 6\d\.\d s here .* set budget_minutes="
    ):
        here.advise(budget_s=30.0)
    assert here.started == ["fp32"]


@pytest.mark.parametrize("budget_s", [15.0, 40.0, 120.0, 600.0])
def test_the_budget_is_kept(budget_s: float) -> None:
    here = machine()
    _, stopped = here.advise(budget_s=budget_s)
    assert here.now < 1.25 * budget_s
    assert (stopped == BUDGET) == (budget_s < 100)


def test_what_there_was_no_time_for_is_listed() -> None:
    found, _ = machine().advise(budget_s=20.0)
    late = [entry for entry in found.entries if entry.status == LEFT_OUT]
    assert late
    assert all("no time" in entry.reason for entry in late)


def test_on_a_busy_machine_only_large_ratios_count() -> None:
    slightly, _ = machine({"bf16": 0.97}, noise=0.15, seed=1).advise()
    assert slightly.noise > 0.2
    assert slightly.winner == "fp32"
    assert any("busy" in note for note in slightly.notes)
    clearly, _ = machine({"bf16": 0.25}, noise=0.15, seed=1).advise()
    assert clearly.winner.startswith("bf16")


@pytest.mark.parametrize("seed", range(4))
def test_single_blocks_that_another_program_slows_down_decide_nothing(seed: int) -> None:
    found, _ = machine(spikes=0.07, seed=seed).advise()
    assert found.winner == "bf16 + compile, micro=32"


def test_what_is_forecast_not_to_fit_is_never_started() -> None:
    among = space(factor("precision", "fp32", "bf16"), factor("micro", "", "micro=32"))
    among.refused = lambda candidate: "too large" if "micro=32" in candidate.label else None
    here = machine()
    here.advise(among=among)
    assert set(here.started) == {"fp32", "fp32 (again)", "bf16"}


def test_processes_that_do_not_fit_together_take_turns() -> None:
    here = machine(room=3000)
    highest = []
    search = here.search()
    runner = search.bench.runner
    search.bench.runner = lambda candidate: (highest.append(len(here.alive)), runner(candidate))[1]
    chosen, _ = search.run()
    assert conclude(search.plan, chosen).winner == "bf16 + compile, micro=32"
    assert max(highest) <= 2
    assert here.started.count("fp32") > 1


def test_a_candidate_without_enough_memory_beside_others_runs_alone() -> None:
    here = machine(
        device_bytes=5000, memory=lambda label: 9000 if "fp16" in label else 4500 if "bf16" in label else 1000
    )
    found, _ = here.advise()
    entries = {entry.candidate.label: entry for entry in found.entries}
    assert found.winner.startswith("bf16")
    assert (entries["fp16"].status, entries["fp16"].reason) == (FAILED, "out of memory: beside 0 others")


def test_what_a_start_without_enough_memory_has_compiled_counts_as_compile_time() -> None:
    here = machine(device_bytes=5000, memory=lambda label: 4500, noise=0.0)
    bench = here.bench(Log())
    for label in ("fp32", "bf16 + compile"):
        assert bench.begin(Candidate(label, ()), 1000.0)
    assert list(bench.alive) == ["bf16 + compile"]
    record = bench.log.records["bf16 + compile"]
    step_s = here.step_s("bf16 + compile")
    once = here.start_s + here.compile_s + 2 * step_s
    assert record.start_s == pytest.approx(2 * once)
    assert record.warm_up_s == pytest.approx([once + here.compile_s + step_s, step_s])


def test_least_memory_in_at_most_one_and_a_half_times_the_time() -> None:
    def memory(label: str) -> int:
        return 1000 - 100 * ("micro=8" in label) - 300 * ("bf16" in label) - 600 * ("eager" in label)

    factors = {"bf16": 0.8, "micro=8": 1.2, "attention=eager": 2.0}
    found, _ = machine(factors, memory=memory).advise(goal="memory")
    assert found.winner == "bf16, micro=8"
    assert found.entries[0].memory_bytes == 600


def test_an_interrupted_search_continues_where_it_was() -> None:
    class Stop(Exception):
        pass

    here, saved = machine(), []

    def stop() -> None:
        saved.append(search.log.to_dict())
        if len(saved) == 2:
            raise Stop

    search = here.search(save=stop)
    with pytest.raises(Stop):
        search.run()
    log = Log.from_dict(saved[-1])
    assert [done.kind for done in log.rounds] == ["precisions", "single changes"]
    again = machine()
    found, _ = again.advise(log=log)
    assert found.winner == "bf16 + compile, micro=32"
    assert "fp16" not in again.started, "its round is done"
    assert log.spent_s > saved[-1]["spent_s"]
