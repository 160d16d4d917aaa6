"""The precision that was requested beside the one that is effective, read back from a first optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from mantissa.display import counted, dtype_name, listed
from mantissa.errors import NotFiniteError, UsageError
from mantissa.formats import FORMATS, FP8, TF32, Format, computing_in, scaled_number
from mantissa.tensors import changed_by, measurable, moments, wide_dtype

_FLAGS = {"cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"), "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")}
"""Of torch.backends: what decides how each kind of device multiplies fp32 numbers."""
_KINDS = {"matmul": nn.Module, "conv": nn.modules.conv._ConvNd, "rnn": nn.RNNBase}
"""The modules that a flag is for."""
_SDPA = ("flash", "mem_efficient", "cudnn", "math")


@dataclass
class Setup:
    """What a training is set up to compute in, and where that is not what was asked for."""

    requested: str
    """The name of a precision format; empty: not stated."""
    effective: dict[str, str]
    """Formats in effect, by aspect, such as ``weights``."""
    differences: list[str] = field(default_factory=list)
    """Each silent difference, as a sentence with its cure."""

    def __str__(self) -> str:
        width = max(map(len, self.effective))
        rows = [f"  {name:{width}}  {value}" for name, value in self.effective.items()]
        asked = f"requested: {self.requested or 'not stated'}; effective:"
        return "\n".join([asked, *rows, *(f"DIFFERS: {each}" for each in self.differences)])


def observing(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method raise NotFiniteError and UsageError alone; ``_missed`` gets other errors; the training goes on."""

    @wraps(method)
    def observe(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except (NotFiniteError, UsageError):
            raise
        except Exception as error:  # of any kind: what is in a model and a loop decides
            self._missed(error)

    return observe


class Listener:
    """A hook that copies and files of its module do not have."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # its caller is, and there would be a break in the graph
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # does nothing, and opens where this package is not installed


class FirstStep:
    """Sees what a setup needs and no tensor tells later, from before the first step on until ``close``.

    Args:
        model: without the wrappers of DDP and torch.compile.
        optimizer: torch's own, not a library's wrapper of it.
        scaler: a ``torch.amp.GradScaler``, or None.
        hooked: whether hooks on submodules do no harm; they would, where the model is compiled.
        missed: hears why something cannot be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        hooked: bool,
        missed: Callable[[Exception], None],
    ) -> None:
        self.model, self.optimizer, self.scaler, self._missed = model, optimizer, scaler, missed
        self.autocast: dict[str, torch.dtype | None] = {}
        """Autocast dtype in the forward pass, by submodule that multiplies; None: off."""
        self.calls: Counter[str] = Counter()
        self.gradients: Counter[torch.dtype] = Counter()
        self.in_autocast = self.unscaled = False
        self.sparse: list[str] = []
        self.updates = 1
        """How often the optimizer stepped before the step was said to be over."""
        self._scaled: dict[int, torch.Tensor] = {}
        """Norm of each gradient as backward left it, with the loss scale."""
        self.clipped_to = 0.0
        """Norm to which gradients were clipped while they had the loss scale; 0: they were not."""
        self.device = next(model.parameters()).device
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.ties = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.began = {id(each): each._version for each in model.parameters()}
        self.frozen = [(name, each, each._version) for name, each in model.named_parameters() if not each.requires_grad]
        self._hooks = ExitStack()
        for name, module in model.named_modules() if hooked else ():
            if any(each.ndim > 1 for each in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding):
                self._hooks.callback(module.register_forward_pre_hook(Listener(partial(self._called, name))).remove)
        scaled = [each for each in changed_by(optimizer) if each.requires_grad and each.is_leaf]
        for each in scaled if hooked and scaler is not None and scaler.is_enabled() else ():
            self._hooks.callback(each.register_post_accumulate_grad_hook(Listener(self._accumulated)).remove)

    @observing
    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        if measurable(parameter.grad):
            self._scaled[id(parameter)] = torch.linalg.vector_norm(parameter.grad, dtype=wide_dtype([parameter.grad]))

    @observing
    def _called(self, name: str, module: nn.Module, arguments: Any) -> None:
        kind = next(module.parameters()).device.type
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():  # not one that is recomputed
            self.autocast[name] = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self.calls[name] += 1

    def before_update(self) -> None:
        """Look at the gradients, just before the optimizer's step."""
        parameters = changed_by(self.optimizer)
        given = [each for each in parameters if each.grad is not None]
        self.gradients = Counter(each.grad.dtype for each in given if each.grad is not None)
        self.sparse = [self.names.get(id(each), "a master") for each in given if not measurable(each.grad)]
        self.in_autocast = any(map(torch.is_autocast_enabled, {each.device.type for each in parameters}))
        if self.scaler is not None and self.scaler.is_enabled():
            state = self.scaler._per_optimizer_states.get(id(self.optimizer), {})
            self.unscaled = bool(state.get("found_inf_per_device"))
            self._look_for_clipping([each for each in given if id(each) in self._scaled])

    def _look_for_clipping(self, parameters: list[nn.Parameter]) -> None:
        """Compare gradients with those that backward left.

        Clipping shrinks them to a norm of about 1, which dividing by a loss scale makes far smaller. Clipped after
        that, they would have that norm.
        """
        if not self.unscaled or not parameters:
            return
        scale, left = self.scaler.get_scale(), getattr(self.optimizer, "grad_scale", None)
        before = torch.stack([self._scaled[id(each)] for each in parameters]).norm().item()
        gradients = [each.grad for each in parameters if each.grad is not None]
        now = torch.stack(torch._foreach_norm(gradients, dtype=wide_dtype(gradients))).norm().item()
        clipped = now if left is not None else now * scale
        if clipped < 0.1 * before and clipped / scale < scale**-0.5:
            self.clipped_to = clipped

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by name."""
        named = self.model.named_parameters()
        return {name: each for name, each in named if each.requires_grad and each.is_floating_point()}

    @property
    def masters(self) -> bool:
        """Whether the optimizer changes fp32 tensors in the place of the model's 16-bit ones."""
        other = [each for each in changed_by(self.optimizer) if id(each) not in self.names]
        half = any(each.dtype.itemsize == 2 for each in self.trainable.values())
        return half and bool(other) and all(each.dtype == torch.float32 for each in other)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()


