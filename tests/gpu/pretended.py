"""A CUDA device that is pretended, where there is none: its tensors say ``cuda:0``, and the CPU computes.

What a GPU refuses or waits for is seen below autograd, by a dispatch mode: an operator that mixes the device's tensors
with the host's raises, and each wait of the host is noted with its place. Kernels, their rounding and speed, TF32,
streams, pinned memory, NCCL and torch.compile cannot be pretended.

    python -m tests.gpu.pretended scripts/train.py recipe=bignet device=cuda     runs a script on it
"""

from __future__ import annotations

import itertools
import runpy
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pynvml
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils._triton import has_triton

from mantissa import Watch
from trainer.trainer import Trainer

PROJECT = Path(__file__).resolve().parents[2]
DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu", 0)
GIB = 2**30
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators whose values, or whose result's shape, the host needs."""
ALLOWED = {
    "trainer/optim/update.py:read": "optimizers that take no flag, as RMSprop, cannot skip a step on the device",
    "recipes/resnet.py:__call__": "the first batch takes the two constants that normalise images along",
    "mantissa/watch/watch.py:_fail": "a step has failed, and training has ended",
}
"""Functions that may wait within a step, and why."""
CONSTANT = {"_is_in_bad_fork": False, "manual_seed_all": None, "device_count": 1}
CONSTANT |= {"current_device": 0, "_device_count_nvml": 1, "_raw_device_count_nvml": 1}
WIDER = {torch.ops.aten.mm.dtype: torch.ops.aten.mm.default, torch.ops.aten.mm.dtype_out: torch.ops.aten.mm.out}
"""Products of 16-bit numbers whose result is wider, which only CUDA has."""
AUTOCAST = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


