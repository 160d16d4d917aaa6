"""What a run on a GPU is by its capability, its driver and its memory, and what the start says of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.gpu.pretended import Pretended
from trainer import UserError, train
from trainer.api import Trained
from trainer.run import record, report
from trainer.run_folder import RunFolder

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=16", "data.samples=64", "steps=1", "profiler=none")

RATES = {"fp32": 50.0, "bf16": 800.0}


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that were printed, with single blanks, those that are folded as one."""
    given = capsys.readouterr()
    return [" ".join(line.split()) for line in re.sub(r"\n {13,}", " ", given.out + given.err).splitlines()]


def started(folder: Path, *overrides: str) -> tuple[Trained, dict[str, object]]:
    run = train(*BIGNET, *overrides, output_dir=folder, tracking="local", eval_samples=4)
    return run, RunFolder(run.folder).config()


@pytest.mark.parametrize(
    ("pretended", "mode"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16")], indirect=["pretended"]
)
def test_auto_trains_in_the_gpus_own_16_bits(pretended: Pretended, mode: str, tmp_path: Path) -> None:
    run, record = started(tmp_path, "precision=auto", "batch_size=4")
    assert (run.folder.name, record["precision.mode"], run["precision"]) == (f"bignet-{mode}-s0", mode, mode)


@pytest.mark.parametrize("pretended", [(7, 5)], indirect=True)
def test_bf16_is_refused_where_it_is_emulated(pretended: Pretended, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no instructions.*set precision=fp16"):
        started(tmp_path, "precision=bf16")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "lacking", "typed"),
    [
        ([], "", "bf16 matmuls are 16x as fast here, torch.compile is off: precision=auto compile=default"),
        ([], "Python.h", "bf16 matmuls are 16x as fast here: precision=auto"),
        (["precision=auto"], "", None),
        (["device=cpu"], "", None),
    ],
)
def test_a_run_in_fp32_is_told_what_it_leaves_unused(
    pretended: Pretended,
    overrides: list[str],
    lacking: str,
    typed: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "missing", lambda device: lacking)
    monkeypatch.setattr(record, "matmul_rates", lambda hardware, names: {name: RATES[name] for name in names})
    started(tmp_path, "batch_size=4", *overrides)
    faster = [line for line in shown(capsys) if line.startswith("faster")]
    assert faster == ([] if typed is None else [f"faster {typed}"])


@pytest.mark.parametrize("pretended", [(8, 6)], indirect=True)
def test_scaled_layers_without_compilation_are_warned_of(
    pretended: Pretended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao")
    for device, warned in (("cuda", True), ("cpu", False)):
        started(tmp_path, "precision=fp8", f"device={device}", "batch_size=4")
        assert any("longer than in bf16" in line for line in shown(capsys)) == warned


def test_a_torchao_that_does_not_import_beside_this_triton_is_named(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ValueError("key contains names that are not kernel arguments: num_elements")

    name = "torchao.prototype.moe_training.mxfp8_linear"
    pytest.importorskip("torchao")
    monkeypatch.setitem(sys.modules, name, Refused(name))
    with pytest.raises(UserError, match=r"torchao .* and triton .* \(key contains names.*set precision=fp8"):
        started(tmp_path, "precision=mxfp8", "recipe.width=32", "batch_size=4")


def test_a_driver_that_is_too_old_does_not_make_it_a_run_on_the_cpu(pretended: Pretended, tmp_path: Path) -> None:
    pretended.available, pretended.driver = False, "550.54.15"
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"too old.*550\.54\.15.*set device=cpu"):
            started(tmp_path, f"device={device}")
