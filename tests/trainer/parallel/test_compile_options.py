"""How the run compiles, which the doctor does likewise; and that evaluation compiles one graph at most."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch
from torch.torch_version import TorchVersion

from mantissa.doctor import compiled as doctor
from tests.helpers import GPT2, trainer_of
from trainer.errors import UserError
from trainer.parallel.compile import Compile, missing
from trainer.precision.modes import Precision

VARIABLE = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
KEY = "triton.mix_order_reduction"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What torch.compile was given."""
    found: list[dict[str, Any]] = []

    def compile(call: Any, **options: Any) -> Any:
        found.append(options)
        return call

    monkeypatch.setattr(torch, "compile", compile)
    with functorch.patch(backward_pass_autocast="same_as_forward"):
        yield found


def as_the_doctor(
    monkeypatch: pytest.MonkeyPatch, fp32_modules: Sequence[str] = (), round_as_eager: bool = False
) -> None:
    """Compile as the doctor does for a run."""
    replay = SimpleNamespace(fp32_modules=fp32_modules, model=torch.nn.Linear(1, 1))
    monkeypatch.setattr(doctor, "Replay", SimpleNamespace(as_run=lambda step: replay))
    step: Any = SimpleNamespace(fp32_ops=[], round_as_eager=round_as_eager)
    doctor._compiled(step)


@pytest.mark.parametrize(
    ("version", "typed", "mode", "fused"),
    [
        ("2.10.0", None, "default", False),
        ("2.11.0+cu130", None, "max-autotune", False),
        ("2.13.1", None, "default", False),
        ("2.14.0", None, "default", True),
        ("2.15.0", None, "default", True),
        ("2.11.0", "1", "default", True),  # inductor has read it by itself
    ],
)
def test_the_fusion_that_gives_wrong_gradients_is_off_where_torch_has_the_bug(
    version: str,
    typed: str | None,
    mode: str,
    fused: bool,
    given: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pytorch issue 193061: what counts is inductor's own option, which no longer reads the environment."""
    monkeypatch.setattr(doctor, "_without_dropout", lambda passes: {})
    monkeypatch.delenv(VARIABLE, raising=False)
    if typed is not None:
        monkeypatch.setenv(VARIABLE, typed)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    Compile(mode).apply([torch.nn.Linear(1, 1)], torch.device("cuda"))
    as_the_doctor(monkeypatch)
    run, diagnosed = (each["options"] for each in given)
    assert run.get(KEY, True) is diagnosed.get(KEY, True) is fused
    assert run.get("max_autotune", False) is (mode == "max-autotune")
    assert not any("cudagraphs" in key and value for key, value in run.items())
    Compile("off").apply([torch.nn.Linear(1, 1)], torch.device("cuda"))
    assert len(given) == 2


def test_the_doctor_compiles_with_the_switches_of_the_run(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 by rows rounds as eager does (pytorch issue 150859); and what backward computes in where fp32 is mixed in."""
    monkeypatch.setattr(doctor, "_without_dropout", lambda passes: {})
    rounding = [Precision("fp8", fp8_scaling=scaling).rounds_as_eager for scaling in ("rowwise", "tensorwise")]
    for mixed, rounds in ((False, rounding[0]), (True, rounding[1])):
        Compile("default").apply([torch.nn.Linear(1, 1)], torch.device("cuda"), mixed, rounds)
        as_the_doctor(monkeypatch, fp32_modules=["head"] * mixed, round_as_eager=rounds)
        run, diagnosed = (each["options"] for each in given[-2:])
        assert diagnosed == run | {"fallback_random": True}
        assert run["emulate_precision_casts"] is rounds
        assert functorch.backward_pass_autocast == ("off" if mixed else "same_as_forward")
    assert rounding == [True, False]


@pytest.mark.parametrize(
    ("compilers", "headers", "device", "lacks"),
    [
        ({"gcc"}, True, "cuda", ""),
        ({"clang"}, True, "cuda", ""),
        ({"g++"}, True, "cuda", "on a GPU needs a C compiler (apt install gcc); set compile=off"),
        ({"gcc"}, False, "cuda", "on a GPU needs Python.h in {} (apt install python{}.{}-dev); set compile=off"),
        ({"g++"}, False, "cpu", ""),
        ({"gcc"}, True, "cpu", "on a CPU needs a C++ compiler (apt install g++); set compile=off"),
    ],
)
def test_what_triton_builds_its_launcher_with_is_looked_for_before_it_compiles(
    compilers: set[str],
    headers: bool,
    device: str,
    lacks: str,
    given: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    compilers = set(compilers)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    if headers:
        (tmp_path / "Python.h").touch()
    expected = lacks.format(tmp_path, *sys.version_info)
    with pytest.raises(UserError, match=re.escape(expected)) if lacks else nullcontext():
        Compile("default").apply([torch.nn.Linear(1, 1)], torch.device(device))
    assert len(given) == (0 if lacks else 1)
    monkeypatch.setenv("CC", "/opt/cc")
    assert "the C compiler that CC=/opt/cc names" in missing(torch.device("cuda"))
    compilers.add("/opt/cc")
    assert "compiler" not in missing(torch.device("cuda"))


def test_evaluation_compiles_one_graph_whatever_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[list[int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sizes = [each.shape[0] for each in inputs if isinstance(each, torch.Tensor) and each.dtype == torch.int64]
        graphs.append(sizes[:1])
        return graph

    def compile_in_place(found: torch.nn.Module, **_: Any) -> None:
        found.compile(backend=backend)

    monkeypatch.setattr("mantissa.step.compile.compile_in_place", compile_in_place)
    torch._dynamo.reset()
    sizes = ("micro_batch_size=4", "eval_samples=10", "steps=4")
    trainer, eager = (trainer_of(*GPT2, *sizes, f"compile={mode}") for mode in ("default", "off"))
    trainer.metric_names()  # one sample
    scores = []
    for each in (trainer, eager):
        batches = each.batches()
        for _ in range(2):
            each.train_step(next(batches))
            scores.append(each.evaluate()["loss"])  # 4, 4 and 2 samples
    assert scores[:2] == pytest.approx(scores[2:], rel=1e-6)
    assert graphs == [[4], [4]]  # with gradients, and without


def test_each_of_many_blocks_of_one_class_has_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50's blocks take 16, which FSDP compiles one by one."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(graphs))
        return graph

    class Block(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(2) for _ in range(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = norm(x)
            return x

    monkeypatch.setattr("mantissa.step.compile.compile_in_place", lambda found, **_: found.compile(backend=backend))
    torch._dynamo.reset()
    blocks: list[torch.nn.Module] = [Block(width) for width in range(1, 7)]
    with torch._dynamo.config.patch(recompile_limit=8):
        Compile("default").apply(blocks, torch.device("cuda"))
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                for block in blocks:
                    block(torch.ones(3, 2))
    assert len(graphs) == 12
