"""The format in which every operator of a step really ran, and where that is not what was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evidence.doctor.provenance.tape import tensors
from evidence.doctor.step.case import CaseTrainer
from evidence.doctor.step.finding import DTYPE, FORWARD, Finding
from evidence.doctor.step.modules import ModuleTracer
from mantissa.display import dtype_name
from mantissa.formats import FORMATS
from trainer.data.loader import to_device

_HALF = (torch.float16, torch.bfloat16)
_CAST = "aten._to_copy"
_SENSITIVE = ("softmax", "log", "exp", "pow", "sum", "mean", "norm", "var", "std", "cumsum", "prod", "rsqrt")
"""Parts of the names of operators that are usually kept in fp32: sums over many numbers, and what has a wide range."""


class Row(NamedTuple):
    """How often an operator ran in one module, one direction and these formats."""

    module: str
    direction: str
    op: str
    inputs: str
    """The floating-point dtypes of its inputs, without repetition."""
    output: str
    calls: int


@dataclass
class OperatorManifest:
    """What ran in which format in one step."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def manifest(trainer: CaseTrainer, rung: str) -> OperatorManifest:
    """Take the step once and return the formats of its operators, with the faults among them.

    A fault is a module or an operator that was to be fp32 and ran in 16 bits, weights stored in fewer bits than
    requested, and a sum of the loss that is not fp32. Everything else that is unusual is a note.
    """
    modules = ModuleTracer(trainer.model)
    with modules, _Dtypes(modules, _island_weights(trainer)) as seen:
        trainer.attempt()
    rows = [Row._make((*key, calls)) for key, calls in sorted(seen.calls.items())]
    findings = [*_islands(trainer, rows, rung), *_bypassed(trainer, seen.casts, rung), *_operators(trainer, rows, rung)]
    findings += [*_weights(trainer, rung), *_loss(trainer, rung)]
    return OperatorManifest(rows, findings, _notes(trainer, rows))


class _Dtypes(TorchDispatchMode):
    def __init__(self, modules: ModuleTracer, weights: dict[int, str]) -> None:
        super().__init__()
        self.modules = modules
        self.weights = weights
        """The module of each weight that is followed, by the weight's address."""
        self.casts: dict[tuple[str, str], str] = {}
        """Of its casts to 16 bits in the forward pass: the weight's module, the module that casts, and the dtype."""
        self.calls: Counter[tuple[str, str, str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = _names(tensors(output))
            if results:
                name = str(func).rpartition(".")[0]
                module, direction = self.modules.place()
                self.calls[module, direction, name, _names(tensors((args, kwargs))), results] += 1
                if self.weights and name == _CAST and direction == FORWARD and _is_half(results):
                    owner = self.weights.get(args[0].data_ptr())
                    if owner is not None:
                        self.casts[owner, module] = results
        return output


def _names(found: list[Tensor]) -> str:
    return ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in found if each.is_floating_point()))


_HALF_NAMES = [dtype_name(dtype) for dtype in _HALF]


def _is_half(dtypes: str) -> bool:
    return any(name in _HALF_NAMES for name in dtypes.split(", "))


def _within(module: str, islands: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in islands)


def _island_weights(trainer: CaseTrainer) -> dict[int, str]:
    """Return the fp32 modules that have weights which no other module shares, by the weights' addresses."""
    inside, outside = {}, set()
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if _within(module, trainer.fp32_modules):
            inside[parameter.data_ptr()] = module
        else:
            outside.add(parameter.data_ptr())
    return {address: module for address, module in inside.items() if address not in outside}


def _bypassed(trainer: CaseTrainer, casts: dict[tuple[str, str], str], rung: str) -> list[Finding]:
    """Return the fp32 modules whose weights another module uses in 16 bits, without a call of the module."""
    return [
        Finding(
            DTYPE,
            FORWARD,
            owner,
            rung,
            _CAST,
            dtype,
            detail=f"precision.fp32_modules has it, and {user or 'the model'} uses its weights without calling it",
            cure=[f"call {owner} there" + (f", or add {user} to precision.fp32_modules" if user else "")],
        )
        for (owner, user), dtype in casts.items()
        if not _within(user, trainer.fp32_modules)
    ]


