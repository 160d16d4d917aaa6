"""A CUDA device that is pretended, where there is none: its tensors say ``cuda:0``, and the CPU computes.

What a GPU refuses or waits for is seen below autograd, by a dispatch mode: an operator that mixes the device's tensors
with the host's raises, and each wait of the host is noted with its place. Kernels, their rounding and speed, TF32,
streams, pinned memory, NCCL and torch.compile cannot be pretended.

    python -m tests.gpu.pretended scripts/train.py recipe=bignet device=cuda     runs a script on it
"""

from __future__ import annotations

import math
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pynvml
import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from mantissa import Watch
from trainer.trainer import Trainer

PROJECT = Path(__file__).resolve().parents[2]
DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu", 0)
GIB = 2**30
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators whose values, or whose result's shape, the host needs."""
ALLOWED = {"trainer/optim/update.py:read": "optimizers that take no flag, as RMSprop, cannot skip a step on the device"}
"""Functions that may wait within a step, and why."""


@dataclass
class Pretended:
    """The facts of the device, which a test may set at any time, and what was seen on it."""

    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
    """For which torch was built."""
    available: bool = True
    """Whether torch finds the device; NVML sees it also where the driver is too old."""
    driver: str = "580.65.06"
    total: int = 80 * GIB
    """Bytes of its memory, of which other processes hold ``elsewhere``."""
    elsewhere: int = 0
    allocated: int = 0
    """Bytes that torch's counters give, see ``allocate``; what is reserved is kept when tensors are freed."""
    reserved: int = 0
    max_allocated: int = 0
    max_reserved: int = 0
    largest: float = math.inf
    """Bytes of the largest tensor for which there is memory."""
    mixed: list[str] = field(default_factory=list)
    """Operators that met tensors of the host, each with its place."""
    waits: list[str] = field(default_factory=list)
    """What the host waited for, with its place."""
    waits_in_steps: list[str] = field(default_factory=list)
    """Those within a step of Trainer or Watch that are not ``ALLOWED``."""
    _steps: int = 0

    def allocate(self, size: int) -> None:
        """Count so many bytes more in tensors, or less."""
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.max_allocated = max(self.max_allocated, self.allocated)
        self.max_reserved = max(self.max_reserved, self.reserved)

    def wait(self, what: str, *given: Any) -> None:
        """Note that the host waits for the device."""
        where, functions = _place()
        self.waits.append(f"{what} at {where}")
        if self._steps and threading.current_thread() is threading.main_thread() and not functions & ALLOWED.keys():
            self.waits_in_steps.append(self.waits[-1])

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in which the host must not wait."""
        self._steps += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._steps -= 1

    def check(self) -> None:
        """Fail for what was seen, also where the program caught the error."""
        assert not self.mixed, f"mixed devices: {sorted(set(self.mixed))}"
        assert not self.waits_in_steps, f"the host waits within a step: {sorted(set(self.waits_in_steps))}"

    def _memory(self) -> tuple[int, int]:
        return self.total - self.elsewhere - self.reserved, self.total

    def _initialise(self) -> None:
        if not self.available:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it.")

    def _set(self, **values: Any) -> None:
        vars(self).update(values)

    def patches(self) -> Iterator[Any]:
        """Yield what the host asks of CUDA, with the answers of this device."""
        event = SimpleNamespace(query=lambda: True, synchronize=partial(self.wait, "an event"))
        major_minor = lambda: dict(zip(("major", "minor"), self.capability, strict=True))  # noqa: E731
        states = [torch.zeros(16, dtype=torch.uint8)]  # of the generator
        both: dict[str, Any] = {
            "is_available": lambda: self.available,
            "memory_allocated": lambda *given: self.allocated,
            "memory_reserved": lambda *given: self.reserved,
            "max_memory_allocated": lambda *given: self.max_allocated,
            "max_memory_reserved": lambda *given: self.max_reserved,
            "reset_peak_memory_stats": lambda *given: self._set(
                max_allocated=self.allocated, max_reserved=self.reserved
            ),
            "empty_cache": lambda: self._set(reserved=self.allocated),
            "synchronize": partial(self.wait, "synchronize"),
            "current_stream": lambda *given: SimpleNamespace(record_event=lambda: event, is_capturing=lambda: False),
        }
        cuda = both | {
            "_lazy_init": self._initialise,
            "_is_in_bad_fork": lambda: False,
            "_device_count_nvml": lambda: 1,
            "_raw_device_count_nvml": lambda: 1,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *given: self.capability,
            "get_device_name": lambda *given: self.name,
            "get_device_properties": lambda *given: SimpleNamespace(
                name=self.name, total_memory=self.total, **major_minor()
            ),
            "get_arch_list": lambda: list(self.architectures),
            "is_bf16_supported": lambda including_emulation=True: including_emulation or self.capability >= (8, 0),
            "mem_get_info": lambda *given: self._memory(),
            "set_per_process_memory_fraction": lambda *given: None,
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda *given: states[-1].clone(),
            "set_rng_state": lambda state, *given: states.append(state.clone()),
        }
        accelerator = both | {
            "current_accelerator": lambda check_available=False: DEVICE if self.available else None,
            "device_count": lambda: int(self.available),
            "current_device_index": lambda: 0,
            "set_device_index": lambda *given: None,
            "get_memory_info": lambda *given: self._memory(),
        }
        yield patch.multiple(torch.cuda, **cuda)
        yield patch.multiple(torch.accelerator, **accelerator)
        dump = lambda path: Path(path).write_bytes(b"")  # noqa: E731
        yield patch.multiple(
            torch.cuda.memory, _record_memory_history=lambda *given, **named: None, _dump_snapshot=dump
        )
        yield patch.multiple(pynvml, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: self.driver)
        for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
            yield patch.object(torch, name, partial(_with_cpu, getattr(torch, name)))
        for name in ("tensor", "as_tensor"):
            yield patch.object(torch, name, partial(_from_host, getattr(torch, name)))
        yield patch.object(torch, "Generator", _Generator("Generator", (), {}))
        yield patch.multiple(Tensor, to=_to, cpu=_cpu, cuda=_cuda, pin_memory=_pinned, is_pinned=_is_pinned)
        yield patch.object(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, OnDevice])
        for owner, method in ((Trainer, "train_step"), (Watch, "step")):
            function = getattr(owner, method)
            yield patch.object(owner, method, lambda *args, _of=function, **kwargs: self.step(_of, *args, **kwargs))
        run = threading.Thread.run
        yield patch.object(threading.Thread, "run", lambda thread: _in_mode(run, thread))
        # Module.to has to change what kind of tensor a parameter is, and keep its identity.
        yield patch("torch.__future__.get_swap_module_params_on_conversion", lambda: True)


_here = Pretended()


@contextmanager
def pretended_cuda(**facts: Any) -> Iterator[Pretended]:
    """Pretend a device with these facts, see ``Pretended``, and take it away at the end."""
    global _here
    _here = device = Pretended(**facts)
    with ExitStack() as entered:
        for each in device.patches():
            entered.enter_context(each)
        entered.enter_context(_Mode())
        yield device


class MixedDevicesError(RuntimeError):
    """An operator was given tensors of the host and of the pretended device."""


class OnDevice(Tensor):
    """A tensor of the pretended device: it stays one through views, in autograd and in the optimizer."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    get_device = lambda self: 0  # noqa: E731

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host.")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class _Mode(TorchDispatchMode):
    """Sees the operators that make tensors of the device out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _in_mode(run: Callable[..., Any], thread: threading.Thread) -> None:
    with _Mode():
        run(thread)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, and let its results be where a GPU's would be."""
    given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
    here, asked = any(isinstance(each, OnDevice) for each in given), kwargs.get("device")
    # Autograd names the CPU where it means the device that a tensor had in the forward pass.
    implied = asked is None or (asked != HOST and torch._C._current_graph_task_id() != -1)
    there = here if implied else torch.device(asked).type == "cuda"
    pinned = kwargs.get("pin_memory")
    if not (here or there or pinned):
        return func(*args, **kwargs)
    kwargs |= {name: value for name, value in (("device", HOST), ("pin_memory", False)) if kwargs.get(name)}
    _judge(func.overloadpacket.__name__, args, kwargs, given, here, there)
    with torch._C._DisableTorchDispatch():
        out = func(*args, **kwargs)
        size = max((each.nbytes for each in tree_iter(out) if isinstance(each, Tensor)), default=0)
        if there and size > _here.largest:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB.")
        if pinned:
            out._is_pinned = True
        in_place = {id(each) for each in given}
        return tree_map_only(Tensor, lambda each: _tagged(each) if there and id(each) not in in_place else each, out)


