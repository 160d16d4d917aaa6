"""The precision that was requested beside the one that is effective, read back from a first optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mantissa.display import dtype_name, listed
from mantissa.formats import FORMATS, TF32, Format
from mantissa.tensors import numbers_in

_FLAGS = {"cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"), "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")}
"""Of torch.backends: what decides how each kind of device multiplies fp32 numbers."""
_KINDS = {"matmul": nn.Module, "conv": nn.modules.conv._ConvNd, "rnn": nn.RNNBase}
"""The modules that a flag is for."""
_SDPA = ("flash", "mem_efficient", "cudnn", "math")


@dataclass
class Manifest:
    """What a training computes in, and where that is not what was asked for."""

    requested: str
    """The name of a precision format; empty: not stated."""
    effective: dict[str, str]
    """By aspect, such as ``weights``: what is in effect."""
    differences: list[str] = field(default_factory=list)
    """Each silent difference, as a sentence with its cure."""

    def __str__(self) -> str:
        width = max(map(len, self.effective))
        rows = [f"  {name:{width}}  {value}" for name, value in self.effective.items()]
        asked = f"requested: {self.requested or 'not stated'}; effective:"
        return "\n".join([asked, *rows, *(f"DIFFERS: {each}" for each in self.differences)])


class Listener:
    """A hook of a module that copies of the module do not have."""

    def __init__(self, call: Callable[..., None] = lambda *args: None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


class FirstStep:
    """Sees what a manifest needs and no tensor tells later, from before the first step on until ``close``.

    Args:
        model: without the wrappers of DDP and torch.compile.
        optimizer: torch's own, not a library's wrapper of it.
        scaler: a ``torch.amp.GradScaler``, or None.
        hooked: whether hooks on submodules do no harm; they would, where the model is compiled.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, hooked: bool) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.autocast: dict[str, torch.dtype | None] = {}
        """By submodule that multiplies: the autocast dtype in the forward pass; None: off."""
        self.calls: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.in_autocast = self.unscaled = False
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.ties = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.frozen = [(name, each, each._version) for name, each in model.named_parameters() if not each.requires_grad]
        self._hooks = []
        for name, module in model.named_modules() if hooked else ():
            if any(each.ndim > 1 for each in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding):
                self._hooks.append(module.register_forward_pre_hook(Listener(partial(self._called, name))))

    def _called(self, name: str, module: nn.Module, arguments: Any) -> None:
        kind = next(module.parameters()).device.type
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():  # not one that is recomputed
            on = torch.is_autocast_enabled(kind) and bool(numbers_in(arguments))
            self.autocast[name] = torch.get_autocast_dtype(kind) if on else None
            self.calls[name] += 1

    def before_update(self) -> None:
        """Look at the gradients, just before the optimizer's step."""
        parameters = changed_by(self.optimizer)
        self.gradients = Counter(dtype_name(each.grad.dtype) for each in parameters if each.grad is not None)
        self.in_autocast = any(map(torch.is_autocast_enabled, {each.device.type for each in parameters}))
        if self.scaler is not None and self.scaler.is_enabled():
            state = self.scaler._per_optimizer_states[id(self.optimizer)]
            self.unscaled = bool(state["found_inf_per_device"])

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()


def manifest(first: FirstStep, precision: str | None = None) -> Manifest:
    """Return what is requested and what is effective, after an optimizer step.

    Args:
        first: which saw the step.
        precision: the name of the format that was asked for, such as ``bf16``; None: it is not known.
    """
    format = FORMATS[precision] if precision else None
    parts = (_weights, _update, _autocast, _scaling, _fp32, _attention, _fp8, _fsdp2, _optimized, _shared)
    rows: dict[str, str] = {}
    differences = [sentence for part in parts for sentence in part(first, format, rows)]
    return Manifest(precision or "", rows, differences)


def changed_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return what an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _counted(dtypes: Iterable[str]) -> str:
    counts = Counter(dtypes).most_common()
    return ", ".join(f"{name} ({count})" if len(counts) > 1 else name for name, count in counts) or "none"


def _masters(first: FirstStep) -> bool:
    """Return whether the optimizer changes fp32 tensors that are not the model's own."""
    other = [each for each in changed_by(first.optimizer) if id(each) not in first.names]
    return bool(other) and all(each.dtype == torch.float32 for each in other)


