"""The precision that was requested beside the one that is effective, read back from a first optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mantissa.display import counted, dtype_name, listed
from mantissa.formats import FORMATS, FP8, TF32, Format, computing_in, scaled_number
from mantissa.step.flags import fp32_flags
from mantissa.tensors import changed_by, moments, unregistered
from mantissa.watch.first_step import FirstStep

_KINDS = {"matmul": nn.Module, "conv": nn.modules.conv._ConvNd, "rnn": nn.RNNBase}
"""Modules that a flag is for."""
_SDPA = ("flash", "mem_efficient", "cudnn", "math")


@dataclass
class Setup:
    """What a training is set up to compute in, and where that is not what was asked for."""

    requested: str
    """Name of a precision format; empty: not stated."""
    effective: dict[str, str]
    """Formats in effect, by aspect, such as ``weights``."""
    differences: list[str]
    """Sentences, each a silent difference with its cure."""

    def __str__(self) -> str:
        width = max(map(len, self.effective))
        rows = [f"  {name:{width}}  {value}" for name, value in self.effective.items()]
        asked = f"requested: {self.requested or 'not stated'}; effective:"
        return "\n".join([asked, *rows, *(f"DIFFERS: {difference}" for difference in self.differences)])


class Aspect(NamedTuple):
    """What a check says of one aspect of the setup."""

    rows: dict[str, str]
    """Formats in effect, by what has them."""
    differences: list[str]


def read_setup(first: FirstStep, precision: str | None) -> Setup:
    """Return what is requested and what is effective, after an optimizer step.

    Args:
        first: which saw the step.
        precision: the name of the format that was asked for, such as ``bf16``; None: it is not known.
    """
    format = FORMATS[precision] if precision else None
    aspects = [check(first, format) for check in CHECKS]
    rows = {name: value for aspect in aspects for name, value in aspect.rows.items()}
    return Setup(precision or "", rows, [sentence for aspect in aspects for sentence in aspect.differences])


def _counted(dtypes: Iterable[Any]) -> str:
    counts = Counter(map(dtype_name, dtypes)).most_common()
    return ", ".join(f"{name} ({count})" if len(counts) > 1 else name for name, count in counts) or "none"


def _weights(first: FirstStep, format: Format | None) -> Aspect:
    row = _counted(weight.dtype for weight in first.trainable.values())
    if first.frozen:
        row += f"; frozen ones: {_counted(weight.dtype for _, weight, _ in first.frozen)}"
    if first.masters:
        row += "; the optimizer changes fp32 copies of them"
    differences = []

    # Weights of 16 bits that nobody asked for, or without the masters that were asked for.
    half = [name for name, weight in first.trainable.items() if weight.dtype.itemsize == 2]
    if half and not first.masters and not (format and format.half_weights):
        dtype = first.trainable[half[0]].dtype
        asked = f"precision={format.name} asks for fp32 ones" if format else "no precision was stated"
        cure = "call model.float() before the optimizer is made"
        if hasattr(first.model, "config"):
            cure = "load them with from_pretrained(…, dtype=torch.float32); transformers 5 takes the checkpoint's dtype"
        pure = "" if format else f", or state precision='{computing_in(None, dtype)}'"
        stored = f"The weights of {listed(half)} are {dtype_name(dtype)}, and {asked}"
        differences.append(f"{stored}, so small updates are lost: {cure}{pure}.")
    elif half and not first.masters and format and format.masters:
        asked = f"precision={format.name} asks for fp32 masters"
        differences.append(f"{asked}, but the optimizer has none: give it fp32 copies.")

    # And wider ones than those that were asked for, or narrower ones than fp64.
    sizes = {name: of.dtype.itemsize for name, of in first.trainable.items()}
    wide = [name for name, size in sizes.items() if format and size > format.weights.itemsize]
    narrow = [name for name, size in sizes.items() if format and format.wide and size < format.wide.itemsize]
    if (wide or narrow) and format:
        meant = dtype_name(format.weights)
        asked = f"precision={format.name} asks for {meant} weights"
        those = f"{listed(wide or narrow)} are {'wider' if wide else 'narrower'}"
        differences.append(f"{asked}, but {those}: call model.to(torch.{meant}).")
    return Aspect({"weights": row}, differences)


def _gradients(first: FirstStep, format: Format | None) -> Aspect:
    row = _counted(first.gradients.elements())
    if first.sparse:
        row += f"; sparse or complex, and their updates not measured: {listed(first.sparse)}"
    differences = []
    if first.updates > 1:
        times = f"The optimizer stepped {first.updates} times before watch.step"
        differences.append(f"{times}, which calls that one step: call it after each optimizer.step.")
    if first.idle:
        none = "When the optimizer stepped, no weight had a gradient" + (" other than 0" if first.gradients else "")
        differences.append(f"{none}, so nothing trains: call backward before it, and zero_grad after.")
    passes = min(first.calls.values(), default=1)  # a shared module has more calls
    half = [dtype_name(dtype) for dtype in first.gradients if dtype.itemsize == 2]
    if half and passes > 1 and not first.masters and not (format and format.half_weights):
        summed = f"Gradients of {passes} forward passes are summed in {half[0]}"
        differences.append(f"{summed}: sum them in fp32, or keep fp32 weights.")
    return Aspect({"gradients": row}, differences)


def _optimizer_state(first: FirstStep, format: Format | None) -> Aspect:
    changed, states = changed_by(first.optimizer), first.optimizer.state
    named = [(first.names.get(id(weight), "a master"), weight) for weight in changed]
    state = [
        (f"{name} ({key})", weight.dtype, moment.dtype)
        for name, weight in named
        for key, moment in moments(states.get(weight, {}), weight).items()
    ]
    row = f"{_counted(dtype for *_, dtype in state)} ({type(first.optimizer).__name__})"
    differences = []
    for eps in {group.get("eps") for group in first.optimizer.param_groups if _adds_in_fp16(group)}:
        lost = f"The optimizer's eps={eps:g} is 0 in float16, so that updates may be infinite"
        differences.append(f"{lost}: keep fp32 weights, or set eps=1e-4.")
    meant = getattr(first.optimizer, "state_dtype", None)  # of one that keeps fewer bits on purpose
    narrow = [name for name, held, dtype in state if dtype.itemsize < held.itemsize and dtype != meant]
    if narrow:
        fewer = f"The optimizer's state of {listed(narrow)} has fewer bits than weights"
        differences.append(f"{fewer}: make it after the model is cast.")
    return Aspect({"optimizer state": row}, differences)


def _adds_in_fp16(group: dict[str, Any]) -> bool:
    """Return whether a group's eps is lost in fp16; fused kernels add it in fp32."""
    half = any(weight.dtype == torch.float16 for weight in group["params"])
    return half and not group.get("fused") and 0 < (group.get("eps") or 0) < 2.0**-25


