"""A loop's ``torch.amp.GradScaler``, seen from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


class LossScale:
    """What a scaler did with one optimizer. It is only read.

    Args:
        scaler: a ``GradScaler``; None: the loop has none.
        optimizer: whose steps it takes or skips.
    """

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._states: Any = getattr(scaler, "_per_optimizer_states", None)
        """States of the scaler's optimizers at the last forward pass, or at the last call of ``stepped``; each of its
        updates begins a new dict."""
        self._counted: Any = None
        """States whose step was counted."""

    @property
    def given(self) -> bool:
        """Whether the loop has a scaler, if only a disabled one."""
        return self._scaler is not None

    @property
    def enabled(self) -> bool:
        """Whether losses are multiplied."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def tensor(self) -> Tensor | None:
        """The scale of now, a scalar on its device; None: there is none, or it was never used."""
        scale: Tensor | None = getattr(self._scaler, "_scale", None) if self.enabled else None
        return scale

    def read(self) -> float:
        """Return the scale of now. The host waits for the device."""
        scale: float = self._scaler.get_scale()
        return scale

    @property
    def unscaled(self) -> bool:
        """Whether the optimizer's gradients were divided by the scale, in the step of now."""
        return bool(self._scaler._per_optimizer_states.get(id(self._optimizer), {}).get("found_inf_per_device"))

    @property
    def updates(self) -> int:
        """Number that changes with each update of the scale, whatever becomes of it; 0: there is none yet."""
        return 0 if self.tensor is None else self.tensor._version

    def begin_pass(self) -> None:
        """Say that a forward pass begins: the scale may have been updated since the one before it."""
        if self.enabled and not self._has_step(self._states):
            self._states = self._scaler._per_optimizer_states

    def stepped(self) -> bool:
        """Return whether the scaler was asked for a step since the last call. It may have skipped it."""
        before, self._states = self._states, getattr(self._scaler, "_per_optimizer_states", None)
        for states in (before, self._states) if self.enabled else ():  # its update may come after this call
            if self._has_step(states):
                self._counted = states
                return True
        return False

    def _has_step(self, states: Any) -> bool:
        """Return whether there is a step of the optimizer in these states that is not counted yet."""
        stage = states.get(id(self._optimizer), {}).get("stage")
        return stage is OptState.STEPPED and states is not self._counted
