"""The ``optimizer`` config group: any optimizer of torch.optim by name, and some others, with its parameter groups."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mantissa.formats import BF16, Format
from trainer.errors import UserError, check_choice, check_range, nearest, no_effect
from trainer.hardware import kind_of
from trainer.optim.groups import check_patterns, layer_factors, parameter_groups
from trainer.optim.low_state import AdamWBf16
from trainer.optim.masters import MasterWeights
from trainer.parallel.shards import is_sharded


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What sets a class of optimizers apart; the defaults are those of most of torch's."""

    place: str = ""
    """Where the class is, such as ``timm.optim.Lion``; empty: in torch.optim."""
    bf16_state: type[torch.optim.Optimizer] | None = None
    """The class that takes its place with ``optimizer.state=bf16``; None: there is none."""
    whole_matrices: bool = False
    """Whether it needs the norms of whole matrices, which FSDP's shards are not."""
    own_groups: bool = False
    """Whether its ``group_keys`` decide what it does with which parameter."""
    takes_scale: bool = True
    """Whether its fused form, given the loss scale, computes with gradients that are not rounded once more."""
    fused_by: type[torch.optim.Optimizer] | None = None
    """The class of torch whose fused kernel it uses; None: its own."""
    fused_shards: bool = False
    """Whether that kernel takes sharded weights (FSDP2's DTensors)."""
    fused_momentum: bool = False
    """Whether the fused form leaves it to others how momentum begins, see ``_start_momentum``."""


ADAMW = "optimizer=adamw optimizer.name=AdamW"
"""Overrides for the default, whichever of the two keys another optimizer is from."""
TRAITS = {
    "Adam": Traits(fused_shards=True),
    "AdamW": Traits(bf16_state=AdamWBf16, fused_shards=True),
    "SGD": Traits(fused_momentum=True),
    "Adafactor": Traits(whole_matrices=True),
    "Lion": Traits(place="timm.optim.Lion"),
    "Lamb": Traits(place="timm.optim.Lamb"),
    # It rounds the unscaled gradients of matrices to their dtype again; its other weights are AdamW's.
    "Muon": Traits(
        place="trainer.optim.muon.Muon",
        own_groups=True,
        takes_scale=False,
        fused_by=torch.optim.AdamW,
        fused_shards=True,
    ),
}
"""Traits by ``optimizer.name``. A class of torch.optim, or of another package, needs a row only where it is special."""


