"""Claims: mistakes in files, what a machine lacks, and verdicts of runs that are made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from evidence.claims import claims, reproduce
from evidence.claims.claims import CONFIRMED, REFUTED, Claim, Criterion, lacking, load, names
from evidence.claims.reproduce import main
from evidence.runs import Arm, Runner
from mantissa.verdict.judge import Ratio
from mantissa.verdict.runs import Run, by_arm
from mantissa.verdict.statistics import INCONCLUSIVE, Interval
from tests.helpers import CPU, PROJECT
from trainer.config.compose import compose
from trainer.config.options import run
from trainer.errors import UserError
from trainer.files import read_json
from trainer.hardware import Hardware

H200 = Hardware(torch.device("cuda", 0), "NVIDIA H200", 139 * 2**30, 16, (9, 0))
T4 = Hardware(torch.device("cuda", 0), "Tesla T4", 15 * 2**30, 4, (7, 5))
AMX = replace(CPU, cpu_flags=frozenset({"amx_bf16"}))
SPEED = {"measure": "speed", "arm": "bf16", "over": "fp32", "at_least": 2.0, "published": "2x"}
LOSS = {"measure": "loss", "arm": "bf16", "over": "fp32"}
CLAIM = {
    "statement": "bf16 is twice as fast",
    "source": "a hunch",
    "published": "2x",
    "setups": {"net": "recipe=bignet steps=3"},
    "arms": {"fp32": "net precision=fp32", "bf16": "net precision=bf16 batch_size=8"},
    "criteria": [SPEED, LOSS],
}
WIDE = "fp16 matmuls: fp32 arithmetic, this CPU has no fp16 instructions"


@pytest.fixture(autouse=True)
def not_timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By format, why its speed is not tested here: it is, unless a test says so."""
    reasons: dict[str, str] = {}
    monkeypatch.setattr(claims, "not_timed_here", lambda mode, hardware: reasons.get(mode))
    return reasons


def claim(tmp_path: Path, **changes: object) -> Claim:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CLAIM | changes, sort_keys=False))
    return load("mine", tmp_path)


# --- files ---


def test_a_file_becomes_arms_that_end_in_their_own_overrides(tmp_path: Path) -> None:
    mine = claim(tmp_path, on_cuda={"net": "steps=50"}, asks={"data.path": "a text"})
    fp32, bf16 = mine.runs(["fp32", "bf16"], ["data.path=here", "x=1"], T4)
    own = ("precision=bf16", "batch_size=8", "device=cuda:0", "data.path=here")
    assert bf16.overrides[-7:-4] == ("recipe=bignet", "steps=3", "steps=50")
    assert (bf16.overrides[-4:-2], bf16.overrides[-1]) == (own[:2], own[-1])
    assert {"profiler=none", "checkpoint=none"} <= set(fp32.overrides)
    (on_cpu,) = claim(tmp_path, criteria=[SPEED | {"measure": "memory"}]).runs(["fp32"], [], CPU)
    assert "steps=50" not in on_cpu.overrides
    assert "profiler=memory" in on_cpu.overrides


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sorce": "x"}, "sorce: Key 'sorce' not in 'Claim'"),
        (
            {"arms": {"fp32": "nett precision=fp32"}},
            "arms.fp32=nett is unknown (net); set arms.fp32=net",
        ),
        ({"arms": {"a b": "net"}}, "the arm 'a b' needs a name of letters"),
        (
            {"criteria": [SPEED | {"arm": "bf61"}]},
            "criteria on speed=bf61 is unknown (bf16, fp32)",
        ),
        ({"criteria": []}, "criteria: there is none"),
        ({"criteria": [SPEED | {"at_most": 1.0}]}, "at_least: 2 is above at_most: 1; swap them"),
        ({"repeats": 2}, "repeats: 2 is too few; set repeats: 3"),
        ({"needs": ["cude"]}, "cude is unknown"),
        ({"criteria": [SPEED | {"at_least": "2x"}]}, "at_least: Value '2x' of type 'str'"),
        ({"criteria": [SPEED | {"measure": "sped"}]}, "measure=sped is unknown"),
        ({"criteria": [{"measure": "speed"}]}, "missing mandatory value: arm"),
        (b"statement: \xe4", "'utf-8' codec"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, changes: dict[str, object] | bytes, words: str) -> None:
    given = changes if isinstance(changes, bytes) else yaml.safe_dump(CLAIM | changes).encode()
    (tmp_path / "mine.yaml").write_bytes(given)
    with pytest.raises(UserError) as caught:
        load("mine", tmp_path)
    assert str(caught.value).startswith("evidence/claims/published/mine.yaml: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("need", "hardware", "words"),
    [
        ("cuda", CPU, "an NVIDIA GPU"),
        ("tf32", T4, "TF32 (an NVIDIA GPU from Ampere on)"),
        ("native_bf16", CPU, "bf16 in hardware"),
        ("native_bf16", AMX, ""),
        ("A100", replace(H200, name="NVIDIA A100-SXM4-80GB"), ""),
        ("A100", replace(H200, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb"), "the GPU A100"),  # a part of one
        ("A100", replace(H200, name="NVIDIA RTX A1000"), "the GPU A100"),
        ("80GiB", replace(H200, memory_bytes=85_000_000_000), ""),  # what an H100 of 80 GB reports
        ("80GiB", replace(H200, memory_bytes=48 * 2**30), "80GiB of GPU memory"),
    ],
)
def test_what_a_machine_lacks(need: str, hardware: Hardware, words: str) -> None:
    assert lacking([need], hardware) == ([words] if words else [])


@pytest.mark.parametrize("name", names())
def test_every_claim_here_composes_and_has_a_figure(name: str) -> None:
    here = load(name)
    assert here.published
    for arm in here.runs(list(here.arms), [f"{key}={PROJECT / 'README.md'}" for key in here.asks], CPU):
        compose(arm.overrides)


def test_the_claim_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (PROJECT / "docs/results.md").read_text()
    block = re.search(r"^```yaml\n# evidence/claims/published/(\S+)\.yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block
    (tmp_path / f"{block[1]}.yaml").write_text(block[2])
    assert len(load(block[1], tmp_path).arms) == 2


# --- verdicts ---


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"at_least": 1.9}, CONFIRMED),
        ({"at_least": 2.2}, REFUTED),
        ({"at_least": 2.0}, INCONCLUSIVE),
        ({"at_most": 2.1}, CONFIRMED),
        ({"at_most": 1.8}, REFUTED),
        ({"at_least": 1.0, "at_most": 2.0}, INCONCLUSIVE),
        ({"at_least": 2.0, "at_most": 2.05}, INCONCLUSIVE),  # both ends are outside, the mean may be within
        ({}, ""),
    ],
)
def test_an_interval_decides_only_where_no_bound_is_in_it(bounds: dict[str, float], verdict: str) -> None:
    beside = Interval(9.0, 9.0, 9.0, 0.95, 3)
    interval = Interval(2.02, 1.9, 2.1, 0.95, 3)
    assert Criterion("speed", "fast", "slow", **bounds).verdict(Ratio(beside, ratio=interval)) == verdict
    assert Criterion("speed", "fast", **bounds).verdict(Ratio(interval, ratio=beside)) == verdict


