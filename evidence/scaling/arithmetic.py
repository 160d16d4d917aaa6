"""Bytes and times of one optimizer step with DDP and FSDP2 on N processes, from the sizes of a model's weights.

Bytes. A ring moves each byte of an all-gather or a reduce-scatter (N - 1) / N times over each process's link, and each
byte of an all-reduce, which is both, 2 (N - 1) / N times (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). Over P trained parameters and A microbatches a step:

- DDP (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020) all-reduces the
  gradients, in the dtype of the weights, once a step: 2 (N - 1) / N · 4 P bytes with fp32 weights.
- FSDP2 (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023) all-gathers weights
  before the forward pass of every microbatch, again before its backward pass (with ``reshard_after_forward``, except
  those outside of the blocks, which stay), and reduce-scatters gradients in the last one:
  (N - 1) / N · (2 A · 4 P + 4 P), with 2 in place of the first 4 if ``param_dtype`` has 16 bits.
  The rows of each weight are padded to a multiple of N.

Time. A collective of S bytes takes its bytes / bandwidth + its hops · latency (Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005). Between nodes, NCCL has one ring for each network card, so that a
byte enters a node once, over one of them: the bandwidth is that of all cards of a node together, or of a GPU's link in
the node where that is lower. Hops: N - 1 in a ring; for an all-reduce twice that, or in a tree over the nodes, if that
is faster, twice log2 of their number. The defaults of both latencies are those of NCCL's own model (its
src/graph/tuning.cc: ring, protocol Simple).

Overlap is taken to be perfect, so that times are lower bounds. With DDP, backward of the last microbatch hides all
buckets but the last. With FSDP2, forward hides the gathering of all blocks but what is needed first, backward the
gathering and the reduce-scatters but the last. Left out: the optimizer (reads and writes 28 bytes a parameter, under
FSDP 1 / N of them), the loader, and what the gradients' norm and other scalars take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.parallel.wrap import DDP, FSDP

Phase = Literal["forward", "backward", "last backward"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class Weight(NamedTuple):
    """A parameter of the model, in the order of ``model.parameters()``."""

    rows: int
    """Its first dimension, which FSDP2 shards."""
    columns: int
    """The product of the others."""
    itemsize: int
    """Bytes of an element."""
    trained: bool
    block: int | None
    """The block that it belongs to; None: outside of the blocks."""

    def bytes(self, processes: int = 1, itemsize: int | None = None) -> int:
        """Return its size, padded to a multiple of ``processes`` rows."""
        return math.ceil(self.rows / processes) * processes * self.columns * (itemsize or self.itemsize)


class Collective(NamedTuple):
    """One exchange between all processes."""

    kind: Kind
    size: int
    """Bytes of the whole tensor: what every process has before an all-reduce, or after an all-gather."""
    phase: Phase
    """Of which microbatches: ``forward`` and ``backward`` of each one, or only of the last one."""
    hidden: bool
    """Whether something is computed meanwhile."""


@dataclass(frozen=True)
class Job:
    """What one GPU does in a microbatch."""

    weights: list[Weight]
    forward_flop: float
    backward_flop: float
    """With what activation checkpointing computes again."""
    units: float
    """Tokens, images or samples."""
    state_bytes: int = 0
    """Weights, buffers, gradients and optimizer state of the whole model."""
    activation_bytes: int = 0
    """All else that is in memory at the peak."""


@dataclass(frozen=True)
class Cluster:
    """The machines. Bandwidths are in bytes a second and direction, latencies in seconds."""

    flops: float
    """That a GPU reaches on this model, in FLOP/s."""
    link: float
    """Between two GPUs of a node."""
    network: float
    """Between two nodes, all network cards of a node together."""
    gpus_per_node: int
    link_latency: float
    network_latency: float

    def nodes(self, processes: int) -> int:
        """Return the number of nodes."""
        return math.ceil(processes / self.gpus_per_node)

    def bandwidth(self, processes: int) -> float:
        """Return what limits a ring over all processes."""
        return self.link if self.nodes(processes) == 1 else min(self.link, self.network)

    def latency(self, kind: Kind, processes: int) -> float:
        """Return the seconds that an exchange of a few bytes takes."""
        nodes = self.nodes(processes)
        ring = (processes - nodes) * self.link_latency + (nodes - 1) * self.network_latency
        if kind != "all_reduce":
            return ring
        local = min(processes, self.gpus_per_node) - 1
        tree = local * self.link_latency + math.ceil(math.log2(nodes)) * self.network_latency
        return 2 * min(ring, tree)


class Step(NamedTuple):
    """The times of one optimizer step, in seconds."""

    computing: float
    transfer: float
    """Bytes / bandwidth of all exchanges."""
    latency: float
    """Hops · latency of all exchanges."""
    total: float
    """With what is hidden counted once."""

    @property
    def share(self) -> float:
        """The part of the step in which the GPU computes."""
        return self.computing / self.total

    @property
    def bottleneck(self) -> str:
        """What to improve first: ``computing`` where exchanges add less than 5 %."""
        if self.total <= 1.05 * self.computing:
            return "computing"
        return "bandwidth" if self.transfer > self.latency else "latency"


def exchanges(
    weights: Sequence[Weight], mode: DDP | FSDP, processes: int, accumulation: int, reduced: int | None = None
) -> list[Collective]:
    """Return the collectives of one optimizer step, each as often as it happens.

    Args:
        weights: of the model, in its order.
        mode: how it is trained.
        processes: N, at least 2.
        accumulation: A, microbatches a step and process.
        reduced: bytes of an element in which FSDP2 sums gradients; None: that of the weight. Not used by DDP.
    """
    if isinstance(mode, DDP):
        buckets = _buckets(weights, mode.bucket_mb * 2**20)
        last = len(buckets) - 1
        return [Collective("all_reduce", size, "last backward", n < last) for n, size in enumerate(buckets)]
    gathered = 2 if mode.param_dtype else None
    reduced = 4 if mode.param_dtype else reduced
    found = []
    for block in dict.fromkeys(weight.block for weight in weights):
        own = [weight for weight in weights if weight.block == block]
        outside = block is None
        gather = Collective(
            "all_gather", sum(weight.bytes(processes, gathered) for weight in own), "forward", hidden=not outside
        )
        again = [gather._replace(phase="backward", hidden=True)] if mode.reshard_after_forward and not outside else []
        found += [gather, *again] * accumulation
        if scattered := sum(weight.bytes(processes, reduced) for weight in own if weight.trained):
            found.append(Collective("reduce_scatter", scattered, "last backward", hidden=not outside))
    return found


def _buckets(weights: Sequence[Weight], cap: int) -> list[int]:
    """Return the bytes of DDP's buckets in the order of backward: weights from the last to the first."""
    buckets, size = [], 0
    for weight in reversed([weight for weight in weights if weight.trained]):
        size += weight.bytes()
        if size >= cap:
            buckets.append(size)
            size = 0
    return [*buckets, size] if size else buckets


