"""Verdicts on synthetic runs: pairs by seed, failures, the null arm, what was not measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from evidence.comparison.judge import ArmResult, judge
from evidence.runs import DIVERGED, Arm, Outcome, _cpu_seconds, _last_error, _share_of_others
from mantissa.quality import NOT_JUDGED
from mantissa.statistics import EQUIVALENT, INCONCLUSIVE, WORSE
from tests.evidence.ended import ended

FP32, BF16 = Arm("fp32", ("precision=fp32",)), Arm("bf16", ("precision=bf16",))
NULL = Arm("null", FP32.overrides, seed_shift=1000)
ARMS = [FP32, BF16, NULL]
MARGIN = 0.003
STEPS = (10, 20, 30)
FEW = "2 seeds are too few; use 5"


class Runs:
    """Writes run folders as train.py leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: list[Outcome] = []

    def add(
        self, arm: Arm, seed: int, losses: Sequence[float | None] = (3.0, 2.5, 2.0), peak_bytes: int = 0, **summary: Any
    ) -> None:
        ledger = {"weights": peak_bytes} if peak_bytes else None
        self.outcomes.append(ended(self.folder, arm.label, seed, STEPS, losses, ledger, **summary))

    def fail(self, arm: Arm, seed: int, exit_code: int, why: str = "") -> None:
        self.outcomes.append(Outcome(arm.label, seed, self.folder / f"{arm.label}-s{seed}", exit_code, why))

    def judged(self, arms: list[Arm] = ARMS) -> dict[str, ArmResult]:
        return {result.label: result for result in judge(arms, "fp32", self.outcomes, MARGIN)}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_the_speed_of_fp32_arithmetic_is_compared_with_no_other_formats(runs: Runs) -> None:
    """Two arms that both use it can be compared: then it says something about what else differs."""
    why, compiled = "bf16 matmuls: fp32 arithmetic", Arm("compiled", ("precision=bf16", "compile=default"))
    for seed in range(3):
        runs.add(FP32, seed, peak_bytes=100)
        runs.add(BF16, seed, peak_bytes=60, units_per_s=80.0, fp32_arithmetic=why)
        runs.add(compiled, seed, units_per_s=160.0, fp32_arithmetic=why)
    found = runs.judged([FP32, BF16])
    assert (found["bf16"].speed.ratio, found["bf16"].not_timed) == (None, why)
    assert found["bf16"].memory.ratio
    assert found["bf16"].memory.ratio.mean == pytest.approx(0.6)
    assert (found["fp32"].not_timed, found["bf16"].quality.verdict) == ("", EQUIVALENT)
    both = {arm.label: arm for arm in judge([BF16, compiled], "bf16", runs.outcomes, MARGIN)}
    assert both["compiled"].speed.ratio
    assert both["compiled"].speed.ratio.mean == pytest.approx(2)


def test_ratios_are_of_runs_of_the_same_seed(runs: Runs) -> None:
    """The machine slowed down fourfold between the seeds, which the ratios must not see; the order is shuffled."""
    runs.add(BF16, 1, units_per_s=52.5, losses=(4.0, 3.5, 3.03))
    runs.add(FP32, 0, units_per_s=100.0)
    runs.add(FP32, 1, units_per_s=25.0, losses=(4.0, 3.5, 3.0))
    runs.add(BF16, 0, units_per_s=190.0, losses=(3.0, 2.5, 2.0))
    found = runs.judged([FP32, BF16])
    speed = found["bf16"].speed
    assert sorted(speed.ratios) == pytest.approx([1.9, 2.1])
    assert speed.ratio is not None
    assert speed.ratio.mean == pytest.approx(stats.gmean([1.9, 2.1]))
    assert sorted(found["bf16"].quality.differences) == pytest.approx([0.0, 0.01])
    assert (found["fp32"].speed.ratio, found["fp32"].speed.ratios, found["fp32"].quality.verdict) == (None, [], "")


