"""The output of scripts/memory.py and scripts/max_batch.py, and the message of a run that ran out of memory."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from pathlib import Path

import pytest
from torch import nn

from evidence.memory.command import max_batch, memory
from evidence.memory.trial import fits
from tests import forks
from trainer.config.options import run
from trainer.run.fit import release_memory

JOB = ("recipe=bignet", "recipe.width=256", "recipe.layers=4", "data.samples=512", "device=cpu")


def rows(text: str) -> list[dict[str, str]]:
    """Return the lines of the table by its heading."""
    heading, *lines = [re.split(r" {2,}", line) for line in text.splitlines()[2:]]
    return [dict(zip(heading, line, strict=True)) for line in lines]


def test_memory_forecasts_a_line_for_each_combination(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [*JOB, "batch_size=2048", "compile=default"]
    assert run(memory, None, [*job, "precision=fp32,bf16"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if "of 2" in line] == ["forecasting 1 of 2 …", "forecasting 2 of 2 …"]
    fp32, bf16 = rows(out)
    assert (fp32["MiB"], bf16["MiB"], fp32["ratio"]) == ("fp32", "bf16", "1.00x")
    assert fp32["weights"] == bf16["weights"] == "1.0"
    assert (fp32["autocast_copies"], bf16["autocast_copies"]) == ("0.0", "0.4")
    assert not list(folder.iterdir())


def test_a_trial_fails_where_its_limit_is_reached() -> None:
    job = [*JOB, "checkpoint=none"]
    for size, fitting in ((512, True), (65536, False)):  # activations alone: 4 × 256 × 65536 × 4 bytes
        assert fits([*job, f"batch_size={size}", f"micro_batch_size={size}"], 60 * 2**20) == fitting


def test_max_batch_prints_what_to_paste(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(overrides: list[str], limit_bytes: int) -> bool:
        options = dict(override.split("=") for override in overrides)
        return int(options["micro_batch_size"]) <= 1000 and limit_bytes > 2**20

    monkeypatch.setattr("evidence.memory.trial.fits", pretended)
    many = "data.samples=4096"  # larger microbatches than the data has are not tried
    assert run(max_batch, None, [*JOB, many, "batch_size=3072", "memory_budget=100MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "micro_batch_size=3072 does not fit, the whole batch of the run"
    assert {line.split(" ", 1)[1] for line in lines[1:-4]} == {"fits", "does not fit"}
    size = re.match(r"largest micro_batch_size in 100MiB, 5% of it left free: (\d+)$", lines[-3])
    assert size
    assert 968 <= int(size[1]) <= 1000
    assert lines[-2].endswith("divides batch_size=3072: 768; paste:")
    assert lines[-1] == "micro_batch_size=768 batch_size=3072"
    assert run(max_batch, None, [*JOB, "memory_budget=1MiB"]) == 2
    assert "not even micro_batch_size=1 fits into 972.8 KiB" in capsys.readouterr().err


def test_a_model_that_holds_itself_is_released_after_its_run() -> None:
    """As every module does whose forward method was replaced; the next run of a sweep would count it."""
    layer = nn.Linear(2, 2)
    vars(layer)["forward"] = layer.forward
    gone = weakref.ref(layer)
    del layer
    gc.disable()
    try:
        assert gone() is not None
        release_memory()
    finally:
        gc.enable()
    assert gone() is None


LIMITED = """
import ctypes, resource, sys
import torch
from trainer.run.command import main
from mantissa.step.memory import held_bytes
from trainer.run import fit
fit.rough_bytes = lambda *given: None  # no forecast
from recipes.bignet import BigNet
from trainer.recipe import Sizes
BigNet.sizes = lambda self, hardware: Sizes(2, 65536, 65536)
ctypes.CDLL(None).mallopt(-3, 131072)  # a mapping for each tensor: the heap wastes as much again on a few MiB
torch.ones(2**20).exp_()  # starts torch's threads
resource.setrlimit(resource.RLIMIT_DATA, (held_bytes("VmData") + 400 * 2**20, resource.RLIM_INFINITY))
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
@pytest.mark.parametrize("auto", [True, False])
def test_a_run_out_of_memory_halves_the_microbatch_or_says_so(auto: bool, folder: Path) -> None:
    job = ["recipe=bignet", "recipe.width=64", "recipe.layers=32", "data.samples=512", "device=cpu"]
    common = [*job, "batch_size=65536", "steps=2", "tracking=local", "profiler=none", "eval_samples=8"]
    done = forks.run(
        [sys.executable, "-c", LIMITED, *common, *([] if auto else ["micro_batch_size=65536"])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    runs = sorted((folder / "outputs").iterdir())
    found = [json.loads((run / "summary.json").read_text())["status"] for run in runs]
    assert "Traceback" not in done.stderr
    if auto:
        assert done.returncode == 0, done.stderr
        assert "starting again with micro_batch_size=32768" in done.stdout
        assert found[-1] == "FINISHED"
    else:
        assert done.returncode == 4, done.stderr
        assert "error: out of memory with micro_batch_size=65536 (tried to allocate " in done.stderr
        assert "; set micro_batch_size=32768, which takes the same steps in less memory" in done.stderr
        assert found == ["FAILED"]