def _autocast(first: FirstStep, format: Format | None) -> Aspect:
    seen = first.autocast
    row = _counted(dtype or "off" for dtype in seen.values()) if seen else "not seen: compiled, or not called"
    differences = []
    wanted = format.autocast if format else None
    name = f"precision={format.name}" if format else ""
    entered = {dtype for dtype in seen.values() if dtype}
    off = [module for module, dtype in seen.items() if dtype is None and module in first.islands]
    if seen and wanted and wanted not in entered | {policy.param_dtype for policy, _ in policies(first.model)}:
        ran = f"in autocast to {_counted(entered)}" if entered else "without it"
        asked = f"{name} asks for autocast to {_counted([wanted])}, but the forward ran {ran}"
        differences.append(f'{asked}: enter torch.autocast("{first.device.type}", dtype={wanted}) around it.')
    elif format and not wanted and entered:
        ran = f"but the forward pass ran in autocast to {_counted(entered)}"
        differences.append(f"{name} asks for no autocast, {ran}: leave it out.")
    elif off and entered:
        where = f"Autocast is off in {listed(off, 'module')} and on around"
        differences.append(f"{where}: if not meant, drop autocast(enabled=False).")
    if first.in_autocast:
        inside = "The optimizer steps inside of autocast, whose cache keeps copies of the old weights"
        differences.append(f"{inside}: leave it before.")
    return Aspect({"autocast": row}, differences)


def _loss(first: FirstStep, format: Format | None) -> Aspect:
    half = next((dtype for dtype in first.losses if dtype.itemsize == 2), None)
    differences = []
    if half is not None and not (format and format.half_weights):
        rounds = f"The loss is {dtype_name(half)}, which rounds it by up to {torch.finfo(half).eps / 2:.1g} of its size"
        differences.append(f"{rounds}: compute it in fp32, as from logits.float().")
    return Aspect({"loss": _counted(first.losses)} if first.losses else {}, differences)


