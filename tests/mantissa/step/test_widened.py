"""The reference of higher precision, in which every operator that asks for a narrower dtype gets the wider one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mantissa.step.widened import Widened


class FusedArguments(TorchDispatchMode):
    """Keeps the dtypes of what a fused optimizer is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._fused_adamw_:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            self.dtypes = {
                name: {each.dtype for each in tree_iter(value) if isinstance(each, Tensor)}
                for name, value in given.items()
            }
        return func(*args, **(kwargs or {}))


def test_a_fused_optimizer_reads_its_step_and_its_flag_in_fp32_beside_fp64_weights() -> None:
    updated = []
    for wide in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))
        weight.grad = torch.linspace(0.1, 2, 8, dtype=torch.float64)
        optimizer: Any = torch.optim.AdamW([weight], 0.1, fused=True)
        with FusedArguments() as seen, Widened(torch.float64 if wide else torch.bfloat16):
            optimizer.found_inf = torch.zeros(()).float()
            optimizer.step()
        for name in ("state_steps", "found_inf"):
            assert seen.dtypes[name] == {torch.float32}
        assert seen.dtypes["exp_avgs"] == {torch.float64}
        updated.append(weight.detach())
    assert torch.equal(*updated)