@dataclass
class Optimizer:
    """An optimizer's class and its options; a new choice is one YAML file."""

    name: str = "AdamW"
    """Optimizer class: any of torch.optim; Muon, Lion or Lamb; or package.Class of an installed package."""
    lr: float = 1e-3
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: float = 0.0
    """Weight decay of linear, convolution, embedding and attention weights. Nothing else is decayed, whatever its
    shape: biases, norms, scales, class tokens, plain position embeddings. """
    groups: Any = None
    """Settings by name pattern: ``lr`` multiplies the learning rate of the matching parameters, ``weight_decay``
    replaces theirs, if they have any. If several patterns match, the last one wins. """
    layer_decay: float | None = None
    """Layer-wise learning-rate decay: factor from each block to the one below, starting with 1 at the head; null: 1."""
    fused: bool = True
    """Use torch's fused kernel for the update, where there is a sound one for this device, these dtypes and options."""
    state: str = "auto"
    """AdamW's moments: auto: in the dtype of the weights that it updates; bf16: half the memory beside fp32 weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer class, such as ``betas`` or ``momentum``."""

    def __post_init__(self) -> None:
        check_range("optimizer.lr", self.lr, "(0, inf)")
        check_range("optimizer.weight_decay", self.weight_decay, "[0, inf)")
        if self.layer_decay is not None:
            check_range("optimizer.layer_decay", self.layer_decay, "(0, 1]")
        check_patterns(self.groups)
        check_choice("optimizer.state", self.state, ("auto", BF16.name))
        if self.state != "auto" and self.traits.bf16_state is None:
            raise UserError(
                f"optimizer.state={self.state} is for AdamW, not for {self.name}", "optimizer.state=auto", ADAMW
            )
        accepted = accepted_options(optimizer_class(self.name))
        for option in self.options:
            if option in ("lr", "weight_decay", "fused"):
                raise UserError(
                    f"optimizer.options.{option} has its own key",
                    f"optimizer.{option}={self.options[option]}",
                    mistake=f"optimizer.options.{option}",
                )
            if option not in accepted:
                key = f"optimizer.options.{option}"
                problem = f"{key}: {self.name} has no such argument{nearest(option, accepted)}"
                raise UserError(f"{problem}; where a YAML sets it, ~{key} removes it", "", mistake=key)
            if self.state != "auto" and option not in ("betas", "eps"):
                why = f"optimizer.state={self.state} has betas and eps alone"
                raise no_effect(f"optimizer.options.{option}", why, "optimizer.state=auto")

    @property
    def traits(self) -> Traits:
        """What sets its class apart; ``torch.optim.Muon`` is another class than ``Muon``."""
        traits = TRAITS.get(self.name.removeprefix("torch.optim."), Traits())
        return Traits() if traits.place and self.name.startswith("torch.optim.") else traits

    def check(self, parallel: str, format: Format) -> None:
        """Check that it can train with this choice of ``parallel``, and this format.

        Raises:
            UserError: it cannot.
        """
        if self.traits.whole_matrices and parallel == "fsdp":
            raise UserError(
                f"optimizer.name={self.name} needs the norms of whole matrices, which torch's does not compute for "
                "shards",
                "parallel=ddp",
                ADAMW,
            )
        if self.state != "auto" and (format.only_half or format.wide):
            has = "16-bit state already" if format.only_half else "its state in fp64"
            raise UserError(
                f"optimizer.state={self.state} is for fp32 weights or masters, but precision={format.name} has {has}",
                "optimizer.state=auto",
            )

    def build(
        self, model: nn.Module | MasterWeights, device: torch.device, blocks: list[nn.Module] | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer of the trainable parameters of a model or its masters, first those with weight decay.

        Args:
            model: what it changes.
            device: where that is.
            blocks: the model's repeated blocks, for ``layer_decay`` and for Muon.

        Raises:
            UserError: an option that this class, dtype, device or model does not support.
        """
        cls: Any = optimizer_class(self.name)
        traits = self.traits
        groups = self._groups(cls, model, blocks or [])
        parameters = [parameter for group in groups for parameter in group["params"]]
        keywords: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()
        }
        if not parameters:
            raise UserError("every parameter is frozen, so there is nothing to train; freeze fewer of them")
        if self.fused and self._takes_fused(cls, parameters, device):
            keywords["fused"] = True
        if self.state != "auto":
            cls = traits.bf16_state
        try:
            optimizer: torch.optim.Optimizer = cls(groups, lr=self.lr, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"torch.optim.{self.name} refuses optimizer.options={self.options}: {error}") from error
        scales = traits.takes_scale and getattr(optimizer, "_step_supports_amp_scaling", False)
        if not scales and any(parameter.dtype == torch.float16 for parameter in parameters):
            remedies = ["precision=fp16_master"]
            if traits.takes_scale and self._takes_fused(cls, parameters, device):
                remedies.insert(0, "optimizer.fused=true")
            elif Optimizer()._takes_fused(torch.optim.AdamW, parameters, device):
                remedies.insert(0, ADAMW if self.fused else f"{ADAMW} optimizer.fused=true")
            raise UserError(
                f"precision=fp16_pure: {self.name} gets fp16 gradients without the loss scale, of which those below "
                "6e-8 are 0",
                *remedies,
            )
        if traits.fused_momentum and "fused" in keywords:
            _start_momentum(optimizer)
        return optimizer

    def _groups(
        self, cls: type[torch.optim.Optimizer], model: nn.Module | MasterWeights, blocks: list[nn.Module]
    ) -> list[dict[str, Any]]:
        whole = model.model if isinstance(model, MasterWeights) else model
        factors = {} if self.layer_decay is None else layer_factors(whole, blocks, self.layer_decay)
        keys = cls.group_keys(whole, blocks) if self.traits.own_groups else {}  # type: ignore[attr-defined]
        groups = parameter_groups(model.named_parameters(), whole, self.weight_decay, self.groups or {}, factors, keys)
        if "weight_decay" not in accepted_options(cls):
            decays = [group.pop("weight_decay") for group in groups]
            if any(decays):
                in_groups = any("weight_decay" in settings for settings in (self.groups or {}).values())
                key = "optimizer.groups" if in_groups else "optimizer.weight_decay"
                remedies = [] if in_groups else ["optimizer.weight_decay=0"]
                raise UserError(f"{key}: torch.optim.{self.name} has no weight decay", *remedies)
        return groups

    def _takes_fused(
        self, cls: type[torch.optim.Optimizer], parameters: list[nn.Parameter], device: torch.device
    ) -> bool:
        """Return whether there is a fused form that updates these parameters as the other one does."""
        traits = self.traits
        kernel: Any = traits.fused_by or cls
        if "fused" not in accepted_options(cls) or not has_fused_kernel(kernel, device):
            return False
        # The first momentum of fused SGD is not the whole gradient, see ``_start_momentum``.
        dampened = traits.fused_momentum and self.options.get("dampening", 0)
        if dampened or (is_sharded(parameters[0]) and not traits.fused_shards):
            return False
        halves = {parameter.dtype for parameter in parameters if parameter.dtype.itemsize <= 2}
        return kind_of(device).fused_amp or all(fused_is_sound(kernel, dtype, device.type) for dtype in halves)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of ``optimizer.name``.

    Raises:
        UserError: there is none that can be used here.
    """
    place = TRAITS.get(name, Traits()).place or (name if "." in name else f"torch.optim.{name}")
    module, _, class_name = place.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), class_name, None)
    except ImportError as error:
        raise UserError(f"optimizer.name={name} cannot be imported ({error}); install its package") from None
    if not _is_optimizer(cls):
        elsewhere = [name for name, traits in TRAITS.items() if traits.place]
        names = [*(name for name in dir(torch.optim) if _is_optimizer(getattr(torch.optim, name))), *elsewhere]
        raise UserError(
            f"optimizer.name={name} is not in torch.optim{nearest(name, names)} ({', '.join(names)}, or package.Class)"
        )
    if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise UserError(f"optimizer.name={name} needs a closure or sparse gradients", ADAMW)
    return cls