def test_a_failed_seed_leaves_the_other_pairs(runs: Runs) -> None:
    for seed in range(4):
        runs.add(FP32, seed, units_per_s=100.0 + seed)
    runs.add(BF16, 0, units_per_s=200.0)
    runs.fail(BF16, 1, 1, "the disk is full")
    runs.add(BF16, 2, units_per_s=204.0)
    runs.add(BF16, 3, units_per_s=206.0)
    bf16 = runs.judged([FP32, BF16])["bf16"]
    assert (bf16.seeds, bf16.failures) == ([0, 2, 3], {1: "the disk is full"})
    assert bf16.speed.ratios == pytest.approx([2.0, 2.0, 2.0])
    assert bf16.quality.verdict == EQUIVALENT
    assert bf16.quality.why == "only 3 of 4 pairs finished"


def test_a_seed_that_only_the_baseline_lost_is_not_a_pair_and_is_reported(runs: Runs) -> None:
    runs.fail(FP32, 0, 3)
    runs.add(BF16, 0, units_per_s=900.0, losses=(9.0, 9.0, 9.0))
    for seed in (1, 2, 3):
        runs.add(FP32, seed)
        runs.add(BF16, seed)
    found = runs.judged([FP32, BF16])
    assert found["fp32"].failures == {0: "exit code 3"}
    assert found["bf16"].speed.ratios == [1.0, 1.0, 1.0]
    assert found["bf16"].quality.differences == [0.0, 0.0, 0.0]
    assert found["bf16"].quality.why == "only 3 of 4 pairs finished; the baseline diverged in 1 where this arm did not"


@pytest.mark.parametrize("how", ["exit code", "last loss"])
def test_an_arm_that_diverges_where_the_baseline_does_not_is_worse(runs: Runs, how: str) -> None:
    for seed in range(3):
        runs.add(FP32, seed)
        if seed < 2:
            runs.add(BF16, seed)
        elif how == "exit code":
            runs.fail(BF16, seed, 3)
        else:
            runs.add(BF16, seed, losses=(3.0, 2.5, None))
    quality = runs.judged([FP32, BF16])["bf16"].quality
    assert (quality.verdict, quality.test) == (WORSE, None)
    assert quality.why == "1 of 3 runs diverged where the baseline's did not"


def test_where_the_baseline_diverges_too_nothing_is_worse(runs: Runs) -> None:
    for arm in (FP32, BF16):
        runs.fail(arm, 0, 3)
        for seed in (1, 2, 3):
            runs.add(arm, seed)
    assert runs.judged([FP32, BF16])["bf16"].quality.verdict == EQUIVALENT


def test_one_pair_gives_no_interval_and_what_was_not_measured_is_none_and_never_0(runs: Runs) -> None:
    runs.add(FP32, 0)
    runs.add(BF16, 0, units_per_s=200.0)
    for arm in (FP32, BF16):
        runs.fail(arm, 1, 1)
    bf16 = runs.judged([FP32, BF16])["bf16"]
    assert (bf16.speed.ratios, bf16.speed.ratio, bf16.speed.value) == ([2.0], None, None)
    assert (bf16.quality.verdict, bf16.quality.test) == (NOT_JUDGED, None)
    assert bf16.speed.why == bf16.quality.why == "1 of 2 pairs finished, and a verdict needs 3"
    runs.outcomes.clear()
    for seed in (2, 3):
        runs.add(FP32, seed, units_per_s=None)
        runs.add(BF16, seed)
    for arm in runs.judged([FP32, BF16]).values():
        assert (arm.memory.value, arm.memory.values, arm.ledger) == (None, [], None)  # no ledger on a CPU
        assert arm.speed.ratio is None