def losses(arm: str, *values: float | None) -> list[Run]:
    """Runs that ended with these losses; None: it diverged."""
    return [
        Run(arm, seed, {"loss": loss, "best_loss": loss}, failure="" if loss else "not finite")
        for seed, loss in enumerate(values)
    ]


BASE = losses("base", 2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("criterion", "arm", "base", "expected"),
    [
        # The loss of a run that diverged is above all bounds, and among others it leaves them open.
        (Criterion("loss", "a", "base", at_most=1.1), (None, None, None), BASE, REFUTED),
        (Criterion("best_loss", "a", "base", at_least=1.1), (None, None, None), BASE, CONFIRMED),
        (Criterion("loss", "a", "base", at_least=1.1), (2.0, None, None), BASE, INCONCLUSIVE),
        # Without a baseline the mean is bounded.
        (Criterion("best_loss", "a", at_most=1.95), (1.90, 1.91, 1.92), BASE, CONFIRMED),
        (Criterion("best_loss", "a", at_most=1.95), (2.00, 2.01, 2.02), BASE, REFUTED),
    ],
)
def test_a_claim_is_bounds_on_a_row_of_a_comparison(
    criterion: Criterion, arm: tuple[float | None, ...], base: list[Run], expected: str
) -> None:
    row = criterion.row(by_arm(("a", "base"), [*losses("a", *arm), *base]))
    assert criterion.verdict(row) == expected


FAILURE = Run("a", 3, failure="it broke")


@pytest.mark.parametrize(
    ("last", "measure", "why"),
    [
        (replace(FAILURE, seed=2), "speed", "2 of 3 pairs finished, and a verdict needs 3"),
        (FAILURE, "loss", "a run failed"),
        (
            Run("a", 2, {"speed": 1.0, "others_cpu": 1.0}),
            "speed",
            "other processes used 33% of the CPUs; measure again",
        ),
    ],
)
def test_what_leaves_a_verdict_open_is_reported(last: Run, measure: str, why: str) -> None:
    quiet: dict[str, float | None] = {"loss": 2.0, "speed": 1.0, "others_cpu": 0.0}
    pairs = [Run(arm, seed, quiet) for arm in ("a", "base") for seed in range(last.seed + 1)]
    runs = by_arm(("a", "base"), [*pairs, last])  # the last of one seed counts
    for over in ("base", ""):
        criterion = Criterion(measure, "a", over, at_least=0.1)
        row = criterion.row(runs)
        assert row.why.startswith(why)
        assert criterion.verdict(row) == INCONCLUSIVE