def _is_optimizer(cls: Any) -> bool:
    return inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer


def accepted_options(cls: type[torch.optim.Optimizer]) -> set[str]:
    """Return the names of the arguments of an optimizer, but for what it optimizes."""
    return set(inspect.signature(cls).parameters) - {"params"}


def has_fused_kernel(cls: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Return whether this torch has a fused kernel of an optimizer for a device."""
    name = f"_fused_{cls.__name__.lower()}_"
    key = device.type.upper()
    return hasattr(torch.ops.aten, name) and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@functools.cache
def fused_is_sound(cls: type[torch.optim.Optimizer], dtype: torch.dtype, device_type: str) -> bool:
    """Test whether torch's fused form of an optimizer updates 16-bit weights on a device like fp32 weights.

    The true gradient of the trial, 2^-30, is 0 in fp16. In torch 2.11 fused SGD does not update some vectors of weights
    on a CPU and overruns its momentum buffer; fused Adagrad computes in 16 bits. On MPS the scale is ignored.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    updated = {}
    with unset_fake_temporarily():  # also while memory is forecast
        for kind, scale in ((torch.float32, 1.0), (dtype, 2.0**20)):
            weight = nn.Parameter(torch.zeros(64, dtype=kind, device=device_type))
            weight.grad = torch.full_like(weight, 2.0**-30 * scale)
            optimizer: Any = cls([weight], lr=2.0**10, fused=True)  # type: ignore[call-arg]
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
            updated[kind] = weight.detach().float()
        return torch.allclose(updated[dtype], updated[torch.float32], rtol=2.0**-6, atol=0.0)


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD momentum buffers of zeros, with which its first step is the same as without.

    Torch's own first fused step allocates them without writing, and where that step is skipped for an overflow
    they stay uninitialised: their content is then added to the weights.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
