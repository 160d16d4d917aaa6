"""The command line of scripts/scale.py: a table of the arithmetic for a recipe."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, replace

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evidence.scaling.arithmetic import (
    Cluster,
    Job,
    Weight,
    exchanges,
    largest_hidden,
    memory_bytes,
    sent_bytes,
    step_time,
)
from mantissa.display import columns, quantity
from trainer.config.compose import compose
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.errors import UserError
from trainer.hardware import Hardware, detect
from trainer.optim.masters import accumulation_dtype
from trainer.parallel.compile import Compile
from trainer.parallel.wrap import DDP, FSDP, Parallel
from trainer.profiling.flops import step_counter
from trainer.profiling.ledger import STEADY, MemoryLedger
from trainer.run.memory.forecast import FakeTrainer


@dataclass
class ScaleOptions:
    """Of scripts/scale.py; the defaults are those of 8 H100s a node with a network card of 400 Gbit/s each."""

    gpus: list[str] = dataclasses.field(default_factory=lambda: ["8", "64", "512"])
    accumulation: int = 1
    rate: float = 400.0
    gpus_per_node: int = 8
    link: float = 450.0
    network: float = 400.0
    link_latency: float = 3.4
    network_latency: float = 14.0

    def cluster(self) -> Cluster:
        """Return the machines in base units.

        Raises:
            UserError: a number that is not positive.
        """
        for name in ("rate", "link", "network", "link_latency", "network_latency"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0; leave it out for its default")
        return Cluster(
            self.rate * 1e12,
            self.link * 1e9,
            self.network * 1e9,
            self.gpus_per_node,
            self.link_latency / 1e6,
            self.network_latency / 1e6,
        )

    def counts(self) -> list[int]:
        """Return the numbers of GPUs.

        Raises:
            UserError: one that is no number of whole nodes, or of GPUs in one.
        """
        for text in self.gpus or [""]:
            least = f"gpus={text} is not a number of GPUs from 2 on; set gpus=8,64,512, for example"
            if not (text.isascii() and text.isdigit()) or int(text) < 2:
                raise UserError(least)
            if int(text) > self.gpus_per_node and int(text) % self.gpus_per_node:
                raise UserError(
                    f"gpus={text} is not a multiple of gpus_per_node={self.gpus_per_node}; set gpus_per_node too"
                )
        return [int(text) for text in self.gpus]


def scale(arguments: list[str]) -> int:
    """Print one row for every number of GPUs and parallel mode."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, ScaleOptions, "overrides")
    cluster, counts = options.cluster(), options.counts()
    config = compose(overrides)
    modes = modes_of(config)
    job, config, unit = job_of(config)
    reduced = summed_in(config)
    accumulation = options.accumulation
    rows = [["GPUs", "parallel", "GB/GPU", "sent GB", "computing s", "transfer s", "latency s", "step s", f"{unit}/s",
             "share", "bottleneck"]]  # fmt: skip
    for count in counts:
        for name, mode in modes.items():
            step = step_time(job, mode, cluster, count, accumulation, reduced)
            sent = sent_bytes(exchanges(job.weights, mode, count, accumulation, reduced), count)
            memory = memory_bytes(job, mode, count, accumulation, reduced)
            speed = count * accumulation * job.units / step.total
            rows.append([str(count), name, f"{memory / 1e9:.3g}", f"{sent / 1e9:.3g}"])
            rows[-1] += [f"{each:.3g}" for each in step]
            rows[-1] += [quantity(speed), f"{step.share:.0%}", step.bottleneck]
    print(_heading(job, config, unit, options))
    print(columns(rows))
    print("\nfsdp kept: parallel.reshard_after_forward=false; fsdp bf16 or fp16: parallel.param_dtype")
    print("Times are lower bounds: perfect overlap, no stragglers.")
    print("GPUs up to which a step takes at most 10 % more than computing:")
    for name, mode in modes.items():
        largest = largest_hidden(job, mode, cluster, accumulation, reduced)
        print(f"  {name}: {'less than one node' if largest is None else f'{largest:,}'}")
    return 0


