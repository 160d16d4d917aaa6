"""fp32 master weights of the optimizer, for a model with 16-bit weights.

An update that is less than half the distance to the next 16-bit number is lost when it is added to a 16-bit weight: in
bf16, less than 1/512 of the weight. Two remedies: the optimizer adds it to an fp32 copy, of which the model gets the
rounded values (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1), or the sum is rounded up or down at
random so that it is unbiased (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, section 3;
for bf16 training: Zamirai et al., "Revisiting BFloat16 Training", 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mantissa.formats import STOCHASTIC, Format
from mantissa.tensors import local
from trainer.parallel.shards import is_sharded

_LOW_BITS = 16  # by which bf16 is shorter than fp32


@dataclass
class _Backward:
    """Whether gradients stay with the model's weights in this backward pass, where the ranks sum them."""

    exchanged: bool = False


class MasterWeights:
    """fp32 copies of a model's trainable 16-bit parameters, which the optimizer changes in their place.

    Parameters that are fp32 already (fp32 islands) are their own masters. Microbatches add up in fp32: backward moves
    each 16-bit gradient to its master as soon as it is complete, so that not all of them exist in both dtypes at once.
    With sharded weights (FSDP2) gradients arrive after the last microbatch, added up in fp32 by FSDP2 itself.

    Args:
        model: with 16-bit weights; after it is wrapped for several processes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._copies: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        """Names, the model's parameters, and their masters."""
        self._named: list[tuple[str, nn.Parameter]] = []
        self._backward = _Backward()
        for name, weight in model.named_parameters():
            master = weight
            if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16):
                master = nn.Parameter(self._first(weight))
                self._copies.append((name, weight, master))
                if not is_sharded(weight):
                    weight.register_post_accumulate_grad_hook(partial(_after_backward, master, self._backward))
            self._named.append((name, master))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights that the optimizer updates, with the names and in the order of the model's parameters."""
        yield from self._named

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights that the optimizer updates."""
        for _, parameter in self._named:
            yield parameter

    def persistent_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and masters that are kept between steps, and so are saved in checkpoints."""
        for name, _, master in self._copies:
            yield name, master

    @torch.no_grad()
    def before_exchange(self) -> None:
        """Prepare for a backward pass in which DDP sums the model's own gradients over the ranks.

        The earlier microbatches' sum is rounded to 16 bits once and put there.
        """
        self._backward.exchanged = True
        for _, weight, master in self._copies:
            if master.grad is not None:
                weight.grad = master.grad.to(weight.dtype)
                master.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients that backward left with the model's weights to the masters, one at a time."""
        self._backward.exchanged = False
        for _, weight, master in self._copies:
            _move(weight, master)

    @torch.no_grad()
    def write_back(self, step: int) -> None:
        """Round the masters to the model's weights, to nearest."""
        weights = [local(weight.detach()) for _, weight, _ in self._copies]
        masters = [local(master.detach()) for _, _, master in self._copies]
        if weights:
            torch._foreach_copy_(weights, masters)

    def _first(self, weight: nn.Parameter) -> Tensor:
        return weight.detach().float()


@torch.no_grad()
def _after_backward(master: nn.Parameter, backward: _Backward, weight: Tensor) -> None:
    """Move a complete gradient. (A weight's hook that referred to that weight would keep both alive forever.)"""
    if not backward.exchanged:
        _move(weight, master)


def _move(weight: Tensor, master: nn.Parameter) -> None:
    """Add the weight's gradient to its master's, in fp32, and clear it."""
    if weight.grad is None:
        return
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None


class StochasticWeights(MasterWeights):
    """Masters that exist only during the update: the bf16 weights are all that is kept, rounded stochastically.

    The optimizer's state is fp32. The random numbers depend on the seed, the step and the parameters' order only: ranks
    that hold the whole model (``parallel=ddp``) round alike, and a resumed run needs no state of a generator.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model)
        self._seed = seed
        device = next(model.parameters()).device
        self._generator = torch.Generator(device)
        self._absent = [master.data for _, _, master in self._copies]

    def free(self) -> None:
        """Under FakeTensorMode, which cannot free a storage: replace each master by one expanded number."""
        self._absent = [master.new_empty(1).expand(master.shape) for _, _, master in self._copies]
        for (_, _, master), absent in zip(self._copies, self._absent, strict=True):
            master.data = absent

    def persistent_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing."""
        yield from ()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients to masters made for this step."""
        super().take_gradients()
        for _, weight, master in self._copies:
            if master.grad is not None:
                master.data = weight.detach().float()

    @torch.no_grad()
    def write_back(self, step: int) -> None:
        """Round the masters to the model's weights, up or down at random, and drop them."""
        state = np.random.SeedSequence((self._seed, step)).generate_state(2, np.uint32)
        self._generator.manual_seed(int(state[0]) << 31 | int(state[1]) >> 1)  # 63 bits
        for (_, weight, master), absent in zip(self._copies, self._absent, strict=True):
            if master.grad is not None:
                weight.copy_(stochastic_round(master.data, self._generator))
                master.data = absent

    def _first(self, weight: nn.Parameter) -> Tensor:
        """Return a tensor of the weight's shape and layout without memory."""
        absent = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
        absent.untyped_storage().resize_(0)
        return absent


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to one of the two nearest bf16 numbers, with the probabilities that make the mean exact.

    A number drawn evenly from 0 to 2^16 - 1 is added to the bits that bf16 lacks, which are then truncated: the
    probability of a carry is proportional to them. Exact bf16 numbers, infinities and NaN do not change. The generator
    is on the device of the values.
    """
    noise = torch.randint(
        1 << _LOW_BITS, values.shape, generator=generator, dtype=torch.int32, device=values.device
    ).add_(values.view(torch.int32))
    rounded = noise.bitwise_and_(-1 << _LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def masters_of(format: Format, model: nn.Module, seed: int) -> MasterWeights | None:
    """Return the masters that a format needs; None: the optimizer updates the model's own weights."""
    if format.rounding == STOCHASTIC:
        return StochasticWeights(model, seed)
    return MasterWeights(model) if format.masters else None