@dataclass
class Pretended:
    """The facts of the device, which a test may set at any time, and what was seen on it."""

    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    available: bool = True  # to torch; NVML sees the device also where the driver is too old
    driver: str = "580.65.06"
    total: int = 80 * GIB  # bytes of its memory, of which other processes hold these
    elsewhere: int = 0
    fraction: float = 1.0  # of the total that this process may take
    allocated: int = 0  # bytes in tensors; what is reserved is kept when they are freed
    reserved: int = 0
    max_allocated: int = 0
    max_reserved: int = 0
    mixed: list[str] = field(default_factory=list)
    """Operators that met tensors of the host, each with its place."""
    waits: list[str] = field(default_factory=list)
    """What the host waited for, with its place."""
    waits_in_steps: list[str] = field(default_factory=list)
    """Those within a step of Trainer or Watch that are not ``ALLOWED``."""
    _steps: int = 0
    _blocks: dict[weakref.ref[Any], int] = field(default_factory=dict, repr=False)

    def allocate(self, size: int) -> None:
        """Count so many bytes more in tensors, where there are so many, or that many are cached."""
        most = min(self.fraction * self.total, self.total - self.elsewhere)
        if self.allocated + size > max(self.reserved, most):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB.")
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.max_allocated = max(self.max_allocated, self.allocated)
        self.max_reserved = max(self.max_reserved, self.reserved)

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor as long as it lives, if it is not another's."""
        storage = tensor.untyped_storage()
        if weakref.ref(storage) not in self._blocks:
            self.allocate(storage.nbytes())
            self._blocks[weakref.ref(storage, self._freed)] = storage.nbytes()

    def _freed(self, block: weakref.ref[Any]) -> None:
        self.allocated -= self._blocks.pop(block)

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

    def _initialise(self) -> None:
        if not self.available:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it.")

    def patches(self) -> Iterator[Any]:
        """Yield what the host asks of CUDA, with the answers of this device."""
        states = [torch.zeros(16, dtype=torch.uint8)]  # of the generator
        attention, grouping = "scaled_dot_product_attention", "_group_tensors_by_device_and_dtype"
        event = SimpleNamespace(query=lambda: True, synchronize=partial(self.wait, "an event"))
        stream = SimpleNamespace(record_event=lambda: event, is_capturing=lambda: False)
        memory = lambda *given: (self.total - self.elsewhere - self.reserved, self.total)  # noqa: E731
        both: dict[str, Any] = {
            "is_available": lambda: self.available,
            "reset_peak_memory_stats": lambda *given: vars(self).update(
                max_allocated=self.allocated, max_reserved=self.reserved
            ),
            "empty_cache": lambda: vars(self).update(reserved=self.allocated),
            "synchronize": partial(self.wait, "synchronize"),
            "current_stream": lambda *given: stream,
        }
        for kind, most in itertools.product(("allocated", "reserved"), ("", "max_")):
            both[f"{most}memory_{kind}"] = lambda *given, _name=most + kind: getattr(self, _name)
        cuda = both | {
            "_lazy_init": self._initialise,
            "is_current_stream_capturing": lambda: False,
            "get_device_capability": lambda *given: self.capability,
            "get_device_name": lambda *given: self.name,
            "get_device_properties": lambda *given: SimpleNamespace(
                name=self.name, total_memory=self.total, major=self.capability[0], minor=self.capability[1]
            ),
            "is_bf16_supported": lambda including_emulation=True: including_emulation or self.capability >= (8, 0),
            "mem_get_info": memory,
            "set_per_process_memory_fraction": lambda fraction, *given: vars(self).update(fraction=fraction),
            "get_rng_state": lambda *given: states[-1].clone(),
            "set_rng_state": lambda state, *given: states.append(state.clone()),
        }
        cuda |= {name: lambda *given, _value=value: _value for name, value in CONSTANT.items()}
        accelerator = both | {
            "current_accelerator": lambda check_available=False: DEVICE if self.available else None,
            "device_count": lambda: int(self.available),
            "current_device_index": lambda: 0,
            "set_device_index": lambda *given: None,
            "get_memory_info": memory,
        }
        yield patch.multiple(torch.cuda, **cuda)
        yield patch.multiple(torch.accelerator, **accelerator)
        dump = lambda path: Path(path).write_bytes(b"")  # noqa: E731
        yield patch.multiple(
            torch.cuda.memory, _record_memory_history=lambda *given, **named: None, _dump_snapshot=dump
        )
        yield patch.multiple(pynvml, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: self.driver)
        yield patch.multiple(torch, **{name: partial(_with_cpu, getattr(torch, name)) for name in AUTOCAST})
        yield patch.multiple(torch, **{name: partial(_made, getattr(torch, name)) for name in ("tensor", "as_tensor")})
        yield patch.object(torch, "Generator", _Generator)
        yield patch.multiple(
            Tensor,
            to=_to,
            cpu=lambda tensor, **options: _to(tensor, HOST, **options),
            cuda=lambda tensor, device=None, **options: _to(tensor, DEVICE, **options),
            pin_memory=lambda tensor, *given: _pinned(tensor.clone()),
            is_pinned=lambda tensor, *given: getattr(tensor, "pinned", False),
        )
        yield patch.object(functional, attention, partial(_attended, getattr(functional, attention)))
        yield patch.object(torch._C, grouping, partial(_grouped, getattr(torch._C, grouping)))
        yield patch.object(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, OnDevice])
        for owner, method in ((Trainer, "train_step"), (Watch, "step")):
            yield patch.object(owner, method, _within(getattr(owner, method), self.step))
        yield patch.object(threading.Thread, "run", _within(threading.Thread.run, _seen))
        # Module.to has to change what kind of tensor a parameter is, and keep its identity.
        yield patch("torch.__future__.get_swap_module_params_on_conversion", lambda: True)


_here = Pretended()
_attending = ContextVar("_attending", default=False)