def _loss_scale(first: FirstStep, format: Format | None) -> Aspect:
    scale = first.scale
    row = "dynamic" if scale.enabled else "none: the GradScaler is disabled" if scale.given else "none"
    differences = []

    # Whether there should be one.
    half = {dtype for dtype in first.autocast.values() if dtype}
    half |= {weight.dtype for weight in first.trainable.values() if weight.dtype.itemsize == 2}
    if torch.float16 in half and not scale.enabled:
        keep = "keep fp32 weights, " if refuses_to_unscale(first.optimizer) else ""
        unknown = "Watch knows of no loss scale; without, float16 gradients below 2^-24 are 0"
        differences.append(f"{unknown}: {keep}use a GradScaler, and give it to Watch.")
    elif scale.enabled and half and torch.float16 not in half:
        idle = f"The GradScaler has no use with {_counted(half)}, whose exponents are fp32's"
        differences.append(f"{idle}: leave it out.")

    # Whether it is used in the order of torch's recipe: scale, unscale, clip, step.
    if first.clipped_to:
        clipped = f"The gradients were clipped to {first.clipped_to:.4g} while they were multiplied by the loss scale"
        differences.append(f"{clipped} of {scale.read():g}: call scaler.unscale_(optimizer) before the clipping.")
    if scale.enabled and scale.tensor is None:
        unused = "The GradScaler was never used"
        differences.append(f"{unused}: call scaler.scale(loss).backward() and scaler.step(optimizer).")
    elif first.mixes_scales:
        mixed = "scaler.update() ran between two backward passes of one step, whose gradients have several scales"
        differences.append(f"{mixed}: call it, and scaler.unscale_(optimizer), after the last of them.")
    elif scale.enabled and not first.unscaled and first.gradients:
        still = f"The gradients are still multiplied by {scale.read():g}"
        differences.append(f"{still}: call scaler.step(optimizer) instead of optimizer.step().")
    return Aspect({"loss scale": row}, differences)


def refuses_to_unscale(optimizer: torch.optim.Optimizer) -> str:
    """Return what a ``GradScaler`` refuses in an optimizer; empty: nothing."""
    dtypes = {weight.dtype for weight in changed_by(optimizer)}
    if torch.float16 not in dtypes or getattr(optimizer, "_step_supports_amp_scaling", False):
        return ""
    cure = "load the weights in fp32, as with model.float() or from_pretrained(…, dtype=torch.float32)"
    return f"DIFFERS: The weights are float16, whose gradients a GradScaler refuses to unscale: {cure}."


def flags_differ(kind: str, model: nn.Module, format: Format | None) -> list[str]:
    """Return where the flags of a kind of device are not those of a format that multiplies fp32 numbers."""
    differences = []
    if format and not format.half and (kind == "cuda" or format.number is not TF32):
        tf32 = format.number is TF32
        wanted = ("tf32",) if tf32 else ("ieee", "none")
        for name, value in fp32_flags(kind).items():
            there = any(isinstance(module, _KINDS[name.partition(".")[2]]) for module in model.modules())
            if there and value not in wanted:
                asked = f"precision={format.name} has fp32 products in {value} ({name})"
                differences.append(f"{asked}: set {_setting(name, tf32)}.")
    for name, library in (("cuda.matmul", torch.backends.cuda.matmul), ("cudnn.conv", torch.backends.cudnn)):
        try:
            _ = library.allow_tf32
        except RuntimeError:
            tf32 = format.number is TF32 if format and not format.half else fp32_flags("cuda")[name] == "tf32"
            both = f"allow_tf32 and fp32_precision of {name.removesuffix('.conv')}"
            contradict = f"The flags {both} contradict each other, an error where torch reads them"
            differences.append(f"{contradict}: set {_setting(name, tf32)}.")
    return differences


def _setting(name: str, tf32: bool) -> str:
    """Return what to set for fp32 products in TF32 or IEEE: the older flags, too, so that none contradicts another."""
    if name == "cuda.matmul":
        return f"torch.backends.cuda.matmul.allow_tf32 = {tf32}"
    if name.startswith("cudnn"):
        # The older flag is for all of cuDNN, and lets the newer ones inherit; so do those of matmuls from cuDNN's tf32.
        value = "none" if tf32 else "ieee"
        return f"torch.backends.cudnn.fp32_precision = '{value}'; torch.backends.cudnn.allow_tf32 = {tf32}"
    return f"torch.backends.{name}.fp32_precision = '{'tf32' if tf32 else 'ieee'}'"


def _fp32_arithmetic(first: FirstStep, format: Format | None) -> Aspect:
    kind = first.device.type
    flags = fp32_flags(kind)
    changed = ", ".join(f"{name} {value}" for name, value in flags.items() if value not in ("none", "ieee"))
    return Aspect(
        {"fp32 products": changed or ("ieee" if flags else "not known")}, flags_differ(kind, first.model, format)
    )