def _trainable(first: FirstStep) -> dict[str, nn.Parameter]:
    named = first.model.named_parameters()
    return {name: each for name, each in named if each.requires_grad and each.is_floating_point()}


def _weights(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    trainable = _trainable(first)
    frozen = [dtype_name(each.dtype) for _, each, _ in first.frozen]
    rows["weights"] = _counted(dtype_name(each.dtype) for each in trainable.values())
    rows["weights"] += f"; frozen ones: {_counted(frozen)}" if frozen else ""
    half = [name for name, each in trainable.items() if each.dtype.itemsize <= 2]
    if half and _masters(first):
        rows["weights"] += ", with masters"
    elif half and (format is None or format.half_weights is None):
        asked = f"precision={format.name} asks for fp32 ones" if format else "no precision was stated"
        dtype = dtype_name(trainable[half[0]].dtype)
        load = "load the model with from_pretrained(…, dtype=torch.float32) (transformers 5 takes the checkpoint's dtype)"
        cure = load if hasattr(first.model, "config") else "call model.float() before the optimizer is made"
        pure = f"; if they are meant, state precision='{'bf16' if dtype == 'bfloat16' else 'fp16'}_pure'"
        yield (
            f"The weights of {listed(half)} are {dtype}, and {asked}, so small updates are rounded away: "
            f"{cure}{pure if format is None else ''}."
        )
    elif half and format and format.masters:
        yield (
            f"precision={format.name} asks for fp32 masters, but the optimizer changes the model's own 16-bit weights: "
            "give it fp32 copies, or keep fp32 weights and enter autocast."
        )
    if format and format.half_weights and (wide := [n for n, p in trainable.items() if p.dtype.itemsize > 2]):
        dtype = dtype_name(format.half_weights)
        yield (
            f"precision={format.name} asks for {dtype} weights, but {listed(wide)} are wider: "
            f"call model.to(torch.{dtype}) before the optimizer is made."
        )


def _update(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    rows["gradients"] = _counted(first.gradients.elements())
    passes = max(first.calls.values(), default=1) if first.calls else 1
    half = [name for name in first.gradients if name in ("bfloat16", "float16")]
    if half and passes > 1 and not (format and format.half_weights) and not _masters(first):
        yield (
            f"The gradients of {passes} forward passes are summed in {half[0]}, where small ones are lost: keep fp32 "
            "weights and enter autocast, or sum the gradients in fp32."
        )
    kept: Counter[str] = Counter()
    lower = []
    for parameter in changed_by(first.optimizer):
        state = first.optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                kept[dtype_name(value.dtype)] += 1
                if value.dtype.itemsize < parameter.dtype.itemsize:
                    lower.append(f"{first.names.get(id(parameter), 'a master')} ({key})")
    rows["optimizer state"] = f"{_counted(kept.elements())} ({type(first.optimizer).__name__})"
    if lower:
        yield (
            f"The optimizer's state of {listed(lower)} has fewer bits than the weights: make the optimizer after "
            "the model is cast, or load a state that was saved in fp32."
        )


def _autocast(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    seen = first.autocast
    rows["autocast"] = _counted(dtype_name(each) if each else "off" for each in seen.values())
    if not seen:
        rows["autocast"] = "not seen: the submodules are compiled, or not called"
    wanted = format.autocast if format else None
    by_fsdp = {policy.param_dtype for policy, _ in policies(first.model)} - {None}
    off = [name for name, each in seen.items() if each is None]
    others = {each for each in seen.values() if each}
    kind = next(first.model.parameters()).device.type
    context = f'torch.autocast("{kind}", dtype=torch.{dtype_name(wanted)})'
    if seen and wanted and wanted not in others | by_fsdp:
        found = f"in autocast to {dtype_name(others.pop())}" if others else "without it"
        yield (
            f"precision={format.name if format else ''} asks for autocast to {dtype_name(wanted)}, but the forward "
            f"pass ran {found}: enter {context} around the forward pass and the loss."
        )
    elif format and not wanted and others:
        yield (
            f"precision={format.name} asks for no autocast, but the forward pass ran in autocast to "
            f"{dtype_name(others.pop())}: leave the context out, or state precision='bf16' or 'fp16'."
        )
    elif off and others:
        yield (
            f"Autocast is off inside of {listed(off, 'module')}, and on around: these compute in their inputs' "
            "dtype; if they are not meant to, remove autocast(enabled=False) from their code."
        )
    if first.in_autocast:
        yield (
            "The optimizer's step runs inside of autocast, whose cache keeps the 16-bit copies of the old weights for "
            "the next forward pass: enter autocast for each forward pass, and leave it before backward."
        )


def _scaling(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    scaler = first.scaler
    enabled = scaler is not None and scaler.is_enabled()
    rows["loss scale"] = "none" if not enabled else "dynamic"
    if scaler is not None and not enabled:
        rows["loss scale"] = "none: the GradScaler is disabled"
    dtypes = {each for each in first.autocast.values() if each}
    dtypes |= {each.dtype for each in _trainable(first).values() if each.dtype.itemsize == 2}
    if torch.float16 in dtypes and not enabled:
        yield (
            "Gradients are computed in float16 without a loss scale, so those below 2^-24 become 0: use "
            "torch.amp.GradScaler, and scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()."
        )
    elif enabled and dtypes and torch.float16 not in dtypes:
        yield (
            f"The GradScaler has no use with {dtype_name(dtypes.pop())}, whose exponents are fp32's, and skips steps: "
            "leave it out."
        )
    if not enabled:
        return
    if scaler._scale is None:
        yield "The GradScaler was never used: call scaler.scale(loss).backward(), and scaler.step(optimizer)."
    elif not first.unscaled and first.gradients:
        yield (
            "optimizer.step() was called in the place of scaler.step(optimizer), so the gradients are still "
            f"multiplied by {scaler.get_scale():g}: call scaler.step(optimizer)."
        )


def fp32_flags(kind: str) -> dict[str, str]:
    """Return how a kind of device, ``cuda`` or ``cpu``, multiplies fp32 numbers, by the name in ``torch.backends``."""
    found = {}
    for name in _FLAGS.get(kind, ()):
        library, _, operator = name.partition(".")
        found[name] = getattr(getattr(torch.backends, library), operator).fp32_precision
    return found


def flags_differ(kind: str, model: nn.Module, format: Format | None) -> Iterator[str]:
    """Yield where the flags of a kind of device are not those of a format that multiplies fp32 numbers."""
    if format and not format.half and (kind == "cuda" or format.number is not TF32):
        modules = list(model.modules())
        needed = [
            (name, value)
            for name, value in fp32_flags(kind).items()
            if any(isinstance(module, _KINDS[name.partition(".")[2]]) for module in modules)
        ]
        wanted = ("tf32",) if format.number is TF32 else ("ieee", "none")
        for name, value in needed:
            if value not in wanted:
                yield (
                    f"precision={format.name} asks for products in {format.number.name}, but those of {name} are in "
                    f"{value}: set torch.backends.{name}.fp32_precision = '{wanted[0]}'."
                )
    try:
        _ = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        yield (
            "The old flags allow_tf32 and the new fp32_precision contradict each other, and torch raises an error "
            "where it reads the old ones: set fp32_precision alone."
        )


def _fp32(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    kind = next(first.model.parameters()).device.type
    rows["fp32 products"] = ", ".join(f"{name}: {value}" for name, value in fp32_flags(kind).items()) or "not known"
    yield from flags_differ(kind, first.model, format)


def _attention(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    enabled = [name for name in _SDPA if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    asked = getattr(getattr(first.model, "config", None), "_attn_implementation", None)
    rows["attention"] = f"sdpa may use {', '.join(enabled)}" + (f"; the model's config: {asked}" if asked else "")
    wide = all(each is None for each in first.autocast.values())
    if asked and "flash" in asked and wide and all(p.dtype == torch.float32 for p in first.model.parameters()):
        yield (
            f"The model's config asks for {asked}, which computes in 16 bits alone, and the forward pass is in fp32: "
            "enter autocast, or load it with attn_implementation='sdpa'."
        )


def _fp8(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    linear = {name: each for name, each in first.model.named_modules() if isinstance(each, nn.Linear)}
    converted, idle = set(), []
    for name, module in first.model.named_modules():
        library = type(module).__module__.partition(".")[0]
        weights = [type(each).__name__ for each in module.parameters(recurse=False)]
        if (library == "torchao" and "Float8" in type(module).__name__) or any("Float8" in each for each in weights):
            converted.add(name)
        elif library == "transformer_engine" and hasattr(module, "fp8"):
            (converted.add if module.fp8 else idle.append)(name)
    rows["fp8"] = f"{len(converted)} modules" if converted else "none"
    if idle:
        yield (
            f"{listed(idle, 'module')} of transformer_engine ran without fp8: enter "
            "transformer_engine.pytorch.fp8_autocast around the forward pass."
        )
    left = [name for name in linear if name not in converted]
    if format and format.name == "fp8" and left and not idle:
        yield (
            f"precision=fp8 is asked for, but {listed(left, 'module')} are plain nn.Linear: call "
            "torchao.float8.convert_to_float8_training(model) before the optimizer is made, and see its filter."
        )


def policies(model: nn.Module) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """Yield the policy of each module of FSDP2, with the parameters that it shards."""
    seen: set[int] = set()
    for module in reversed(list(model.modules())):
        if type(module).__name__.startswith("FSDP") and hasattr(module, "_get_fsdp_state"):
            own = [each for each in module.parameters() if id(each) not in seen]
            seen |= set(map(id, own))
            yield module._get_fsdp_state()._mp_policy, own


def _fsdp2(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    found: Counter[str] = Counter()
    sentences: dict[str, None] = {}
    for policy, parameters in policies(first.model):
        dtypes = {each.dtype for each in parameters if each.requires_grad}
        asked, reduced = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
        names = [dtype_name(each) if each else "as sharded" for each in (asked, reduced)]
        found[f"computes in {names[0]}, sums gradients in {names[1]}, shards {_counted(map(dtype_name, dtypes))}"] += 1
        if asked in dtypes and asked.itemsize <= 2:
            sentences[
                f"FSDP2 shards {names[0]} weights, so MixedPrecisionPolicy(param_dtype=torch.{names[0]}) has no "
                "effect and the optimizer changes 16-bit weights: call model.float() before fully_shard."
            ] = None
        if policy.reduce_dtype is None and reduced and reduced.itemsize <= 2:
            sentences[
                f"FSDP2 sums the gradients of the ranks in {names[1]}, because reduce_dtype is not set: set "
                "MixedPrecisionPolicy(…, reduce_dtype=torch.float32)."
            ] = None
        if format and format.autocast and asked is None and not any(first.autocast.values()):
            sentences[
                f"precision={format.name} is asked for, but FSDP2 has no param_dtype and there is no autocast: set "
                f"MixedPrecisionPolicy(param_dtype=torch.{dtype_name(format.autocast)}, reduce_dtype=torch.float32)."
            ] = None
    if found:
        rows["FSDP2"] = "; ".join(f"{text} ({count} modules)" for text, count in found.items())
    yield from sentences


def _optimized(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    changed = {id(each) for each in changed_by(first.optimizer)}
    own = {id(each): name for name, each in first.model.named_parameters()}
    foreign = len(changed - own.keys())
    if foreign and not (_masters(first) and any(p.dtype.itemsize <= 2 for p in _trainable(first).values())):
        yield (
            f"{foreign} of the {len(changed)} tensors that the optimizer changes are not the model's parameters: make "
            "the optimizer after the model is cast, moved, wrapped and sharded."
        )
    elif not foreign and (left := [name for name, each in _trainable(first).items() if id(each) not in changed]):
        yield (
            f"In no group of the optimizer, in spite of requires_grad=True: {listed(left)}; add them, or call "
            "requires_grad_(False)."
        )


def _shared(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    now = {name: id(each) for name, each in first.model.named_parameters(remove_duplicate=False)}
    by_id: dict[int, list[str]] = {}
    for name, number in first.ties.items():
        by_id.setdefault(number, []).append(name)
    untied = [names for names in by_id.values() if len({now.get(name) for name in names}) > 1]
    config = getattr(first.model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and hasattr(first.model, "get_output_embeddings"):
        ends = (first.model.get_input_embeddings(), first.model.get_output_embeddings())
        weights = [getattr(each, "weight", None) for each in ends]
        if all(each is not None for each in weights) and weights[0] is not weights[1]:
            names = {number: name for name, number in now.items()}
            untied.append([names.get(id(each), "?") for each in weights])
    for names in untied:
        yield f"{' and '.join(names)} were one weight, and are two now: tie them again, as with model.tie_weights()."
    if moved := [name for name, each, version in first.frozen if each._version != version]:
        yield (
            f"{listed(moved)} changed in spite of requires_grad=False: an old gradient is left in .grad; make the "
            "optimizer of the trainable parameters alone, or set .grad = None."
        )