@contextmanager
def pretended_cuda(**facts: Any) -> Iterator[Pretended]:
    """Pretend a device with these facts, see ``Pretended``, and take it away at the end."""
    global _here
    # Torch keeps what it was first told: the answer of the host, and which functions ``torch.device`` is for.
    has_triton()
    _device_constructors()
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

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host.")

    __array__ = numpy

    def __format__(self, form: str) -> str:
        return format(self.cpu(), form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class _Mode(TorchDispatchMode):
    """Sees the operators that make tensors of the device out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, and let its results be where a GPU's would be."""
    given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
    here, asked = any(isinstance(each, OnDevice) for each in given), kwargs.get("device")
    # Torch's own C++ names the CPU where it means the device of a tensor.
    if asked == torch.device("cpu") and (_attending.get() or torch._C._current_graph_task_id() != -1):
        there = here or _attending.get()
    else:
        there = here if asked is None else torch.device(asked).type == "cuda"
    pinned = kwargs.get("pin_memory")
    if not (here or there or pinned):
        return func(*args, **kwargs)
    kwargs |= {name: value for name, value in (("device", HOST), ("pin_memory", False)) if kwargs.get(name)}
    _judge(func.overloadpacket.__name__, args, kwargs, given, here, there)
    if func in WIDER:
        func, args = WIDER[func], [each.to(args[2]) for each in args[:2]]
    if func.namespace == "aten":
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
    else:  # it may be written in Python
        with _Mode():
            out = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    with torch._C._DisableTorchDispatch():
        in_place = {id(each) for each in given}
        out = tree_map_only(Tensor, lambda each: _tagged(each) if there and id(each) not in in_place else each, out)
    return _pinned(out) if pinned else out


def _within(method: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(method, *args, **kwargs)


def _seen(function: Callable[..., Any], *args: Any) -> Any:
    with _Mode():
        return function(*args)


def _tagged(tensor: Tensor) -> Tensor:
    _here.hold(tensor)
    return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(OnDevice)


def _pinned(tensor: Any) -> Tensor:
    tensor.pinned = True
    return tensor


def _judge(name: str, args: Any, kwargs: Any, given: list[Tensor], here: bool, there: bool) -> None:
    """Note a wait, and refuse tensors of the host that hold more than one number."""
    if name in ("_to_copy", "copy_"):
        if name == "copy_":
            there, here = (isinstance(each, OnDevice) for each in args[:2])
        if here != there and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            _here.wait("copy to the device" if there else "copy to the host")
        return
    if name == "_has_compatible_shallow_copy_type":
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
    own = [each for each in reversed(stack) if each.filename != __file__ and "/site-packages/" not in each.filename]
    files = [each.filename.removeprefix(f"{PROJECT}/") for each in own]
    lines = [f"{file}:{each.lineno}" for file, each in zip(files, own, strict=True)]
    return " < ".join(lines[:3]), {f"{file}:{each.name}" for file, each in zip(files, own, strict=True)}


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


def _made(make: Callable[..., Tensor], data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """``torch.tensor`` and ``torch.as_tensor``, as a copy of what they make on the host."""
    if device is None or torch.device(device).type == "cpu":
        return make(data, device=device, **kwargs)
    gradient = kwargs.pop("requires_grad", False)
    return _to(make(data, **kwargs), device).requires_grad_(gradient)


def _with_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """A function of autocast, which casts for the device as for the CPU, which computes."""
    return function(*("cpu" if isinstance(each, str) else each for each in args))


def _attended(attend: Callable[..., Tensor], query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention, which makes its causal mask where the query is."""
    token = _attending.set(isinstance(query, OnDevice))
    try:
        return attend(query, *args, **kwargs)
    finally:
        _attending.reset(token)


def _grouped(group: Callable[..., Any], *args: Any) -> Any:
    """The tensors of an optimizer by device and dtype."""
    groups = group(*args).items()
    return {(DEVICE if isinstance(of[0][0][0], OnDevice) else at, dtype): of for (at, dtype), of in groups}


class _Generator(torch.Generator):
    """For the device, one of the host."""

    def __new__(cls, device: Any = HOST) -> torch.Generator:
        return super().__new__(cls, "cpu")


if __name__ == "__main__":
    from tests.gpu.pretended import pretended_cuda as pretend  # the module's own, whose state the mode reads

    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    with pretend() as device:
        runpy.run_path(sys.argv[0], run_name="__main__")
    device.check()
