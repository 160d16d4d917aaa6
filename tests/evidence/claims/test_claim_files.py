"""Claims as files: their error messages, what a machine lacks, and how arms become command lines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from evidence.claims.claims import Claim, lacking, load, names
from mantissa.quality import NULL_SHIFT
from tests.helpers import CPU, PROJECT
from trainer.errors import UserError
from trainer.hardware import Hardware

H200 = Hardware(torch.device("cuda", 0), "NVIDIA H200", 139 * 2**30, 16, (9, 0))
T4 = Hardware(torch.device("cuda", 0), "Tesla T4", 15 * 2**30, 4, (7, 5))
AMX = replace(CPU, cpu_flags=frozenset({"amx_bf16"}))

GOOD_CRITERION = {"measure": "speed", "arm": "bf16", "over": "fp32", "at_least": 1.5}
GOOD = {
    "statement": "bf16 is faster",
    "source": "a hunch",
    "setups": {"net": "recipe=bignet steps=3"},
    "arms": {"fp32": "net precision=fp32", "bf16": "net precision=bf16 batch_size=8"},
    "criteria": [GOOD_CRITERION],
}


def claim(tmp_path: Path, **changes: object) -> Claim:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GOOD | changes, sort_keys=False))
    return load("mine", tmp_path)


def test_a_file_becomes_arms_that_end_in_their_own_overrides(tmp_path: Path) -> None:
    mine = claim(tmp_path, null_arm="fp32", on_cuda={"net": "steps=50"}, asks={"data.path": "a text"})
    fp32, bf16, null = mine.runs(["fp32", "bf16"], ["data.path=here", "x=1"], "cuda", memory_ledger=False)
    own = ("precision=bf16", "batch_size=8", "device=cuda", "data.path=here")
    assert bf16.overrides[-7:] == ("recipe=bignet", "steps=3", "steps=50", *own)
    assert (null.overrides, null.seed_shift) == (fp32.overrides, NULL_SHIFT)
    assert {"profiler=none", "checkpoint=none", "tracking.epilogue=false"} <= set(fp32.overrides)
    (on_cpu,) = claim(tmp_path).runs(["fp32"], [], "cpu", memory_ledger=True)
    assert "steps=50" not in on_cpu.overrides
    assert "profiler=memory" in on_cpu.overrides


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sorce": "x"}, "sorce: Key 'sorce' not in 'Claim'"),
        ({"arms": {"fp32": "nett precision=fp32"}}, "arms.fp32: 'nett' is not known; did you mean 'net'?"),
        ({"criteria": [GOOD_CRITERION | {"arm": "null_arm"}]}, "'null_arm' is not known"),
        ({"criteria": [GOOD_CRITERION | {"measure": "tflops"}]}, "criteria on bf16: 'tflops' is not known"),
        ({"criteria": [{"measure": "speed", "arm": "bf16"}]}, "no criterion decides; give one at_least"),
        ({"related": "one model is not many"}, "related leaves no verdict; drop the bounds"),
        ({"speaks_of": ["a100"]}, "'a100' is not known"),
        ({"reduced": {"other": "steps=1"}}, "reduced: 'other' is not known"),
        ({"repeats": 1}, "repeats=1 gives no interval"),
        ({"needs": ["cude"]}, "did you mean 'cuda'?"),
        ({"arms": {"null_arm": "net"}}, "an arm cannot be called null_arm"),
        ({"combines": ["two_x"]}, "excludes setups"),
        ({"setups": {}, "arms": {}, "criteria": [], "combines": ["mine"]}, "combines takes other claims"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        claim(tmp_path, **changes)
    assert words in str(caught.value)


def test_a_claim_without_a_reduced_size_is_not_run_at_full_size(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gives no reduced size for net; add, for example, reduced: \{net: steps=3"):
        claim(tmp_path).reduce()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"source: a hunch", "mine.yaml: statement: "),
        (b"source: a\nsource: b", "found duplicate key source"),
        (b"statement: \xe4", "mine.yaml: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_no_claim_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(UserError) as caught:
        load("mine", tmp_path)
    assert "evidence/claims/published/mine.yaml" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("need", "hardware", "words"),
    [
        ("cuda", CPU, "an NVIDIA GPU"),
        ("cuda", T4, ""),
        ("cpu", T4, "a CPU: set device=cpu"),
        ("tf32", T4, "TF32 (an NVIDIA GPU from Ampere on)"),
        ("hopper", T4, "an NVIDIA GPU from Hopper on"),
        ("native_bf16", CPU, "bf16 in hardware"),
        ("native_bf16", AMX, ""),
        ("amx", AMX, ""),
        ("avx512_bf16", AMX, "a CPU with avx512_bf16"),
        ("A100", replace(H200, name="NVIDIA A100-SXM4-80GB"), ""),
        ("A100", replace(H200, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb"), "the GPU A100"),  # a part of one
        ("A100", replace(H200, name="NVIDIA RTX A1000"), "the GPU A100"),
        ("L40", replace(H200, name="NVIDIA L40S"), "the GPU L40"),
        ("80GiB", replace(H200, memory_bytes=85_000_000_000), ""),  # what an H100 of 80 GB reports
        ("80GiB", replace(H200, memory_bytes=48 * 2**30), "80GiB of GPU memory"),
    ],
)
def test_what_a_machine_lacks(need: str, hardware: Hardware, words: str) -> None:
    assert lacking([need], hardware) == ([words] if words else [])


def test_an_arm_that_needs_more_is_left_out(tmp_path: Path) -> None:
    mine = claim(tmp_path, arms_need={"bf16": ["native_bf16"]})
    assert mine.arms_lack(CPU) == {"bf16": "bf16 in hardware"}
    assert mine.arms_lack(AMX) == {}


@pytest.mark.parametrize("name", names())
def test_every_claim_here_has_a_figure_and_a_reduced_size(name: str) -> None:
    here = load(name)
    assert here.published
    assert set(here.reduced) == set(here.setups), "a reduced size for every setup"
    assert all(load(part) for part in here.combines)


@pytest.mark.parametrize("name", names())
def test_a_claim_about_more_than_is_tested_gets_no_verdict(name: str) -> None:
    here = load(name)
    words = f"{here.statement}, {here.source}"
    if re.search(r"often|many|typically|generally|\d models|SSD|Llama3-8B", words):
        assert here.related, "say in related: why the test is of less than statement and source say"
    elif gpu := re.search(r"\b[AVH]100\b|\bRTX \d+", words):
        assert here.related or here.speaks_of == [gpu[0], *here.speaks_of[1:]]
    assert here.related or "up to" not in words


def test_the_claim_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (PROJECT / "docs/claims.md").read_text()
    block = re.search(r"^```yaml\n# evidence/claims/published/(\S+)\.yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block
    (tmp_path / f"{block[1]}.yaml").write_text(block[2])
    here = load(block[1], tmp_path)
    assert here.reduced
    assert len(here.runs(list(here.arms), [], "cpu", memory_ledger=False)) == 2