def test_two_seeds_are_too_few_for_a_verdict_even_where_both_runs_diverged(runs: Runs) -> None:
    """Their values are reported all the same."""
    hot = Arm("hot", ())
    for seed in range(2):
        runs.add(FP32, seed)
        runs.add(BF16, seed, units_per_s=200.0)
        runs.fail(hot, seed, DIVERGED)
    _, bf16, diverged = judge([FP32, BF16, hot], "fp32", runs.outcomes, MARGIN)
    assert bf16.speed.ratio
    assert (bf16.speed.why, bf16.quality.verdict, bf16.quality.why) == (FEW, NOT_JUDGED, FEW)
    assert diverged.quality.verdict == NOT_JUDGED
    assert diverged.quality.why == f"2 of 2 runs diverged where the baseline's did not; {FEW}"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_while_others_used_the_cpus_a_speed_is_not_judged_and_the_loss_is(runs: Runs, device: str) -> None:
    """Of a GPU the CPUs say little."""
    for seed in range(3):
        for arm, share in ((FP32, 0.02), (BF16, 0.3)):
            runs.add(arm, seed, hardware={"device": device})
            runs.outcomes[-1].others_cpu = share
    bf16 = runs.judged([FP32, BF16])["bf16"]
    busy = "other processes used 30% of the CPUs; measure again on a quiet machine, with another name=…"
    assert (bf16.speed.why, bf16.quality.verdict) == ("" if device == "cuda:0" else busy, EQUIVALENT)


@pytest.mark.parametrize(("what", "speed", "shift"), [("speed", 80.0, 0.0), ("loss", 100.0, -0.0018)])
def test_where_the_null_arm_excludes_equality_that_quantity_is_not_judged(
    runs: Runs, what: str, speed: float, shift: float
) -> None:
    for seed, noise in enumerate((0.0, 0.0001, -0.0001)):
        runs.add(FP32, seed)
        runs.add(BF16, seed, losses=(3.0, 2.5, 2.0 * (1 + noise)), units_per_s=200.0 * (1 + noise))
        runs.add(NULL, seed, losses=(3.0, 2.5, 2.0 * (1 + shift + noise)), units_per_s=speed * (1 + noise))
    _, bf16, null = judge(ARMS, "fp32", runs.outcomes, MARGIN)
    why = "the baseline with other seeds differs from itself, so the noise is not known; use more seeds, such as 6"
    expected = (why, EQUIVALENT) if what == "speed" else ("", NOT_JUDGED)
    assert (bf16.speed.why, bf16.quality.verdict) == expected
    assert (bf16.quality.why, null.speed.why) == ("" if what == "speed" else why, "")


@pytest.mark.parametrize(("null_fails", "verdict"), [(False, WORSE), (True, NOT_JUDGED)])
def test_an_arm_that_alone_diverges_is_worse_whatever_the_noise(runs: Runs, null_fails: bool, verdict: str) -> None:
    for seed, noise in enumerate((0.0, 0.0001, -0.0001)):
        runs.add(FP32, seed)
        runs.fail(BF16, seed, DIVERGED)
        if null_fails and seed == 0:
            runs.fail(NULL, seed, DIVERGED)
        else:
            runs.add(NULL, seed, losses=(3.0, 2.5, 2.0 * (1.0018 + noise)))
    _, bf16, _ = judge(ARMS, "fp32", runs.outcomes, MARGIN)
    assert bf16.quality.verdict == verdict
    assert null_fails or bf16.quality.why == "3 of 3 runs diverged where the baseline's did not"


def test_memory_is_the_allocators_on_cuda_and_the_ledgers_elsewhere(runs: Runs) -> None:
    for seed in (0, 1):
        runs.add(FP32, seed, hardware={"device": "cuda:0"}, peak_bytes=4_000)
        runs.add(BF16, seed, hardware={"device": "cpu"}, peak_bytes=3_500, skipped_steps=2)
    found = runs.judged([FP32, BF16])
    assert found["fp32"].memory.values == [7_000, 7_000]
    assert found["bf16"].memory.values == [3_500, 3_500]
    assert found["bf16"].ledger == {"weights": 3_500}
    assert found["bf16"].skipped_steps == 4