def _tagged(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(OnDevice)


def _judge(name: str, args: Any, kwargs: Any, given: list[Tensor], here: bool, there: bool) -> None:
    """Note a wait, and refuse tensors of the host that hold more than one number."""
    if name in ("_to_copy", "copy_"):
        if name == "copy_":
            there, here = (isinstance(each, OnDevice) for each in args[:2])
        if here != there and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            _here.wait("copy to the device" if there else "copy to the host")
        return
    if name in READING:
        _here.wait(name)
    if name.strip("_").removesuffix("_impl") in ("index", "index_put"):  # whose indices may be the host's
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) or not isinstance(each, OnDevice) for each in indices):
            _here.wait(f"{name} with a mask or with indices of the host")
        given = [each for each in given if all(each is not index for index in indices)]
    if here and any(each.ndim and each.numel() and not isinstance(each, OnDevice) for each in given):
        _here.mixed.append(f"{name} at {_place()[0]}")
        raise MixedDevicesError(f"Expected all tensors on the same device, found cuda:0 and cpu: {_here.mixed[-1]}")


def _place() -> tuple[str, set[str]]:
    """Return the project's lines that led here, the innermost first, and all of its functions that run."""
    stack = [each for each in traceback.extract_stack() if each.filename.startswith(f"{PROJECT}/")]
    frames = [
        (each.filename.removeprefix(f"{PROJECT}/"), each.lineno, each.name)
        for each in reversed(stack)
        if each.filename != __file__ and "/site-packages/" not in each.filename
    ]
    return " < ".join(f"{file}:{line}" for file, line, _ in frames[:3]), {f"{file}:{name}" for file, _, name in frames}


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``, which in C++ takes a tensor of the device for the host's."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    first = () if args and isinstance(args[0], torch.dtype) else ("device",)
    kwargs |= zip((*first, "dtype", "non_blocking", "copy"), args, strict=False)
    kwargs = {name: each for name, each in kwargs.items() if each is not None}
    here, asked = isinstance(self, OnDevice), kwargs.pop("device", None)
    there = here if asked is None else isinstance(asked, int) or torch.device(asked).type == "cuda"
    if there == here:
        return torch._C.TensorBase.to(self, **kwargs)
    kwargs.pop("copy", None)
    return torch.ops.aten._to_copy(self, device=DEVICE if there else HOST, **kwargs)


