"""What a watched step starts from: weights, buffers and generators, taken before it and given back for its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.errors import FormatError
from mantissa.tensors import NotedState, changed_by, local

_Kept = tuple[Tensor, Tensor]
"""A weight or a buffer, and this rank's part of it as it was when the step began."""


class Snapshot:
    """Takes what a step starts from, until a step is bad: that one's start stays.

    Nothing waits for the device: what is taken stays there, and so does whether a step was bad.

    Args:
        model: without the wrappers of DDP and torch.compile.
        optimizer: of its parameters.
        later: whether the host may learn of a bad step some steps later, so that weights are taken, too.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, later: bool) -> None:
        self._model, self._optimizer, self.later = model, optimizer, later
        self.device = next(model.parameters()).device
        self.sharded = any(hasattr(weight, "to_local") for weight in model.parameters())
        trained = [weight for weight in changed_by(optimizer) if weight.requires_grad]
        self._probe = next(iter(trained), next(model.parameters()))
        """Weight that every step changes."""
        buffers = list(model.buffers())
        with torch.no_grad():
            self._bad = torch.zeros((), dtype=torch.bool, device=self.device)
            self._weights: list[_Kept] = [(weight, local(weight).clone()) for weight in trained if later]
            self._buffers: list[_Kept] = [(buffer, local(buffer).clone()) for buffer in buffers]
        self._versions = [buffer._version for buffer in buffers]
        self._others: Any = None
        """State of numpy's and Python's generators where steps leave them alone; None: one may draw from them."""

    @property
    def version(self) -> int:
        """Number of changes of a weight that every step changes; 0 under FSDP2, whose weights come and go."""
        return 0 if self.sharded else self._probe._version

    # Taking, in the order of a step.

    def begin(self, anew: bool) -> None:
        """Take the buffers, before the first forward pass. ``anew``: the state of every generator is read again."""
        if self._buffers:
            self._save(self._buffers)
        if anew:
            self._others = None

    def generators(self) -> NotedState:
        """Note the state of all generators, before a forward pass."""
        return NotedState(self.device, self._others)

    def compare(self, noted: NotedState) -> None:
        """See whether the forward passes left numpy's and Python's generators alone: to read them takes longest."""
        self._others = noted.unchanged()

    def take_weights(self) -> None:
        """Take the weights, before the update, with those that came to the optimizer later."""
        if self.later:
            known = {id(weight) for weight, _ in self._weights}
            self._save(self._weights)
            gained = [weight for weight in changed_by(self._optimizer) if weight.grad is not None]
            self._weights += [(new, local(new).detach().clone()) for new in gained if id(new) not in known]

    def judge(self, sound: Tensor | bool) -> None:
        """Take nothing more from the first step on that is not sound. The host need not know of it yet."""
        self._bad |= torch.logical_not(sound)  # type: ignore[arg-type]

    @property
    def good(self) -> Tensor:
        """Whether all steps were sound, a bool scalar on the device."""
        return ~self._bad

    def forget_constants(self) -> None:
        """Take no longer the buffers that no pass has changed. Call it after the first step."""
        pairs = zip(self._buffers, self._versions, strict=True)
        self._buffers = [kept for kept, version in pairs if kept[0]._version != version]

    @torch.no_grad()
    def _save(self, tensors: list[_Kept]) -> None:
        if not self.later:
            torch._foreach_copy_([copy for _, copy in tensors], [local(tensor) for tensor, _ in tensors])
        for tensor, copy in tensors if self.later else ():
            torch.where(self._bad, copy, local(tensor.detach()), out=copy)

    # Giving back.

    @contextmanager
    def given_back(self, build: Callable[[], nn.Module] | None) -> Iterator[nn.Module]:
        """Give the model its weights and buffers from before the step for a while, and yield it, whole on each rank.

        Without a copy of the weights these are those of now: then the host learns of a bad step before its update.

        Args:
            build: returns the model as before FSDP2 sharded it.

        Raises:
            FormatError: the model is sharded, and there is no ``build``.
        """
        kept = self._weights + self._buffers
        # accelerate puts a forward of its own into the module, which enters autocast: the replay has to enter its own
        patched = vars(self._model).pop("forward", None) if hasattr(self._model, "_original_forward") else None
        _swap(kept)
        try:
            yield self._gathered(build) if self.sharded else self._model
        finally:
            _swap(kept)
            if patched is not None:
                self._model.forward = patched

    def _gathered(self, build: Callable[[], nn.Module] | None) -> nn.Module:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if build is None:
            raise FormatError("FSDP2 shards its weights; give Watch(build=…), which returns the model before that")
        state = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True))
        model = build().to(self.device).train(self._model.training)
        model.load_state_dict(state)
        return model


@torch.no_grad()
def _swap(tensors: list[_Kept]) -> None:
    for tensor, copy in tensors:
        now = local(tensor).clone()
        local(tensor).copy_(copy)
        copy.copy_(now)
