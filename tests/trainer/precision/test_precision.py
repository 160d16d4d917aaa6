from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from mantissa.formats import FORMATS
from tests.helpers import same_bits
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.precision.manifest import manifest_of
from trainer.precision.modes import Precision, automatic
from trainer.precision.names import matching

CPU = torch.device("cpu")
PLAIN_CPU = Hardware(CPU, "plain CPU", 2**34, 2)
AMX = Hardware(CPU, "CPU with AMX", 2**34, 2, None, frozenset({"amx_bf16"}))
H100 = Hardware(torch.device("cuda", 0), "H100", 2**36, 8, (9, 0))
AMD = Hardware(torch.device("cuda", 0), "an AMD GPU", 2**36, 8)
T4 = Hardware(torch.device("cuda", 0), "T4", 2**34, 8, (7, 5))


@pytest.fixture(autouse=True)
def leave_fp32() -> Iterator[None]:
    yield
    Precision("fp32").apply()


def flags(*backends: str) -> set[str]:
    """The fp32 modes of these backends, as torch reports them."""
    return {operator.attrgetter(f"{name}.fp32_precision")(torch.backends) for name in backends}


ON_CUDA = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn")
ON_CPU = ("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
def test_fp32_products_are_ieee_in_every_backend(mode: str) -> None:
    """Also under autocast: the fp32 islands and the optimizer are fp32. Only tf32 is another one, and only on CUDA."""
    torch.backends.cudnn.conv.fp32_precision = "ieee" if mode == "tf32" else "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    tf32 = mode == "tf32"
    with warnings.catch_warnings():  # torch.compile's templates read the older flags; torch raises if both disagree
        warnings.simplefilter("ignore")
        Precision(mode).apply()
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert (flags(*ON_CUDA), flags(*ON_CPU)) == ({"tf32" if tf32 else "ieee"}, {"ieee"})
    assert tf32 or torch.backends.fp32_precision == "ieee"


def test_sums_of_16_bit_products_are_rounded_once() -> None:
    """Torch's default lets cuBLAS round the parts of a long sum, such as that of a weight's gradient."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True
    precision = Precision("bf16")
    precision.apply()
    effective = manifest_of(precision, AMX, [])["effective"]
    assert not effective["fp16_reduced_precision_reduction"]
    assert not effective["bf16_reduced_precision_reduction"]


@pytest.mark.parametrize(
    ("variable", "value", "mode"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", "fp32"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", "fp32"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "any", "fp32"),
        ("NVIDIA_TF32_OVERRIDE", "0", "tf32"),
    ],
)
def test_an_environment_that_changes_a_format_is_refused(
    variable: str, value: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"unset {variable}"):
        Precision(mode).check(H100)
    Precision("bf16").check(H100)
    assert manifest_of(Precision("bf16"), AMX, [])["environment"] == {variable: value}


def test_unavailable_precisions_are_refused() -> None:
    for hardware, half in ((PLAIN_CPU, "bf16"), (T4, "fp16")):
        with pytest.raises(UserError, match=f"precision=fp32 or precision={half}"):
            Precision("tf32").check(hardware)
    Precision("tf32").check(H100)
    with pytest.raises(UserError, match="an Apple GPU has no fp64; set precision=fp32 or device=cpu"):
        Precision("fp64").check(Hardware(torch.device("mps"), "M3", 2**34, 8))


@pytest.mark.parametrize("mode", [mode for mode in FORMATS if mode != "tf32"])
def test_no_mode_computes_in_bf16_on_an_nvidia_gpu_that_emulates_it(mode: str) -> None:
    """torch emulates it there, slowly, and its compiler leaves such graphs out."""
    precision = Precision(mode)
    with nullcontext() if precision.half is not torch.bfloat16 else pytest.raises(UserError) as refused:
        precision.check(T4)
    assert refused is None or "precision=fp16" in refused.value.remedies
    for hardware in (H100, AMD):
        precision.check(hardware)


@pytest.mark.parametrize(
    ("capability", "mode"),
    [
        *(((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((8, 9), "bf16"), ((9, 0), "bf16")),
        *(((10, 0), "bf16"), ((12, 0), "bf16"), (None, "fp32")),
    ],
)
def test_auto_is_what_an_nvidia_gpu_multiplies_natively(capability: tuple[int, int] | None, mode: str) -> None:
    hardware = replace(T4, capability=capability)
    assert automatic(hardware)[0] == mode
    Precision(mode).check(hardware)


@pytest.mark.parametrize("hardware", [PLAIN_CPU, AMX], ids=["plain", "AMX"])
def test_auto_is_fp32_on_a_cpu(hardware: Hardware) -> None:
    assert automatic(hardware)[0] == "fp32"


@pytest.mark.parametrize(
    ("mode", "dtype", "support"),
    [
        ("fp32", "float32", "native"),
        ("tf32", "float32", "not available"),
        ("bf16", "bfloat16", "native"),
        ("fp16", "float16", "emulated"),
    ],
)
def test_the_manifest_has_the_effective_values(
    mode: str, dtype: str, support: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    precision = Precision(mode)
    precision.apply()
    manifest = manifest_of(precision, AMX, ["head"])
    assert json.loads(json.dumps(manifest)) == manifest
    assert (manifest["requested"], manifest["support"]) == ({"mode": mode, "modules": {}}, support)
    assert manifest["environment"] == {}
    effective = manifest["effective"]
    assert (effective["matmul_dtype"], effective["fp32_modules"]) == (dtype, ["head"])
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # it is read, not what was asked for
    assert manifest_of(precision, AMX, [])["effective"]["fp32_in_cudnn_conv"] == "tf32"


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_an_island_gets_fp32_computes_in_fp32_and_has_gradients(mode: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))), torch.randn(4, 16)
    seen: list[object] = []
    inner = net[1][0]
    inner.register_forward_pre_hook(lambda _, given: seen.extend([given[0].dtype, torch.is_autocast_enabled("cpu")]))
    precision = Precision(mode, {"1": "fp32"})
    assert precision.keep_fp32(net, CPU) == ["1"]
    with precision.autocast(CPU):
        hidden, out = net[0](x), net(x)
    assert hidden.dtype == (torch.bfloat16 if mode == "bf16" else torch.float16)
    assert seen == [torch.float32, False]
    assert same_bits(out, torch.nn.functional.linear(hidden.float(), inner.weight, inner.bias))
    out.sum().backward()
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("conv1", {"conv1"}),
        ("conv?", {"conv1"}),
        ("*.conv1", {"layer1.0.conv1"}),
        ("bn1", {"layer1.0.bn1", "layer2.0.bn1"}),
        ("con1", "freeze: 'con1' matches no module; similar: conv1"),
        ("zzz", "freeze: 'zzz' matches no module; examples of names: conv1"),
    ],
)
def test_a_whole_name_comes_before_names_that_end_so(pattern: str, found: set[str] | str) -> None:
    names = ["conv1", "layer1.0.conv1", "layer1.0.bn1", "layer2.0.bn1"]
    with pytest.raises(UserError, match=found) if isinstance(found, str) else nullcontext():
        assert matching("freeze", pattern, names, "module") == found


def test_a_container_takes_its_children_along_and_what_is_never_called_is_refused() -> None:
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "attention": nn.MultiheadAttention(4, 2)})
    with pytest.raises(UserError, match="name the whole module: attention"):
        Precision("bf16", {"out_proj": "fp32"}).keep_fp32(net, CPU)
    precision = Precision("bf16", {"blocks": "fp32", "attention": "fp32"})
    assert {"attention", "blocks"} <= set(precision.keep_fp32(net, CPU))
    with precision.autocast(CPU):
        assert net["blocks"][0](torch.ones(2, 4)).dtype == torch.float32  # passes the container by