def _heading(job: Job, config: Config, unit: str, options: ScaleOptions) -> str:
    parameters = sum(weight.rows * weight.columns for weight in job.weights)
    flop, accumulation = job.forward_flop + job.backward_flop, options.accumulation
    return (
        f"{config.recipe.name}: {quantity(parameters)} parameters, {flop / job.units:.3g} FLOP per {unit.rstrip('s')}. "
        f"Microbatch: {config.micro_batch_size} samples, {quantity(job.units)} {unit}, {flop:.3g} FLOP;\n"
        f"{accumulation} of them a step on each GPU; global batch on N GPUs: "
        f"N × {quantity(accumulation * job.units)} {unit}.\n"
        f"GPUs of {options.rate:g} TFLOP/s; {options.gpus_per_node} a node, with {options.link:g} GB/s between two of "
        f"them, and {options.network:g} GB/s between nodes.\n"
    )


def modes_of(config: Config) -> dict[str, DDP | FSDP]:
    """Return the parallel modes to compare, by their overrides: the config's own, or all that fit its precision."""
    if isinstance(config.parallel, DDP | FSDP):
        config.parallel.check(config.precision)
        return {config.parallel.kind: config.parallel}
    tried: dict[str, DDP | FSDP] = {
        "ddp": DDP(),
        "fsdp": FSDP(),
        "fsdp kept": FSDP(reshard_after_forward=False),
        f"fsdp {config.precision.mode}": FSDP(param_dtype=config.precision.mode),
    }
    found = {}
    for name, mode in tried.items():
        try:
            mode.check(config.precision)
        except UserError:
            continue
        found[name] = mode
    return found


def summed_in(config: Config) -> int | None:
    """Return the bytes of an element in which FSDP2 sums gradients; None: those of the weight."""
    dtype = accumulation_dtype(config.precision.format)
    return None if dtype is None else dtype.itemsize


def weights_of(model: nn.Module, blocks: list[nn.Module]) -> list[Weight]:
    """Return the sizes of a model's parameters; ``blocks`` are the recipe's, the units of sharding."""
    owner = {id(each): number for number, block in enumerate(blocks) for each in block.parameters()}
    return [
        Weight(
            each.shape[0] if each.ndim else 1,
            each[0].numel() if each.ndim else 1,
            each.element_size(),
            each.requires_grad,
            owner.get(id(each)),
        )
        for each in model.parameters()
    ]


def job_of(config: Config) -> tuple[Job, Config, str]:
    """Take a step of one microbatch with tensors that have no storage, and count.

    The FLOP are those of the forward and the backward pass; what the optimizer computes is not among them.

    Returns:
        The job of one GPU, the resolved config, and the unit of ``Job.units``.

    Raises:
        UserError: the config, the data or the hardware cannot do this.
    """
    hardware = detect(config.device)
    config = replace(config, parallel=Parallel(), compile=Compile())
    if isinstance(config.micro_batch_size, int):
        config = replace(config, batch_size=config.micro_batch_size)
    config, plan, *_ = config.resolve(hardware)
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward, backward = _flop(config, plan, hardware)
        trainer = FakeTrainer(config, plan, hardware)
        weights = weights_of(trainer.model, trainer.recipe.blocks(trainer.model))
        trainer.train_step([trainer.microbatch()])  # the ledger needs the optimizer's state
        with MemoryLedger(trainer.model, trainer.optimizer, trainer.average.held().values()) as recording:
            trainer.train_step([trainer.microbatch()])
        ledger = recording.report()
        sampled = trainer._sample
        units = trainer.recipe.count_units(sampled) / len(next(iter(sampled.values())))
    size = plan.batching.micro_batch_size
    state = sum(ledger.steady.values())
    rest = ledger.peak_bytes - sum(ledger.at_peak[name] for name in STEADY)
    job = Job(weights, forward, backward, units * size, state, rest)
    return job, replace(config, micro_batch_size=size), config.recipe.unit


def _flop(config: Config, plan: Plan, hardware: Hardware) -> tuple[int, int]:
    """Return the FLOP of the forward and of the backward pass of a microbatch; the optimizer's are not among them."""
    if getattr(config.recipe, "chunked_loss", False) is True:  # torch's counter misses products in its chunks
        config = replace(config, recipe=replace(config.recipe, chunked_loss=False))  # type: ignore[call-arg]
    trainer = FakeTrainer(config, plan, hardware)
    batch = trainer.microbatch()
    with step_counter() as both:
        trainer.gradients([batch])
    with step_counter() as forward, config.precision.autocast(trainer.device):
        trainer.recipe.loss(trainer.model, batch)
    return forward.get_total_flops(), both.get_total_flops() - forward.get_total_flops()
