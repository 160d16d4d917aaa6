"""The ``parallel`` config group: one process, or several with DDP or FSDP2, which wrap the model and sum gradients."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.formats import STOCHASTIC
from trainer.errors import Interrupted, RunError, UserError, check_range, first_line
from trainer.hardware import DEVICE_KINDS, best_type, check_driver, kind_of
from trainer.parallel.shards import shard_again
from trainer.parallel.world import UNSET, World, check_launch, launched_local_rank, launched_processes, tasks_alone
from trainer.precision.modes import Precision

T = TypeVar("T")
_TELLS_AFTER_S = 2.0
"""Seconds after which a process that waits for the others of its job says so."""


@dataclass
class Parallel:
    """The ``parallel`` config group; this base is ``parallel=single``: one process, one device."""

    kind: ClassVar[str] = "single"
    moves: ClassVar[bool] = False
    """Whether ``wrap`` moves the model from the host to its device; else it is there before."""

    def world(self, device: str) -> World:
        """Join the other processes of the job.

        Args:
            device: the option; ``auto`` and ``cuda`` become the GPU of this process's local rank.

        Raises:
            UserError: torchrun started a number of processes that this choice cannot use.
        """
        check_launch()
        if (processes := launched_processes()) > 1:
            raise UserError(
                f"torchrun started {processes} processes, and parallel=single uses one ({UNSET})", "parallel=ddp"
            )
        return World()

    def check(self, precision: Precision) -> None:
        """Check that the options fit the precision.

        Raises:
            UserError: they do not.
        """

    def compiled(self, model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
        """Return the modules that torch.compile compiles: the model as a whole."""
        return [model]

    def wrap(self, model: nn.Module, blocks: list[nn.Module], device: torch.device, precision: Precision) -> nn.Module:
        """Return the module that forward passes of training call; parameters of ``model`` keep their names.

        Args:
            model: with the same weights on every rank, on its device unless ``moves``.
            blocks: the model's repeated blocks, the units of sharding.
            device: of the model.
            precision: decides what is gathered and accumulated in which dtype.
        """
        return model

    def microbatch(self, replica: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one microbatch's forward and backward; gradients are summed only in the ``last``."""
        return nullcontext()


