"""The format in which every operator of a step really ran, and where that is not what was asked for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import dtype_name
from mantissa.finding import DTYPE, FORWARD, Examined, Finding
from mantissa.modules import ModuleTracer
from mantissa.step import Passes
from mantissa.tensors import numbers_in

_HALF = {dtype_name(dtype) for dtype in (torch.float16, torch.bfloat16)}
_CAST = "aten._to_copy"
LOSS = "(loss)"
"""Stands for what is computed outside of the model."""
_MOVES = {"_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view"}
_FILLS = {"fill_", "zero_", "empty_like", "full_like", "ones_like", "zeros_like"}
_EXCHANGES = {"c10d", "_c10d_functional", "fsdp"}


class Row(NamedTuple):
    """How often an operator ran in one module, one direction and these formats."""

    module: str
    direction: str
    op: str
    inputs: str
    """The floating-point dtypes of its inputs, without repetition."""
    output: str
    calls: int

    @property
    def in_half(self) -> bool:
        """Whether it is of the forward pass, with a result in 16 bits."""
        return self.direction == FORWARD and _is_half(self.output)

    @property
    def name(self) -> str:
        """The operator's name as in ``torch.nn.functional``."""
        return self.op.removeprefix("aten.").removeprefix("_safe").removeprefix("native").strip("_")


class DtypeRecorder(TorchDispatchMode):
    """Records in which dtypes operators compute and modules return.

    Args:
        model: whose modules are told apart.
        weights: names of those whose casts are followed, by address.
    """

    def __init__(self, model: nn.Module, weights: dict[int, str] | None = None) -> None:
        super().__init__()
        self._model = model
        self._modules = ModuleTracer(model)
        self._weights = weights or {}
        self._hooks = ExitStack()
        self._calls: Counter[tuple[str, str, str, str, str]] = Counter()
        self._computed: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        self.outputs: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        """By module: of the floating-point tensors that it returns."""
        self.casts: dict[tuple[str, str], str] = {}
        """Of weights to 16 bits in the forward pass: the weight's name, the module that casts, and the dtype."""

    def __enter__(self) -> Self:
        self._modules.__enter__()
        for name, module in self._model.named_modules():
            self._hooks.callback(module.register_forward_hook(partial(self._returned, name)).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__()
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        results = "" if getattr(func, "is_view", False) else _names(numbers_in(output))
        if not results:
            return output
        name = str(func).rpartition(".")[0]
        given = numbers_in((args, kwargs))
        module, direction = self._modules.place()
        self._calls[module, direction, name, _names(given), results] += 1
        if given and direction == FORWARD and _computes(name):
            # An operator in fp8 has a result in another dtype.
            dtype = given[0].dtype if given[0].itemsize == 1 else numbers_in(output)[0].dtype
            self._computed[module if self._modules.inside else LOSS][dtype] += 1
        if self._weights and name == _CAST and direction == FORWARD and _is_half(results):
            weight = self._weights.get(args[0].data_ptr())
            if weight is not None:
                self.casts[weight, module] = results
        return output

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[name].update(tensor.dtype for tensor in numbers_in(output))

    def rows(self) -> list[Row]:
        """Return what ran, in order of the first calls."""
        return [Row(*key, calls) for key, calls in self._calls.items()]

    def modules(self) -> list[dict[str, str]]:
        """Return the modules that have weights or operators of their own (not through their children).

        Each with its name, its type, and the dtypes of its own weights, of its own operators (most of them first; none
        if it was not called), and of what it returns. An operator computes in the dtype of its result, or in fp8 where
        its first input is. Views, copies, casts, fills and exchanges between ranks compute nothing; nor do operators
        without a floating-point input and result.
        """
        rows = []
        modules = [(name, type(module).__name__, module) for name, module in self._model.named_modules()]
        for name, kind, module in [*modules, (LOSS, "", nn.Module())]:
            weights = Counter(weight.dtype for weight in module.parameters(recurse=False))
            if weights or self._computed[name]:
                dtypes = {"weights": weights, "compute": self._computed[name], "output": self.outputs[name]}
                named = {key: [dtype_name(dtype) for dtype, _ in found.most_common()] for key, found in dtypes.items()}
                rows.append({"module": name, "type": kind} | {key: ", ".join(found) for key, found in named.items()})
        return rows


def _computes(operator: str) -> bool:
    space, _, name = operator.partition(".")
    return space not in _EXCHANGES and name not in _MOVES | _FILLS and not name.startswith("new_")


def _names(found: list[Tensor]) -> str:
    return ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in found))


def _is_half(dtypes: str) -> bool:
    return not _HALF.isdisjoint(dtypes.split(", "))