# --- the command ---

Test = Callable[[Claim], reproduce.Result]


@pytest.fixture
def started() -> list[str]:
    return []


@pytest.fixture
def run_claim(tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch) -> Test:
    """Test a claim on a machine that only pretends to train."""

    def run(runner: Runner, arm: Arm, seed: int) -> Run:
        started.append(f"{arm.label}-s{seed}")
        return Run(arm.label, seed, {"loss": 2.0, "speed": 250.0 if "precision=bf16" in arm.overrides else 100.0}, 1.0)

    monkeypatch.setattr(Runner, "run", run)
    return lambda mine: reproduce.test(mine, AMX, [], Runner(tmp_path / "runs"))


def test_a_claim_is_run_in_turns_and_printed_beside_the_published_figure(
    tmp_path: Path, run_claim: Test, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_claim(claim(tmp_path)).verdict == "CONFIRMED"
    assert started[:3] == ["fp32-s0", "bf16-s0", "bf16-s1"]
    printed = capsys.readouterr().out
    assert "mine: CONFIRMED; published: 2x" in printed
    assert "throughput, bf16 over fp32: 2.500x  criterion ≥ 2  published 2x  CONFIRMED" in printed
    found = read_json(tmp_path / "runs" / "claim.json")
    assert (found["command"], found["rows"][0]["value"]) == ("python scripts/reproduce.py claim=mine", 2.5)
    assert run_claim(claim(tmp_path)).verdict == "CONFIRMED"  # nothing is run again
    assert len(started) == 6


def test_what_is_not_the_statement_is_measured_without_a_verdict(
    tmp_path: Path, run_claim: Test, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_claim(claim(tmp_path, speaks_of=["A100"])).verdict == "no verdict"
    assert "no verdict (the claim speaks of the GPU A100)" in capsys.readouterr().out
    assert run_claim(claim(tmp_path, criteria=[LOSS])).verdict == "no verdict"
    assert "final validation loss, bf16 over fp32: " in capsys.readouterr().out


def test_the_speed_of_an_arm_in_fp32_arithmetic_is_not_tested_its_quality_is(
    tmp_path: Path,
    run_claim: Test,
    started: list[str],
    not_timed: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    not_timed["fp16"] = WIDE
    arms = CLAIM["arms"] | {"fp16": "net precision=fp16"}  # type: ignore[operator]
    mine = claim(tmp_path, arms=arms, criteria=[SPEED, SPEED | {"arm": "fp16"}])
    assert mine.to_run(AMX) == ["fp32", "bf16"]
    run_claim(mine)
    printed = capsys.readouterr().out
    assert "mine: CONFIRMED" in printed
    assert f"throughput, fp16 over fp32: not measured  published 2x  NOT TESTABLE HERE: {WIDE}" in printed
    both = claim(tmp_path, arms=arms, criteria=[SPEED | {"arm": "fp16"}, LOSS | {"arm": "fp16", "at_most": 9.0}])
    assert both.to_run(AMX) == ["fp32", "fp16"]
    assert claim(tmp_path, arms=arms, criteria=[SPEED | {"arm": "fp16"}]).to_run(AMX) == []


def test_overrides_that_train_would_refuse_are_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = claim(tmp_path, arms={"fp32": "net precision=fp32", "bf16": "net precision=bf16 stepps=3"})
    monkeypatch.setattr(reproduce, "load", lambda name: mine)
    assert run(main, None, ["claim=mine", "device=cpu"]) == 2
    assert "evidence/claims/published/mine.yaml: arm bf16: stepps" in capsys.readouterr().err


def test_the_list_is_a_line_a_claim_first_those_that_can_be_tested_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "detect", lambda device: AMX)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == names()
    here, elsewhere = lines.index("testable here"), lines.index("needs an NVIDIA GPU")
    assert here == 0 < listed.index("bignet_memory") + 1 < elsewhere < listed.index("gpt2_ladder") + 2
    assert next(line for line in lines if "shakespeare_cpu" in line).endswith("… data.path=…")


def test_a_claim_that_needs_another_machine_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="claim=gpt2_ladder is NOT TESTABLE HERE: it needs an NVIDIA GPU"):
        main(["claim=gpt2_ladder", "device=cpu"])
    ladder, printed = load("gpt2_ladder"), capsys.readouterr().out
    assert all(text in printed for text in (ladder.statement, ladder.source, ladder.published))