class ProcessWorld(World):
    """Several processes, joined by torch.distributed."""

    def __init__(self, device_type: str, timeout_s: float) -> None:
        """Join the job that torchrun describes in the environment.

        Args:
            device_type: torch's. Tensors on the host go through gloo, others through the device's own backend.
            timeout_s: seconds to wait for another rank before the job fails.
        """
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            backend, device = "gloo", None
            if device_type != "cpu":
                device = torch.device(device_type, launched_local_rank()[0])
                backend = f"cpu:gloo,{device_type}:{kind_of(device).collectives}"
            with _waiting(timeout):
                meeting, _, _ = next(dist.rendezvous("env://", timeout=timeout))
                # A restarted job can use the same store, which still holds the addresses of the earlier processes.
                store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", meeting)
                dist.init_process_group(
                    backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device
                )
        self._writers: Any = dist.new_group(backend="gloo", timeout=timeout)

    def all_reduce_sums(self, *values: int) -> list[int]:
        total: list[int] = self.all_reduce_sum(torch.tensor(values, dtype=torch.int64)).tolist()
        return total

    def all_reduce_max_each(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.cpu()
        dist.all_reduce(total)
        return total

    def broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._writers)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values)
        return values or []

    def run_on_main(self, work: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        bug: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = work()
            except RunError as error:
                error.shared = True
                outcome[1] = error
            except Interrupted as error:
                outcome[1] = error
            except Exception as error:  # the others must not wait for a result that never comes
                bug, outcome[1] = error, RunError(f"rank 0 failed: {error}", shared=True)
        dist.broadcast_object_list(outcome, 0)
        if bug is not None:
            raise bug
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def main_first(self, work: Callable[[], T]) -> T:
        results: list[T] = []
        self.run_on_main(lambda: results.append(work()))  # a result that stays on rank 0 need not be picklable
        return results[0] if self.is_main else work()


@contextmanager
def _waiting(limit: timedelta) -> Iterator[None]:
    """Say for whom this process waits, unless they come at once: a job that has ended may have left its variables.

    Meanwhile Ctrl-C ends the process, because torch would wait on after a handler of Python's.
    """
    address, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    line = f"waiting up to {limit} for all {size} processes at {address}:{port}; Ctrl-C ends this; or, {UNSET}"
    timer = threading.Timer(_TELLS_AFTER_S, partial(print, line, file=sys.stderr, flush=True))
    numbers = [signal.SIGINT] * (threading.current_thread() is threading.main_thread())  # others may not set handlers
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    timer.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise UserError(f"the processes did not meet at {address}:{port} ({first_line(error)}); {UNSET}") from error
    finally:
        timer.cancel()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@dataclass
class SeveralProcesses(Parallel):
    """The base of ``ddp`` and ``fsdp``."""

    timeout_s: float = 1800.0
    """Seconds that a rank waits for the others (while rank 0 prepares data, for example) before the job fails."""

    def __post_init__(self) -> None:
        check_range("parallel.timeout_s", self.timeout_s, "(0, inf)")

    def world(self, device: str) -> World:
        check_launch()
        check_driver(device)
        device_type = best_type() if device == "auto" else device
        joined = [kind.type for kind in DEVICE_KINDS if kind.collectives]
        if device_type not in joined:
            raise UserError(
                f"device={device} with parallel={self.kind}: each process has its own device",
                *["device=auto"] * (best_type() in joined),
                "device=cpu",
            )
        if not launched_processes():
            why = f"{started} without telling each of the others; " if (started := tasks_alone()) else ""
            raise UserError(
                f"parallel={self.kind} needs several processes: {why}start them with "
                "torchrun --nproc-per-node=2 scripts/train.py …",
                "parallel=single",
            )
        if device_type != "cpu":  # before joining: NCCL would fail on a GPU that is not there
            number, processes = launched_local_rank()
            if processes > (count := torch.accelerator.device_count()):
                raise UserError(
                    f"torchrun started {processes} processes here, more than there are GPUs; "
                    f"use --nproc-per-node={count}"
                )
            torch.accelerator.set_device_index(number)
        return ProcessWorld(device_type, self.timeout_s)


@dataclass
class DDP(SeveralProcesses):
    """``parallel=ddp``: every process holds the whole model; gradients are summed while backward runs."""

    kind: ClassVar[str] = "ddp"

    def wrap(self, model: nn.Module, blocks: list[nn.Module], device: torch.device, precision: Precision) -> nn.Module:
        ddp: Any = _Replica
        newer = "forward_sync_buffers"  # in torch 2.15
        replica: nn.parallel.DistributedDataParallel = ddp(
            model,
            device_ids=[device] if device.type != "cpu" else None,
            gradient_as_bucket_view=True,
            # Training does not read buffers (batch norm's running statistics); evaluation and saving use rank 0's.
            **{newer if newer in inspect.signature(ddp).parameters else "broadcast_buffers": False},
        )
        replica.register_comm_hook(None, _sum)
        return replica

    def microbatch(self, replica: nn.Module, last: bool) -> AbstractContextManager[object]:
        assert isinstance(replica, nn.parallel.DistributedDataParallel)
        return nullcontext() if last else replica.no_sync()


class _Replica(nn.parallel.DistributedDataParallel):
    """DDP that shows the attributes of its model: a recipe's loss looks them up."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are strings here
    """Sum a bucket of gradients. DDP would average, but the loss is already divided by the whole step's targets."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@dataclass
class FSDP(SeveralProcesses):
    """``parallel=fsdp``: weights, gradients and optimizer state are sharded by rows over the processes (FSDP2)."""

    kind: ClassVar[str] = "fsdp"
    moves: ClassVar[bool] = True
    reshard_after_forward: bool = True
    """Free a block's gathered weights between forward and backward: less memory, one more all-gather. Weights outside
    of the blocks are gathered once for both passes."""

    def check(self, precision: Precision) -> None:
        if precision.format.half_weights and precision.modules:
            raise UserError(
                f"precision.modules with precision={precision.mode}: parallel=fsdp gathers weights of one dtype",
                "'precision.modules={}'",
                "parallel=ddp",
            )
        if precision.format.rounding == STOCHASTIC:
            raise UserError(
                f"precision={precision.mode} rounds whole weights, but parallel=fsdp shards them",
                "precision=bf16_master",
                "parallel=ddp",
            )

    def compiled(self, model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
        """Return the blocks: gathering their weights happens between them, outside of what is compiled."""
        return blocks or [model]

    def wrap(self, model: nn.Module, blocks: list[nn.Module], device: torch.device, precision: Precision) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if precision.format.half_weights and len({parameter.dtype for parameter in model.parameters()}) > 1:
            raise UserError(
                f"precision={precision.mode}: parallel=fsdp gathers weights of one dtype, and some stay in fp32 here",
                "precision=bf16",
                "parallel=ddp",
            )
        # FSDP2 cannot shard weights in channels_last; a convolution also takes that layout from its input.
        model.to(memory_format=torch.contiguous_format)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # FSDP2 accumulates microbatches, and sums over the ranks, in this dtype.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if precision.format.accumulates_in_fp32 else None)
        # A run that changes its format gathers in fp32, which is right for each.
        rounded = None if precision.fp32_ops or precision.then else precision.format.autocast
        if rounded is not None and "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__:
            # Weights that autocast rounds anyway are gathered in 16 bits: the same numbers for half the traffic. Inputs
            # are left to autocast: a batch of token ids or pixels has its own dtype.
            operands = _operands(model)
            own: Any = {"param_dtype_override_fn": lambda each: None if each in operands else each.dtype}  # torch 2.15
            policy = MixedPrecisionPolicy(rounded, torch.float32, cast_forward_inputs=False, **own)
        # Each call moves its module's weights to the device and keeps this rank's rows there.
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        # The rest stays: backward needs the weights of the last layers first.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sums: the loss is divided by the whole step's targets.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.register_forward_hook(_free_gathered)
        return model

    def microbatch(self, replica: nn.Module, last: bool) -> AbstractContextManager[object]:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(replica, FSDPModule)
        replica.set_requires_gradient_sync(last)
        replica.set_is_last_backward(last)
        return nullcontext()


def _operands(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are operands of matmuls or convolutions alone: autocast rounds each as a whole.

    Not those of subclasses, nor of a layer whose forward was replaced (an fp32 island): they may do more with them. A
    weight that is reparametrised has other names.
    """
    found: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}
    for module in model.modules():
        plain = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) or type(module).__name__ == "Conv1D"
        for name, parameter in module.named_parameters(recurse=False):
            found[plain and "forward" not in vars(module) and name in ("weight", "bias")].add(parameter)
    return found[True] - found[False]


def _free_gathered(model: nn.Module, inputs: Any, outputs: Any) -> None:
    """Free what a forward pass without a backward pass left gathered: what follows expects the model's parameters."""
    if not torch.is_grad_enabled():
        shard_again(model)