@dataclass
class OperatorManifest(Examined):
    """What ran in which format in one step."""

    rows: list[Row]


def manifest(passes: Passes) -> OperatorManifest:
    """Take the step once and return the formats of its operators, with the faults among them.

    A fault is a module or an operator that was to be fp32 and ran in 16 bits, weights stored in fewer bits than
    requested, and a sum of the loss that is not fp32.
    """
    with DtypeRecorder(passes.model, _weights_in_fp32(passes)) as recorder:
        passes.attempt()
    rows = sorted(recorder.rows())
    findings = [*_modules_in_half(passes, rows), *_bypassed(passes, recorder.casts), *_operators_in_half(passes, rows)]
    findings += [*_weights(passes), *_loss(passes)]
    return OperatorManifest(rows, findings=findings)


def _within(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _finding(passes: Passes, module: str, op: str, dtype: str, detail: str, *cure: str) -> Finding:
    return Finding(DTYPE, FORWARD, module, passes.format.name, op, dtype, detail=detail, cure=list(cure))


def _weights_in_fp32(passes: Passes) -> dict[int, str]:
    """Return the weights of fp32 modules that no other module shares, by address."""
    inside, outside = {}, set()
    for name, parameter in passes.model.named_parameters(remove_duplicate=False):
        if _within(name.rpartition(".")[0], passes.fp32_modules):
            inside[parameter.data_ptr()] = name
        else:
            outside.add(parameter.data_ptr())
    return {address: name for address, name in inside.items() if address not in outside}


def _bypassed(passes: Passes, casts: dict[tuple[str, str], str]) -> Iterator[Finding]:
    """Yield the fp32 modules whose weights another module uses in 16 bits, without a call of the module."""
    users = {(weight.rpartition(".")[0], user): dtype for (weight, user), dtype in casts.items()}
    for (owner, user), dtype in users.items():
        if not _within(user, passes.fp32_modules):
            detail = f"precision.fp32_modules has it, and {user or 'the model'} uses its weights without calling it"
            cure = f"call {owner} there" + (f", or add {user} to precision.fp32_modules" if user else "")
            yield _finding(passes, owner, _CAST, dtype, detail, cure)


def _modules_in_half(passes: Passes, rows: list[Row]) -> Iterator[Finding]:
    """Yield the fp32 modules whose own operators ran in 16 bits in the forward pass.

    With 16-bit weights the result of such a module is cast back, so there casts are not counted.
    """
    casts_back = passes.format.half_weights is not None
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.in_half and _within(row.module, passes.fp32_modules) and not (casts_back and row.op == _CAST):
            found.setdefault(row.module, []).append(row)
    for module, own in found.items():
        count = sum(row.calls for row in own)
        detail = f"precision.fp32_modules has it, and {count} operators ran in 16 bits"
        cure = "remove the cast to 16 bits from this module's code"
        yield _finding(passes, module, own[-1].op, own[-1].output, detail, cure)


def _operators_in_half(passes: Passes, rows: list[Row]) -> Iterator[Finding]:
    """Yield the operators of ``precision.fp32_ops`` that ran in 16 bits in the forward pass, each at its first row."""
    first = {row.name: row for row in reversed(rows) if row.in_half}
    for name in passes.step.fp32_ops:
        if row := first.get(name):
            detail = f"precision.fp32_ops asks for {name} in fp32"
            yield _finding(passes, row.module, row.op, row.output, detail)


def _weights(passes: Passes) -> Iterator[Finding]:
    """Yield the modules with parameters that are stored in fewer bits than the format asks for."""
    low: dict[tuple[str, str], list[str]] = {}
    asked = passes.format.weights
    for name, parameter in passes.model.named_parameters():
        module = name.rpartition(".")[0]
        wanted = torch.float32 if _within(module, passes.fp32_modules) else asked
        if parameter.is_floating_point() and parameter.dtype.itemsize < wanted.itemsize:
            low.setdefault((module, dtype_name(parameter.dtype)), []).append(name)
    for (module, dtype), names in low.items():
        detail = f"{', '.join(names)} stored in {dtype}, precision={passes.format.name} asks for {dtype_name(asked)}"
        yield _finding(passes, module, "", dtype, detail)


def _loss(passes: Passes) -> list[Finding]:
    """Return a finding where the summed loss is in 16 bits."""
    passes.start()
    with torch.no_grad():
        dtype = dtype_name(passes.loss(passes.microbatches[0]).dtype)
    detail = f"the summed loss is {dtype}: sum it in fp32 in Recipe.loss"
    return [_finding(passes, "", "the loss", dtype, detail)] if dtype in _HALF else []