def _islands(trainer: CaseTrainer, rows: list[Row], rung: str) -> list[Finding]:
    """Return the fp32 modules whose own operators ran in 16 bits in the forward pass.

    With 16-bit weights the result of an island is cast back, so there casts are not counted.
    """
    islands = trainer.fp32_modules
    casts_back = trainer.config.precision.format.half_weights
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (
            _within(row.module, islands)
            and row.direction == FORWARD
            and _is_half(row.output)
            and not (casts_back and row.op == _CAST)
        ):
            found.setdefault(row.module, []).append(row)
    return [
        Finding(
            DTYPE,
            FORWARD,
            module,
            rung,
            own[-1].op,
            own[-1].output,
            detail=f"precision.fp32_modules has it, and {sum(row.calls for row in own)} operators ran in 16 bits",
            cure=["remove the cast to 16 bits from this module's code"],
        )
        for module, own in found.items()
    ]


def _operators(trainer: CaseTrainer, rows: list[Row], rung: str) -> list[Finding]:
    """Return the operators of ``precision.fp32_ops`` that ran in 16 bits in the forward pass."""
    wanted = trainer.config.precision.fp32_ops or []
    found = []
    for name in wanted:
        own = [row for row in rows if row.direction == FORWARD and _is_half(row.output) and _base(row.op) == name]
        found += [
            Finding(
                DTYPE,
                FORWARD,
                row.module,
                rung,
                row.op,
                row.output,
                detail=f"precision.fp32_ops asks for {name} in fp32",
            )
            for row in own[:1]
        ]
    return found


def _base(op: str) -> str:
    return op.removeprefix("aten.").removeprefix("_safe").removeprefix("native").strip("_")


def _weights(trainer: CaseTrainer, rung: str) -> list[Finding]:
    """Return the parameters that are stored in fewer bits than the precision asks for."""
    asked = FORMATS[trainer.config.precision.mode].weights
    low: dict[str, list[tuple[str, torch.dtype]]] = {}
    for name, parameter in trainer.model.named_parameters():
        module = name.rpartition(".")[0]
        wanted = torch.float32 if _within(module, trainer.fp32_modules) else asked
        if parameter.is_floating_point() and parameter.dtype.itemsize < wanted.itemsize:
            low.setdefault(module, []).append((name, parameter.dtype))
    return [
        Finding(
            DTYPE,
            FORWARD,
            module,
            rung,
            dtype=dtype_name(named[0][1]),
            detail=f"{', '.join(name for name, _ in named)} stored in {dtype_name(named[0][1])}, "
            f"precision={trainer.config.precision.mode} asks for {dtype_name(asked)}",
        )
        for module, named in low.items()
    ]


def _loss(trainer: CaseTrainer, rung: str) -> list[Finding]:
    """Return a finding where the summed loss is in 16 bits."""
    trainer.start()
    batch = to_device(trainer.case.microbatches[0], trainer.device)
    with torch.no_grad(), trainer.around(), trainer.config.precision.autocast(trainer.device):
        dtype = trainer.recipe.loss(trainer.model, batch).loss_sum.dtype
    if dtype not in _HALF:
        return []
    detail = f"the summed loss is {dtype_name(dtype)}: sum it in fp32 in Recipe.loss"
    return [Finding(DTYPE, FORWARD, "", rung, "the loss", dtype_name(dtype), detail=detail)]


def _notes(trainer: CaseTrainer, rows: list[Row]) -> list[str]:
    """Return what is unusual: sums and wide-range operators that ran in 16 bits under autocast."""
    if trainer.config.precision.format.half_weights:  # there every operator does
        return []
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.direction == FORWARD and _is_half(row.output) and any(part in _base(row.op) for part in _SENSITIVE):
            key = row.op, row.output
            found[key] = found.get(key, 0) + row.calls
    return [f"{op} ran in {dtype} {calls} times" for (op, dtype), calls in found.items()]
