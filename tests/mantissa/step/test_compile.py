from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mantissa.step.compile import compile_in_place


class Own(nn.Sequential):
    """A class of a user, whose forward is torch's."""


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
def test_a_module_with_torchs_own_forward_is_compiled(
    kind: type[nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, compiled = [], torch.compile

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, options: compiled(function, backend=backend))
    torch._dynamo.reset()
    module, x = kind(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    expected, names = module(x), list(module.state_dict())
    compile_in_place(module)
    assert torch.equal(module(x), expected)
    assert len(graphs) == 1
    assert list(module.state_dict()) == names