def sent_bytes(found: Sequence[Collective], processes: int) -> float:
    """Return the bytes that each process sends for these collectives in rings; it receives as many."""
    return sum((2 if each.kind == "all_reduce" else 1) * each.size for each in found) * (processes - 1) / processes


def step_time(
    job: Job, mode: DDP | FSDP, cluster: Cluster, processes: int, accumulation: int, reduced: int | None = None
) -> Step:
    """Return the times of one optimizer step; the arguments are those of ``exchanges``."""
    forward, backward = job.forward_flop / cluster.flops, job.backward_flop / cluster.flops
    computing = accumulation * (forward + backward)
    if processes == 1:
        return Step(computing, 0.0, 0.0, computing)
    found = exchanges(job.weights, mode, processes, accumulation, reduced)
    transfers = [sent_bytes([each], processes) / cluster.bandwidth(processes) for each in found]
    delays = [cluster.latency(each.kind, processes) for each in found]

    def taken(phase: Phase, hidden: bool) -> float:
        return sum(
            transfer + delay
            for each, transfer, delay in zip(found, transfers, delays, strict=True)
            if (each.phase, each.hidden) == (phase, hidden)
        )

    # The same in every microbatch but the last, whose backward pass also sums the gradients.
    waits = sum(taken(phase, False) for phase in ("forward", "backward", "last backward"))
    in_forward = max(accumulation * forward, taken("forward", True))
    again, summed = taken("backward", True), taken("last backward", True)
    in_backward = (accumulation - 1) * max(backward, again / accumulation)
    in_backward += max(backward, again / accumulation + summed)
    return Step(computing, sum(transfers), sum(delays), waits + in_forward + in_backward)


def memory_bytes(job: Job, mode: DDP | FSDP, processes: int, accumulation: int, reduced: int | None = None) -> float:
    """Return the bytes that one GPU needs, about: state, gathered weights and gradients, activations.

    FSDP2 keeps gradients unsharded until the last microbatch, and gathers a block while another one computes.
    """
    if isinstance(mode, DDP) or processes == 1:
        return job.state_bytes + job.activation_bytes
    gathered, gradients = 2 if mode.param_dtype else None, 4 if mode.param_dtype else reduced
    units: dict[int | None, int] = {}
    for weight in job.weights:
        units[weight.block] = units.get(weight.block, 0) + weight.bytes(processes, gathered)
    outside = units.pop(None, 0)
    held = outside + (2 * max(units.values(), default=0) if mode.reshard_after_forward else sum(units.values()))
    if accumulation > 1:
        held += sum(weight.bytes(1, gradients) for weight in job.weights if weight.trained)
    return job.state_bytes / processes + held + job.activation_bytes


def largest_hidden(
    job: Job, mode: DDP | FSDP, cluster: Cluster, accumulation: int, reduced: int | None = None
) -> int | None:
    """Return up to how many whole nodes' GPUs (doubling, to 65,536) a step takes at most 10 % more than computing.

    None: not even on one node.
    """
    largest, processes = None, cluster.gpus_per_node
    while processes <= 2**16:
        if step_time(job, mode, cluster, processes, accumulation, reduced).share < 1 / 1.1:
            break
        largest, processes = processes, 2 * processes
    return largest