def _cpu(self: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    return _to(self, HOST, memory_format=memory_format)


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    return _to(self, DEVICE, non_blocking=non_blocking)


def _pinned(self: Tensor, device: Any = None) -> Tensor:
    copy: Any = self.clone()
    copy._is_pinned = True
    return copy


def _is_pinned(self: Tensor, device: Any = None) -> bool:
    return getattr(self, "_is_pinned", False)


def _from_host(make: Callable[..., Tensor], data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """``torch.tensor`` and ``torch.as_tensor``, as a copy of what they make on the host."""
    if device is None or torch.device(device).type == "cpu":
        return make(data, device=device, **kwargs)
    gradient = kwargs.pop("requires_grad", False)
    return _to(make(data, **kwargs), device).requires_grad_(gradient)


def _with_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """A function of autocast, which casts for the device as for the CPU, which computes."""
    return function(*("cpu" if isinstance(each, str) else each for each in args))


class _Generator(type):
    """``torch.Generator``, which for the device is one of the host."""

    real = torch.Generator

    def __call__(cls, device: Any = HOST) -> torch.Generator:
        return cls.real("cpu")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)


if __name__ == "__main__":
    from tests.gpu.pretended import pretended_cuda as pretend  # the module's own, whose state the mode reads

    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    with pretend() as device:
        runpy.run_path(sys.argv[0], run_name="__main__")
    device.check()