def _attention(first: FirstStep, format: Format | None) -> Aspect:
    asked = getattr(getattr(first.model, "config", None), "_attn_implementation", None)
    parts = [f"the model's config: {asked}"] if asked else []
    if first.device.type == "cuda":  # elsewhere the switches mean nothing
        enabled = [name for name in _SDPA if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
        parts.insert(0, f"sdpa may use {', '.join(enabled)}")
    return Aspect({"attention": "; ".join(parts)} if parts else {}, [])


def _scaled_layers(first: FirstStep, format: Format | None) -> Aspect:
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
    rows = {name: counted(len(modules), "module") if modules else "none" for name, modules in converted.items()}
    differences = []
    asked = format.number if format and format.number.scaled else None
    if idle:
        ran = f"{listed(idle, 'module')} of transformer_engine ran without fp8"
        differences.append(f"{ran}: enter its fp8_autocast.")
    elif asked and len(plain) > len(converted.get(asked.name, ())):  # a head is left on purpose
        cure = "call torchao.float8.convert_to_float8_training(model)" if asked is FP8 else "convert them with torchao"
        left = f"precision={asked.name} is asked for, but {listed(plain, 'module')} are plain nn.Linear"
        differences.append(f"{left}: {cure}, and see what it filters.")
    return Aspect(rows, differences)


def policies(model: nn.Module) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """Yield the policy of each module of FSDP2, with the parameters that it shards."""
    sharded: set[int] = set()
    for module in reversed(list(model.modules())):
        if hasattr(module, "_get_fsdp_state"):
            rest = [weight for weight in module.parameters() if id(weight) not in sharded]
            sharded |= set(map(id, rest))
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            yield state._mp_policy, rest


def _fsdp2(first: FirstStep, format: Format | None) -> Aspect:
    shards: dict[str, tuple[Any, Any, set[torch.dtype]]] = {}
    for policy, parameters in policies(first.model):
        dtypes = {weight.dtype for weight in parameters if weight.requires_grad}
        reduced = policy.reduce_dtype or policy.param_dtype
        computes = f"shards {_counted(dtypes)}, computes in {_counted([policy.param_dtype or 'the same'])}"
        shards[f"{computes}, sums gradients in {_counted([reduced or 'the same'])}"] = policy, reduced, dtypes
    if not shards:
        return Aspect({}, [])
    policy, reduced, dtypes = next(iter(shards.values()))
    differences = []
    if policy.param_dtype in dtypes and policy.param_dtype.itemsize == 2:
        already = f"FSDP2 shards weights that are {_counted([policy.param_dtype])} already"
        differences.append(f"{already}: call model.float() before fully_shard.")
    if policy.reduce_dtype is None and reduced and reduced.itemsize == 2:
        summed = f"FSDP2 sums the ranks' gradients in {_counted([reduced])}"
        differences.append(f"{summed}: set MixedPrecisionPolicy(reduce_dtype=torch.float32).")
    return Aspect({"FSDP2": "; ".join(shards)}, differences)


def _trained(first: FirstStep, format: Format | None) -> Aspect:
    differences = []

    # What the optimizer has beside the model's weights, or lacks of them.
    changed = {id(weight) for weight in changed_by(first.optimizer)}
    now = {name: id(weight) for name, weight in first.model.named_parameters(remove_duplicate=False)}
    trains = first.trainable
    foreign, left = changed - set(now.values()), [name for name in trains if now[name] not in changed]
    # A weight that moves without this optimizer has another one.
    left = [name for name in left if first.began.get(now[name]) in (None, trains[name]._version)]
    if foreign and not first.masters:
        others = f"{len(foreign)} of {len(changed)} tensors of the optimizer are not the model's parameters"
        whole = foreign != changed and not left
        to_do = "give Watch one module that has them, too, such as nn.ModuleList([model, loss])"
        made = "make the optimizer after the model is cast, moved, wrapped and sharded"
        differences.append(f"{others}: {to_do if whole else made}.")
    elif left and not foreign:
        lacks = f"In no group of the optimizer, but trainable: {listed(left)}"
        differences.append(f"{lacks}; add them, or call requires_grad_(False).")

    if hidden := unregistered(first.model, first.optimizer, lambda weight: weight.grad is not None):
        differences.append(f"{hidden}.")

    # What was one weight, and what was not to move.
    tied: dict[int, list[str]] = {}
    for name, number in first.ties.items():
        tied.setdefault(number, []).append(name)
    for names in tied.values():
        if len({now.get(name) for name in names}) > 1:
            apart = f"{' and '.join(names)} were one weight, and are two now"
            differences.append(f"{apart}: tie them, as with model.tie_weights().")
    if moved := [name for name, weight, version in first.frozen if weight._version != version]:
        differences.append(
            f"Frozen, but changed: {listed(moved)}; leave them out of the optimizer, or clear their .grad."
        )
    return Aspect({}, differences)


CHECKS: tuple[Callable[[FirstStep, Format | None], Aspect], ...] = (
    *(_weights, _gradients, _optimizer_state, _autocast, _loss, _loss_scale),
    *(_fp32_arithmetic, _attention, _scaled_layers, _fsdp2, _trained),
)
"""What is looked at, in the order in which it is shown."""