def test_a_negative_loss_keeps_its_direction(runs: Runs) -> None:
    """A log-density may be below 0; higher is worse all the same."""
    for seed in range(3):
        runs.add(FP32, seed, losses=(0.0, -1.0, -2.0))
        runs.add(BF16, seed, losses=(0.0, -1.0, -1.0))
    quality = runs.judged([FP32, BF16])["bf16"].quality
    assert (quality.differences, quality.verdict) == ([0.5, 0.5, 0.5], WORSE)


def test_nothing_is_relative_to_a_loss_of_0(runs: Runs) -> None:
    for seed in range(6):
        runs.add(FP32, seed, losses=(1.0, 1.0, 0.0 if seed < 3 else 0.5))
        runs.add(BF16, seed, losses=(1.0, 1.0, 0.5))
    quality = runs.judged([FP32, BF16])["bf16"].quality
    assert (quality.verdict, quality.why.startswith("the baseline is 0 with 3 of 6 seeds")) == (NOT_JUDGED, True)


def test_the_work_of_other_processes_is_not_that_of_descendants_also_of_orphans() -> None:
    """As the server of a loader's workers is one, when its run has ended."""
    orphan = "import time\nwhile time.process_time() < 0.5: pass"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {orphan!r}]).pid)"
    before = _cpu_seconds()
    pid = int(subprocess.check_output([sys.executable, "-c", parent]))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a child now
    after = _cpu_seconds()
    os.waitpid(pid, 0)
    passed, worked, own = (now - then for now, then in zip(after, before, strict=True))
    assert 0.49 <= own <= worked + 0.1 <= passed + 0.2
    assert _share_of_others(before, after) == pytest.approx(max(0, worked - own) / passed)
    assert _share_of_others((0.0, 0.0, 0.0), (10.0, 6.0, 5.0)) == 0.1


def test_an_error_is_found_behind_what_was_still_buffered(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1  loss 2\nstep 2  loerror: the gradients are not finite\nss 3\n")
    assert _last_error(log) == "the gradients are not finite"
    log.write_text("one\n\ntwo\nthree\nfour\n")
    assert _last_error(log) == "two / three / four"


def test_arms_of_one_comparison_are_corrected_for_their_number_and_the_null_arm_is_none_of_them(runs: Runs) -> None:
    """One arm by itself is EQUIVALENT; beside five others that are not, the same runs no longer suffice."""
    others = [Arm(f"other{number}", ()) for number in range(5)]
    for seed, difference in enumerate((0.0000, 0.0033, 0.0006, 0.0022, 0.0011)):
        runs.add(FP32, seed)
        runs.add(BF16, seed, losses=(3.0, 2.5, 2.0 * (1 + difference)))
        runs.add(NULL, seed, losses=(3.0, 2.5, 2.0 * (1 - difference)))
        for number, arm in enumerate(others):
            runs.add(arm, seed, losses=(3.0, 2.5, 2.0 * (1 + difference + 0.001 * (number + 1))))
    alone = runs.judged()["bf16"].quality
    assert alone.test is not None
    assert (alone.verdict, alone.test.difference.level) == (EQUIVALENT, pytest.approx(0.92))
    among = runs.judged([*ARMS, *others])["bf16"].quality
    assert among.test is not None
    assert 0.04 / 6 < among.test.p_equivalent < 0.04
    assert among.verdict == INCONCLUSIVE


def test_an_arm_that_failed_still_counts_among_the_arms(runs: Runs) -> None:
    failed = Arm("failed", ())
    for seed, difference in enumerate((0.0, 0.0001, -0.0001)):
        runs.add(FP32, seed)
        runs.add(BF16, seed, losses=(3.0, 2.5, 2.0 * (1 + difference)))
        runs.fail(failed, seed, 1, "no memory")
    quality = runs.judged([FP32, BF16, failed])["bf16"].quality
    assert quality.test is not None
    assert quality.test.difference.level == pytest.approx(1 - 2 * 0.04 / 2)