def read_setup(first: FirstStep, precision: str | None = None) -> Setup:
    """Return what is requested and what is effective, after an optimizer step.

    Args:
        first: which saw the step.
        precision: the name of the format that was asked for, such as ``bf16``; None: it is not known.
    """
    format = FORMATS[precision] if precision else None
    parts = (_weights, _update, _autocast, _scaling, _products, _scaled, _fsdp2, _optimized)
    rows: dict[str, str] = {}
    differences = [sentence for part in parts for sentence in part(first, format, rows)]
    return Setup(precision or "", rows, differences)


def _counted(dtypes: Iterable[Any]) -> str:
    counts = Counter(map(dtype_name, dtypes)).most_common()
    return ", ".join(f"{name} ({count})" if len(counts) > 1 else name for name, count in counts) or "none"


def _weights(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    rows["weights"] = _counted(each.dtype for each in first.trainable.values())
    if first.frozen:
        rows["weights"] += f"; frozen ones: {_counted(each.dtype for _, each, _ in first.frozen)}"
    if first.masters:
        rows["weights"] += "; the optimizer changes fp32 copies of them"
    half = [name for name, each in first.trainable.items() if each.dtype.itemsize == 2]
    wide = [name for name, each in first.trainable.items() if each.dtype.itemsize > 2]
    dtype = dtype_name(first.trainable[half[0]].dtype) if half else ""
    if half and not first.masters and not (format and format.half_weights):
        asked = f"precision={format.name} asks for fp32 ones" if format else "no precision was stated"
        cure = "call model.float() before the optimizer is made"
        if hasattr(first.model, "config"):
            cure = "load them with from_pretrained(…, dtype=torch.float32); transformers 5 takes the checkpoint's dtype"
        stored = computing_in(None, first.trainable[half[0]].dtype)
        pure = "" if format else f", or state precision='{stored}'"
        yield f"The weights of {listed(half)} are {dtype}, and {asked}, so small updates are lost: {cure}{pure}."
    elif half and not first.masters and format and format.masters:
        yield f"precision={format.name} asks for fp32 masters, but the optimizer has none: give it fp32 copies."
    if wide and format and format.half_weights:
        dtype = dtype_name(format.half_weights)
        yield f"precision={format.name} asks for {dtype} weights, but {listed(wide)} are wider: call model.to({dtype})."


def _update(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    rows["gradients"] = _counted(first.gradients.elements())
    if first.sparse:
        rows["gradients"] += f"; sparse or complex, and their updates not measured: {listed(first.sparse)}"
    if first.updates > 1:
        times = f"The optimizer stepped {first.updates} times before watch.step"
        yield f"{times}, which calls that one step: call it after each optimizer.step."
    passes = min(first.calls.values(), default=1)  # a shared module has more calls
    half = [dtype_name(each) for each in first.gradients if each.itemsize == 2]
    if half and passes > 1 and not first.masters and not (format and format.half_weights):
        yield f"Gradients of {passes} forward passes are summed in {half[0]}: sum them in fp32, or keep fp32 weights."
    state = [
        (first.names.get(id(parameter), "a master"), key, parameter.dtype, value.dtype)
        for parameter in changed_by(first.optimizer)
        for key, value in moments(first.optimizer.state.get(parameter, {}), parameter).items()
    ]
    rows["optimizer state"] = f"{_counted(each[3] for each in state)} ({type(first.optimizer).__name__})"
    for eps in {group.get("eps") for group in first.optimizer.param_groups if _adds_in_fp16(group)}:
        cure = "keep fp32 weights, or set eps=1e-4"
        yield f"The optimizer's eps={eps:g} is 0 in float16, so that updates may be infinite: {cure}."
    meant = getattr(first.optimizer, "state_dtype", None)  # of one that keeps fewer bits on purpose
    narrow = [each for each in state if each[3].itemsize < each[2].itemsize and each[3] != meant]
    if low := [f"{name} ({key})" for name, key, *_ in narrow]:
        yield f"The optimizer's state of {listed(low)} has fewer bits than weights: make it after the model is cast."


def _adds_in_fp16(group: dict[str, Any]) -> bool:
    """Return whether a group's eps is lost in fp16; fused kernels add it in fp32."""
    half = any(each.dtype == torch.float16 for each in group["params"])
    return half and not group.get("fused") and 0 < (group.get("eps") or 0) < 2.0**-25


def _autocast(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    seen, kind = first.autocast, first.device.type
    rows["autocast"] = (
        _counted(each or "off" for each in seen.values()) if seen else "not seen: compiled, or not called"
    )
    wanted = format.autocast if format else None
    name = f"precision={format.name}" if format else ""
    others = {each for each in seen.values() if each}
    off = [name for name, each in seen.items() if each is None]
    if seen and wanted and wanted not in others | {policy.param_dtype for policy, _ in policies(first.model)}:
        ran = f"in autocast to {_counted(others)}" if others else "without it"
        cure = f'torch.autocast("{kind}", dtype={wanted})'
        yield f"{name} asks for autocast to {_counted([wanted])}, but the forward ran {ran}: enter {cure} around it."
    elif format and not wanted and others:
        yield f"{name} asks for no autocast, but the forward pass ran in autocast to {_counted(others)}: leave it out."
    elif off and others:
        yield f"Autocast is off in {listed(off, 'module')} and on around: if not meant, drop autocast(enabled=False)."
    if first.in_autocast:
        yield "The optimizer steps inside of autocast, whose cache keeps copies of the old weights: leave it before."


def _scaling(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    scaler = first.scaler
    enabled = scaler is not None and scaler.is_enabled()
    rows["loss scale"] = "dynamic" if enabled else "none" if scaler is None else "none: the GradScaler is disabled"
    half = {each for each in first.autocast.values() if each}
    half |= {each.dtype for each in first.trainable.values() if each.dtype.itemsize == 2}
    if torch.float16 in half and not enabled:
        keep = "keep fp32 weights, " * bool(refuses_to_unscale(first.optimizer))
        cure = f"{keep}use a GradScaler, and give it to Watch"
        yield f"Watch knows of no loss scale; without, float16 gradients below 2^-24 are 0: {cure}."
    elif enabled and half and torch.float16 not in half:
        yield f"The GradScaler has no use with {_counted(half)}, whose exponents are fp32's: leave it out."
    if first.clipped_to:
        at = f"clipped to {first.clipped_to:.4g} while they were multiplied by the loss scale of {scaler.get_scale():g}"
        yield f"The gradients were {at}: call scaler.unscale_(optimizer) before the clipping."
    if enabled and scaler._scale is None:
        yield "The GradScaler was never used: call scaler.scale(loss).backward() and scaler.step(optimizer)."
    elif enabled and not first.unscaled and first.gradients:
        scale = f"{scaler.get_scale():g}"
        yield f"The gradients are still multiplied by {scale}: call scaler.step(optimizer) instead of optimizer.step()."


def refuses_to_unscale(optimizer: torch.optim.Optimizer) -> str:
    """Return what a ``GradScaler`` refuses in an optimizer; empty: nothing."""
    dtypes = {each.dtype for each in changed_by(optimizer)}
    if torch.float16 not in dtypes or getattr(optimizer, "_step_supports_amp_scaling", False):
        return ""
    cure = "load the weights in fp32, as with model.float() or from_pretrained(…, dtype=torch.float32)"
    return f"DIFFERS: The weights are float16, whose gradients a GradScaler refuses to unscale: {cure}."


def fp32_flags(kind: str) -> dict[str, str]:
    """Return how a kind of device, ``cuda`` or ``cpu``, multiplies fp32 numbers, by the name in ``torch.backends``."""
    split = {name: name.split(".") for name in _FLAGS.get(kind, ())}
    return {name: getattr(getattr(torch.backends, one), two).fp32_precision for name, (one, two) in split.items()}


def flags_differ(kind: str, model: nn.Module, format: Format | None) -> Iterator[str]:
    """Yield where the flags of a kind of device are not those of a format that multiplies fp32 numbers."""
    wanted = ("tf32",) if format and format.number is TF32 else ("ieee", "none")
    for name, value in fp32_flags(kind).items() if format and not format.half else ():
        there = any(isinstance(module, _KINDS[name.partition(".")[2]]) for module in model.modules())
        if there and value not in wanted and (kind == "cuda" or wanted[0] != "tf32"):
            cure = f"torch.backends.{name}.fp32_precision = '{wanted[0]}'"
            yield f"precision={format.name if format else ''} has fp32 products in {value} ({name}): set {cure}."
    try:
        _ = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        yield "The flags allow_tf32 and fp32_precision contradict each other, an error where torch reads them: set one."


def _products(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    kind = first.device.type
    rows["fp32 products"] = ", ".join(f"{name} {value}" for name, value in fp32_flags(kind).items()) or "not known"
    asked = getattr(getattr(first.model, "config", None), "_attn_implementation", None)
    enabled = [name for name in _SDPA if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    kernels = f"sdpa may use {', '.join(enabled)}" if kind == "cuda" else ""  # elsewhere the switches mean nothing
    if said := "; ".join(filter(None, [kernels, asked and f"the model's config: {asked}"])):
        rows["attention"] = said
    yield from flags_differ(kind, first.model, format)


def _scaled(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    converted: dict[str, list[str]] = {FP8.name: []}
    plain: list[str] = []
    idle: list[str] = []
    for name, module in first.model.named_modules():
        if type(module).__module__.startswith("transformer_engine") and hasattr(module, "fp8"):
            (converted[FP8.name] if module.fp8 else idle).append(name)
        elif number := scaled_number(module):
            converted.setdefault(number.name, []).append(name)
        elif isinstance(module, nn.Linear):
            plain.append(name)
    rows |= {name: counted(len(modules), "module") if modules else "none" for name, modules in converted.items()}
    asked = format.number if format and format.number.scaled else None
    if idle:
        yield f"{listed(idle, 'module')} of transformer_engine ran without fp8: enter its fp8_autocast."
    elif asked and len(plain) > len(converted.get(asked.name, ())):  # a head is left on purpose
        by = "call torchao.float8.convert_to_float8_training(model)" if asked is FP8 else "convert them with torchao"
        kept = f"{listed(plain, 'module')} are plain nn.Linear: {by}, and see what it filters"
        yield f"precision={asked.name} is asked for, but {kept}."


def policies(model: nn.Module) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """Yield the policy of each module of FSDP2, with the parameters that it shards."""
    seen: set[int] = set()
    for module in reversed(list(model.modules())):
        if hasattr(module, "_get_fsdp_state"):
            own = [each for each in module.parameters() if id(each) not in seen]
            seen |= set(map(id, own))
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            yield state._mp_policy, own


def _fsdp2(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    found: dict[str, tuple[Any, Any, set[torch.dtype]]] = {}
    for policy, parameters in policies(first.model):
        dtypes = {each.dtype for each in parameters if each.requires_grad}
        reduced = policy.reduce_dtype or policy.param_dtype
        text = f"shards {_counted(dtypes)}, computes in {_counted([policy.param_dtype or 'the same'])}"
        found[f"{text}, sums gradients in {_counted([reduced or 'the same'])}"] = policy, reduced, dtypes
    if found:
        rows["FSDP2"] = "; ".join(found)
    for policy, reduced, dtypes in list(found.values())[:1]:
        asked = policy.param_dtype
        if asked in dtypes and asked.itemsize == 2:
            yield f"FSDP2 shards weights that are {_counted([asked])} already: call model.float() before fully_shard."
        if policy.reduce_dtype is None and reduced and reduced.itemsize == 2:
            cure = "set MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            yield f"FSDP2 sums the ranks' gradients in {_counted([reduced])}: {cure}."


def _optimized(first: FirstStep, format: Format | None, rows: dict[str, str]) -> Iterator[str]:
    changed = {id(each) for each in changed_by(first.optimizer)}
    now = {name: id(each) for name, each in first.model.named_parameters(remove_duplicate=False)}
    foreign, left = changed - set(now.values()), [name for name, number in now.items() if number not in changed]
    trains = first.trainable  # a weight that moves without this optimizer has another one
    left = [name for name in left if name in trains and first.began.get(now[name]) in (None, trains[name]._version)]
    if foreign and not first.masters:
        cure = "make the optimizer after the model is cast, moved, wrapped and sharded"
        yield f"{len(foreign)} of {len(changed)} tensors of the optimizer are not the model's parameters: {cure}."
    elif left and not foreign:
        yield f"In no group of the optimizer, but trainable: {listed(left)}; add them, or call requires_grad_(False)."
    tied: dict[int, list[str]] = {}
    for name, number in first.ties.items():
        tied.setdefault(number, []).append(name)
    for names in tied.values():
        if len({now.get(name) for name in names}) > 1:
            yield f"{' and '.join(names)} were one weight, and are two now: tie them, as with model.tie_weights()."
    if moved := [name for name, each, version in first.frozen if each._version != version]:
        yield f"Frozen, but changed: {listed(moved)}; leave them out of the optimizer, or clear their .grad."
