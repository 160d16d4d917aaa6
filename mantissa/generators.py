"""The states of the global random generators."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator a run may use: torch's on the CPU and the device, numpy's, Python's."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def freeze(device: torch.device) -> Callable[[], dict[str, Tensor]]:
    """Note the states, at a fifth of the cost; return what returns them as ``random_state`` does, if ever needed."""
    numpys, pythons, torchs = np.random.get_state(), random.getstate(), torch.get_rng_state()
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def thawed() -> dict[str, Tensor]:
        now = random_state(device)
        np.random.set_state(numpys)
        random.setstate(pythons)
        then = random_state(device) | {"torch": torchs} | ({} if own is None else {device.type: own})
        set_random_state(now, device)
        return then

    return thawed
