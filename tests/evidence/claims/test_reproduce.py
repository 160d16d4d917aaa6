"""From a claim's file to the record of its outcome, with runs that are made up; and the command line's mistakes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evidence.claims import claims, results
from evidence.claims import command as reproduce_cli
from evidence.claims.criteria import CONFIRMED, NOT_HERE, REFUTED, RELATED
from evidence.claims.reproduce import Reproduction, machine_name, save
from tests.evidence.claims.made_up import CLAIM, Machine, reproduction
from tests.helpers import CPU
from trainer.config.options import run
from trainer.errors import UserError

SPEED = {"measure": "speed", "arm": "bf16", "over": "fp32", "at_least": 2.0}
LOSS = {"measure": "loss", "arm": "bf16", "over": "fp32", "within": 0.01}
WIDE = "fp16 matmuls: fp32 arithmetic, this CPU has no fp16 instructions"


def test_a_cpu_is_named_with_its_bf16_instructions() -> None:
    """AMD EPYC is the name of processors with and without them."""
    for flag, words in (("avx2", ""), ("avx512_bf16", "avx512-bf16-"), ("amx_bf16", "amx-")):
        cpu = replace(CPU, name="AMD EPYC", cpu_cores=2, cpu_flags=frozenset({flag}))
        assert machine_name(cpu) == f"amd-epyc-{words}2-cores"


def test_a_claim_is_run_and_judged(tmp_path: Path, files: Callable[..., None], made_up: Machine) -> None:
    files("mine")
    record = reproduction(tmp_path, made_up).test("mine")
    assert record["verdict"] == CONFIRMED
    assert [finding["verdict"] for finding in record["findings"]] == [CONFIRMED, ""]
    assert record["findings"][0]["median"] == 2.5
    assert record["arms"]["bf16"]["measures"]["speed"] == [250.0, 252.5, 255.0]
    assert made_up.started == ["fp32-s0", "bf16-s0", "bf16-s1", "fp32-s1", "fp32-s2", "bf16-s2"]
    path = save(record, tmp_path / "results")
    assert path == tmp_path / "results" / machine_name(CPU) / "claims.jsonl"
    assert results.read(tmp_path / "results") == {machine_name(CPU): {"mine": [record]}}


def test_what_was_run_is_not_run_again_unless_the_file_changed(
    tmp_path: Path, files: Callable[..., None], made_up: Machine
) -> None:
    files("mine")
    first = reproduction(tmp_path, made_up).test("mine")
    count = len(made_up.started)
    assert reproduction(tmp_path, made_up).test("mine") == first
    assert len(made_up.started) == count
    files("mine", published="2x")
    reproduction(tmp_path, made_up).test("mine")
    assert len(made_up.started) == 2 * count


def test_on_other_hardware_than_a_claim_speaks_of_it_is_measured_without_a_verdict(
    tmp_path: Path, files: Callable[..., None], made_up: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = CLAIM["arms"] | {"tf32": "net precision=tf32"}  # type: ignore[operator]
    decides_there = SPEED | {"arm": "tf32"}
    files("mine", speaks_of=["A100"], arms=arms, arms_need={"tf32": ["tf32"]}, criteria=[decides_there, SPEED])
    record = reproduction(tmp_path, made_up).test("mine")
    assert (record["verdict"], record["related"]) == (RELATED, "the claim speaks of the GPU A100")
    assert [finding["verdict"] for finding in record["findings"]] == [NOT_HERE, ""]
    assert record["findings"][1]["median"] == 2.5
    mine = claims.load("mine", tmp_path / "claim")
    reproduce_cli._print(record, mine, False)
    assert "mine: related measurement (the claim speaks of the GPU A100)" in capsys.readouterr().out
    a100 = replace(CPU, name="NVIDIA A100-SXM4-80GB")
    assert mine.judge(results.runs_of(record), a100)[0] == CONFIRMED
    made_up.exit_codes = {f"{arm}-s{seed}": 1 for arm in ("fp32", "bf16") for seed in range(3)}
    files("broken", speaks_of=["A100"])
    assert reproduction(tmp_path, made_up).test("broken")["verdict"] == RELATED  # it was run


def test_a_loss_is_explained_by_divergence_and_the_noise_of_what_the_null_arm_repeats(
    tmp_path: Path, files: Callable[..., None], made_up: Machine
) -> None:
    files("mine", null_arm="fp32", criteria=[LOSS])
    (with_noise,) = reproduction(tmp_path, made_up).test("mine")["why"]
    assert "fp32 and the same with other seeds" in with_noise
    made_up.exit_codes = {"bf16-s1": 3}
    files("other", null_arm="bf16", criteria=[LOSS])
    (without,) = reproduction(tmp_path, made_up).test("other")["why"]
    assert "other seeds" not in without
    # The step in which it diverged is the last that it logged.
    assert without.startswith("1 of 3 runs of bf16 turned non-finite, the first of them in step 7; ")


def test_a_run_of_another_commit_makes_the_outcome_dirty(
    tmp_path: Path, files: Callable[..., None], made_up: Machine
) -> None:
    files("mine")
    here = reproduction(tmp_path, made_up)
    here.git = made_up.git = {"commit": "a", "dirty": "false"}
    assert here.test("mine")["git"] == made_up.git
    files("mine", published="2x")
    made_up.git = {"commit": "b", "dirty": "false"}  # someone has pulled meanwhile
    here.done.clear()
    assert here.test("mine")["git"] == {"commit": "a", "dirty": "true"}


def test_what_the_user_gave_is_not_recorded(tmp_path: Path, files: Callable[..., None], made_up: Machine) -> None:
    files("mine", asks={"data.path": "a text"})
    here = Reproduction(CPU, tmp_path / "runs", ["data.path=/home/me"], launch=made_up)
    record = here.test("mine")
    assert "data.path=…" in record["arms"]["fp32"]["overrides"]
    made_up.exit_codes = {"bf16-s1": 1}
    made_up.words = f"data.path=/home/me is no file; see {tmp_path / 'runs' / 'x.log'} and {Path.home() / 'y'}"
    shutil.rmtree(tmp_path / "runs")
    here.done.clear()
    broken = here.test("mine")
    assert broken["failures"] == ["bf16, seed 1: data.path=… is no file; see outputs/x.log and ~/y"]
    for place in ("/home/me", str(tmp_path), str(Path.home())):
        assert place not in json.dumps([record, broken])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["claim=two_xx"], "claim=two_xx is not a claim; did you mean 'two_x'?"),
        (["claim=gpt2_ladder", "device=cpu"], "claim=gpt2_ladder is NOT TESTABLE HERE: it needs an NVIDIA GPU"),
        (["claim=shakespeare_cpu", "device=cpu"], "it needs data.path=… (the text https://"),
        (["claim=bignet_memory", "steps=3"], "a claim's file fixes all other options (these claims have no option to"),
        (["claim=bignet_memory", "all=true"], "exclude each other"),
        (["all=true", "budget=25"], "budget=25 is not a time: set budget=25min, or with another unit budget=90s"),
    ],
)
def test_an_error_is_reported_with_what_to_set(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reproduction, "test", lambda *_: pytest.fail("it ran"))
    assert run(reproduce_cli.main, None, arguments) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("error: ")
    assert words in reported


def test_overrides_that_train_would_refuse_are_refused_before_anything_is_run(
    tmp_path: Path, files: Callable[..., None]
) -> None:
    files("mine", arms=CLAIM["arms"] | {"bf16": "net precision=bf61"}, reduced={"net": "steps=3"})  # type: ignore[operator]
    words = r"evidence/claims/published/mine.yaml: arm bf16: precision=bf61 is not a choice; did you mean 'bf16'\?"
    mine = claims.load("mine", tmp_path / "claim")
    with pytest.raises(UserError, match=words):
        reproduce_cli._check(mine, CPU, [], reproduce_cli.ReproduceOptions(reduced=True))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Keeps an outcome of a claim in a results folder of its own."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "read", functools.partial(results.read, tmp_path))
    monkeypatch.setattr(results, "update", list)

    def keep(name: str, **changes: Any) -> Path:
        return save(outcome(name) | changes, tmp_path)

    return keep


def outcome(name: str) -> dict[str, Any]:
    here = machine_name(reproduce_cli.detect("cpu"))
    common = {"machine": here, "date": "2026-01-01", "verdict": CONFIRMED, "git": {}, "findings": [], "why": []}
    return common | {"claim": name, "claim_sha256": claims.load(name).digest}


def test_all_skips_claims_with_an_outcome_of_the_same_file(
    kept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept("two_x")
    kept("scaler_needed")
    kept("cpu_bf16", claim_sha256="of an earlier file")
    kept("set_to_none", failures=["x"])
    tested: list[str] = []

    def test(self: Reproduction, name: str) -> dict[str, Any]:
        tested.append(name)
        self.done[name] = outcome(name)
        return self.done[name]

    monkeypatch.setattr(Reproduction, "test", test)
    assert reproduce_cli.main(["all=true", "device=cpu"]) == 0
    assert set(claims.names()) - set(tested) == {"two_x", "scaler_needed", "paper_parity"}  # others measure the last
    assert "two_x: CONFIRMED, of 2026-01-01" in capsys.readouterr().out
    tested.clear()
    reproduce_cli.main(["claim=clip_order", "device=cpu"])
    assert tested == ["clip_order"]


def test_a_claim_that_others_measure_runs_them_and_what_cannot_be_tested_is_recorded_once(
    kept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = claims.load("paper_parity").combines
    monkeypatch.setattr(
        Reproduction, "_tested", lambda self, claim: outcome(claim.id) | {"verdict": verdicts[claim.id]}
    )
    verdicts = dict(zip(parts, (REFUTED, NOT_HERE), strict=True))
    for _ in range(2):
        assert reproduce_cli.main(["claim=paper_parity", "device=cpu"]) == 0
    (here,) = results.read().values()
    assert [len(here[name]) for name in parts] == [2, 1]
    assert f"{parts[0]}: REFUTED" in capsys.readouterr().out


def test_the_speed_of_an_arm_in_fp32_arithmetic_is_not_tested_its_quality_is(
    tmp_path: Path, files: Callable[..., None], made_up: Machine, wide: dict[str, str]
) -> None:
    wide["fp16"] = WIDE
    arms = CLAIM["arms"] | {"fp16": "net precision=fp16_pure"}  # type: ignore[operator]
    speeds = [SPEED, SPEED | {"arm": "fp16"}]
    files("mine", arms=arms, criteria=speeds)
    record = reproduction(tmp_path, made_up).test("mine")
    assert [finding["verdict"] for finding in record["findings"]] == [CONFIRMED, NOT_HERE]
    assert (record["verdict"], record["not_timed"]) == (CONFIRMED, {"fp16": WIDE})
    assert "fp16-s0" not in made_up.started
    mine = claims.load("mine", tmp_path / "claim")
    text = "\n".join(results._outcome("here", record, mine, record["date"]))
    assert f"The speed of fp16 is not testable: {WIDE}." in text
    files("both", arms=arms, criteria=[*speeds, {"measure": "loss", "arm": "fp16", "over": "fp32", "at_most": 9.0}])
    made_up.fp32_arithmetic = {"fp16_pure": WIDE}
    record = reproduction(tmp_path, made_up).test("both")
    assert made_up.started.count("fp16-s0") == 1
    assert [finding["verdict"] for finding in record["findings"]] == [CONFIRMED, NOT_HERE, CONFIRMED]
    assert (record["findings"][1]["why"], record["findings"][1]["values"]) == (f"not testable: {WIDE}", [])


def test_nothing_is_run_where_nothing_that_decides_is_left(
    tmp_path: Path,
    files: Callable[..., None],
    made_up: Machine,
    wide: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide["bf16"] = WIDE
    files("mine", criteria=[SPEED])
    here = reproduction(tmp_path, made_up)
    record = here.test("mine")
    assert (record["verdict"], record["not_timed"]) == (NOT_HERE, {"bf16": WIDE})
    reproduce_cli._print(record, claims.load("mine", tmp_path / "claim"), False)
    assert f"  The speed of bf16 is not testable: {WIDE}." in capsys.readouterr().out
    files("other", needs=["cuda"])
    assert (here.test("other")["verdict"], here.test("other")["needs"]) == (NOT_HERE, ["an NVIDIA GPU"])
    assert not made_up.started
    assert run(reproduce_cli.main, None, ["claim=old_or_small", "device=cpu"]) == 2
    assert f"NOT TESTABLE HERE: {WIDE}" in capsys.readouterr().err
