"""The model in training: one optimizer step, evaluation, and the state that a checkpoint holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mantissa.step.ledger import MemoryLedger
from mantissa.tensors import random_state, set_random_state
from trainer.config.schema import Config
from trainer.config.settle import Settled, plan_of, settle
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.data.evaluation import Evaluation, Progress
from trainer.data.loader import DataOrder, to_device
from trainer.errors import UserError, first_line, is_out_of_memory
from trainer.hardware import Hardware, detect, seed_everything, select
from trainer.metrics import Metrics, reported
from trainer.optim.ema import Average
from trainer.optim.groups import LR_FACTOR, freeze
from trainer.optim.masters import masters_of
from trainer.optim.state import training_state
from trainer.optim.update import Update, UpdateResult
from trainer.parallel.world import World
from trainer.precision.kernels import choose, convolves
from trainer.precision.modes import Precision
from trainer.recipe import Decision, LossOutput, UserRecipe, losses_of_some

log = logging.getLogger("mantissa")

if TYPE_CHECKING:
    from trainer.checkpoint.reader import CheckpointReader

_RANK_STRIDE = 0x9E3779B9  # keeps the ranks' seeds apart from each other and from the next seeds' runs

_TRIED = 8
"""Samples with which a model and a loss of the user's own are tried."""
_INSPECTED = 2
"""Samples of a forward pass that only inspects the model, or its shapes; batch norm cannot take statistics of one."""


class StepRecord(NamedTuple):
    """The results of one optimizer step. The tensors are scalars that stay on the device."""

    step: int
    """Counted from 1."""
    loss: Tensor
    """This rank's summed loss over the number of valid targets on all ranks, before the update, fp32. With one rank
    it is the mean loss."""
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    lr: float
    units: int


class Gradients(NamedTuple):
    """The gradients of one optimizer step are in the parameters (or masters); this is what else is known of them."""

    loss: Tensor
    """See ``StepRecord.loss``."""
    correction: float
    """The factor that the gradients still need besides the loss scale's, see ``Precision.loss_divisor``."""
    units: int


class Trainer:
    """The model in training: everything that a step changes, and nothing about where it is reported.

    Args:
        settled: what the config became, see ``settle``.

    Raises:
        UserError: the model that the config names cannot be built.
    """

    update_class: ClassVar[type[Update]] = Update

    def __init__(self, settled: Settled) -> None:
        config = settled.config
        self.plan, self.config, self.recipe = settled, config, config.recipe
        self.datasets = settled.datasets
        """What it trains on and is evaluated on."""
        self.precision = config.precision.phases[0]
        """The one in force: that of the last step that was taken, see ``enter``."""
        self.order = DataOrder(len(self.datasets.train), config.seed)
        self.hardware, self.device, self.world = settled.hardware, settled.hardware.device, settled.world
        self.decisions: list[Decision] = []
        """What became of the weights that it starts from."""
        # Torch is set up in this process, and the model is built with its first weights.
        select(self.device)
        config.set_up()
        seed_everything(config.seed)
        self.model = self.first_model()
        self.convolves = convolves(self.model)
        """Whether the model has convolutions, whose kernels then count where its precision is reported."""
        config.use_kernels(self.hardware, self.convolves)
        if isinstance(self.recipe, UserRecipe):  # whose model need not follow the seed
            self.world.broadcast([tensor.detach() for tensor in self.model.state_dict().values()])
        self.frozen = freeze(self.model, config.freeze or [])
        """Names of the parameters that are not trained."""
        # The model is rebuilt in place: formats of its layers, recomputation, torch.compile, DDP or FSDP. The order
        # counts: what is recomputed is compiled with it, and what is compiled is sharded.
        self.fp32_modules = config.precision.convert(
            self.model, self.device, self.recipe.blocks, self.recipe.fp32_modules
        )
        self._blocks = blocks = self.recipe.blocks(self.model)
        config.activation_checkpointing.apply(blocks)
        self._compile()
        self.replica = config.parallel.wrap(self.model, blocks, self.device, config.precision)
        """The model as training's forward passes call it."""
        if self.world.rank:
            seed_everything((config.seed + _RANK_STRIDE * self.world.rank) % 2**32)  # the same weights, other dropout
        # What follows changes the weights: the optimizer sees masters where there are any.
        self.masters = masters_of(config.precision.format, self.model, config.seed)
        """The weights that the optimizer changes, where they are not the model's own."""
        changed = self.masters or self.model
        self.optimizer = config.optimizer.build(changed, self.device, blocks)
        kept = dict(self.masters.persistent_weights() if self.masters else ())
        with self.precision.widened():
            self.average = Average(config.ema, self.model, kept)
        """The averaged weights, which evaluation and the export use where there are any."""
        self.loss_scale = config.scaler.build(self.precision.format, self.device)
        self.update = self.update_class(
            self.optimizer, changed.parameters(), self.loss_scale, config.clip, self.masters
        )
        self.step = 0
        """Optimizer steps done."""
        self._validation: Evaluation | None = None
        self._lacked_targets = False
        self.model.train()

    @classmethod
    def from_config(cls, config: Config, hardware: Hardware | None = None, world: World | None = None) -> Self:
        """Return the trainer of a config, ready for the first step.

        Args:
            config: as composed.
            hardware: where it runs; None: the config's device.
            world: the processes that train together; None: this one alone.

        Raises:
            UserError: the config, the data or the hardware cannot do this.
        """
        return cls(settle(plan_of(config, hardware or detect(config.device), world)))

    def first_model(self) -> nn.Module:
        """Return the recipe's model with its first weights, on the device, or where ``parallel`` moves it from.

        The memory forecast overrides this.
        """
        model: nn.Module = self.recipe.returned("build_model", self.recipe.build_model(self.datasets), nn.Module)
        if self.config.source is not None:
            model.to(self.precision.loaded_dtype)
            self.decisions = self.config.source.load(self.recipe, model, self.datasets)
        return model if self.config.parallel.moves else model.to(self.device)

    def first_samples(self, most: int = _INSPECTED) -> Batch:
        """Return the first samples, by default enough to inspect the model, or to know the shapes of a batch."""
        return self.datasets.train.batch(self.order.samples(0, min(most, self.plan.batching.micro_batch_size)))

    def _inspecting_forward(self, batch: Batch) -> LossOutput:
        """Take one forward pass over a batch, and restore the state of the generators."""
        generators = random_state(self.device)
        try:
            with self.precision.autocast(self.device):
                output = self.recipe.loss(self.model, to_device(batch, self.device))
            if "loss" in output.metric_sums:
                raise UserError("a metric cannot be called loss, which is the mean of loss_sum; give it another name")
            return output
        finally:
            set_random_state(generators, self.device)

    @contextmanager
    def _looking(self) -> Generator[None, None, None]:
        """Return a context of eager forward passes over a few samples, for which no kernels are measured."""
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            torch.backends.cudnn.benchmark = benchmark

    def observe(self, *recorders: AbstractContextManager[Any], most: int = _INSPECTED) -> None:
        """Take an eager forward pass in training over the first samples under the recorders, and change nothing."""
        model, training = self.model, self.model.training
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        batch = self.first_samples(most)
        try:
            model.train()
            # With gradients, a forward pass without a backward pass would leave stale state in FSDP.
            with torch.no_grad(), self._looking(), ExitStack() as entered:
                for recorder in recorders:
                    entered.enter_context(recorder)
                self._inspecting_forward(batch)
        finally:
            model.train(training)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def check_first_pass(self) -> None:
        """Refuse what raises in a forward pass over the first samples. Every rank has to call it.

        Raises:
            UserError: statistics of batch norm need a second sample; or the model or the loss of ``Recipe.of`` raises.
        """
        batching, own = self.plan.batching, isinstance(self.recipe, UserRecipe)
        normed = any(isinstance(each, _BatchNorm) for each in self.model.modules())
        if not own and (batching.micro_batch_size > 1 or not normed):
            return
        try:
            self.observe(most=_TRIED if own else _INSPECTED)
        except UserError:
            raise
        except Exception as error:
            if "more than 1 value per channel" in str(error) and batching.micro_batch_size == 1:
                of_rank = batching.batch_size // batching.ranks
                divides = next((size for size in range(2, of_rank + 1) if of_rank % size == 0), None)
                raise UserError(
                    "micro_batch_size=1: batch norm has no second value in a microbatch to normalise with",
                    f"micro_batch_size={divides}" if divides else f"micro_batch_size=2 batch_size={2 * batching.ranks}",
                    shared=True,
                ) from None
            if own and not is_out_of_memory(error):
                what = f"the loss raises {type(error).__name__}: {first_line(error)}"
                raise UserError(what, shared=True) from error
            raise

    def check_sum(self) -> None:
        """Refuse a recipe whose loss is a mean, which training would divide once more. Every rank has to call it.

        Raises:
            UserError: the loss of some samples is the mean of theirs.
        """
        if self.plan.batching.micro_batch_size == 1 or self.recipe.known_sum:
            return
        most = min(_TRIED, self.plan.batching.micro_batch_size)
        with self._looking(), self.precision.autocast(self.device):
            losses = losses_of_some(self.recipe, self.model, self.datasets.train, self.device, most)
        if losses is None or not math.isfinite(losses.together + losses.total):
            return
        averages = losses.total / len(losses.alone), losses.mean
        means = [value for value in averages if abs(value) < 0.9 * abs(losses.total)]  # else it may be the sum, too
        if any(math.isclose(losses.together, value, rel_tol=0.01) for value in means):  # of 16-bit numbers, too
            raise UserError(
                f"recipe={self.recipe.name}: the loss of {len(losses.alone)} samples is {losses.together:.5g}, the "
                "mean of theirs, but loss_sum "
                'must be their sum: training divides it by count_targets; compute it with reduction="sum"',
                shared=True,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the training, see ``optim.state.training_state``."""
        self.synchronise_buffers()
        scale = self.loss_scale.state_dict()
        rng = random_state(self.device)
        return training_state(self.step, self.model, self.optimizer, self.masters, scale, rng, self.average)

    def restore(self, saved: CheckpointReader) -> None:
        """Continue from a checkpoint.

        Raises:
            UserError: it is not of this model and this optimizer, or is damaged; nothing was loaded.
        """
        saved.restore(self.model, self.optimizer, self.masters, self.average, self.precision.widened())
        self.enter(self.config.precision.at(saved.step))
        self.loss_scale.load_state_dict(saved.loss_scale)
        self.step = saved.step
        if (rng := saved.rng(self.world.rank)) is not None:  # a rank that was not there before has a seed of its own
            set_random_state(rng, self.device)

    @property
    def next_precision(self) -> Precision:
        """The precision of the next step."""
        return self.config.precision.at(self.step + 1)

    @property
    def is_changed(self) -> bool:
        """Whether the precision in force is that of ``precision.then``."""
        return self.precision != self.config.precision.phases[0]

    @property
    def kernels(self) -> str:
        """How 16-bit operands are multiplied on a CPU."""
        return choose(self.precision.half, self.precision.kernels, self.hardware, self.convolves)

    def enter(self, precision: Precision) -> None:
        """Compute in a precision from here on: one of the run's ``phases``. Weights and optimizer stay as they are."""
        if precision == self.precision:
            return
        self.precision = precision
        precision.apply()
        precision.convert_layers(self.model, self.device, self._blocks, self.fp32_modules)
        if self.config.compile.mode != "off":
            torch.compiler.reset()  # its graphs are of the other layers
            self._compile()
        self.loss_scale = self.update.loss_scale = self.config.scaler.build(precision.format, self.device)

    def _compile(self) -> None:
        """Let torch.compile compile the model, or its blocks, at their next call."""
        config = self.config
        mixed = bool(self.fp32_modules or self.precision.fp32_ops)
        compiled = config.parallel.compiled(self.model, self._blocks)
        config.compile.apply(compiled, self.device, mixed, self.precision.rounds_as_eager)

    def build_model(self) -> nn.Module:
        """Build another model in the precision of this one, on the host."""
        model = self.recipe.build_model(self.datasets)
        self.precision.convert(model, self.device, self.recipe.blocks, self.recipe.fp32_modules)
        return model

    def batches(self) -> Generator[list[Batch], None, None]:
        """Yield the microbatches of every step that is left."""
        batching, left = self.plan.batching, self.plan.steps - self.step
        return self.config.loader.steps(self.datasets.train, self.order, batching, self.step, left, self.hardware)

    def train_step(self, microbatches: list[Batch]) -> StepRecord:
        """Take one optimizer step over the microbatches and count it; the host does not wait for the device."""
        lr = self.begin()
        # Forward and backward, once for each microbatch.
        loss, correction, units = self.gradients(microbatches)
        # Unscale, clip, step, and adapt the loss scale.
        grad_norm, skipped, scale = self.finish(correction)
        return StepRecord(self.step, loss, grad_norm, skipped, scale, lr, units)

    def begin(self) -> float:
        """Enter the precision of the next step, and set its learning rate, which is returned."""
        self.enter(self.next_precision)
        return self._set_lr()

    def finish(self, correction: float) -> UpdateResult:
        """Update the weights with the gradients of a step, and count it; ``correction``: see ``Gradients``."""
        with self.precision.widened():
            result = self.update.step(self.step, correction)
            self.step += 1
            self.average.update(self.step)
        return result

    def gradients(self, microbatches: list[Batch]) -> Gradients:
        """Add up the gradients of one optimizer step, and change nothing else but buffers and generators.

        The loss is normalised once, by the valid targets of the whole step, so that neither the number of
        microbatches nor how the targets fall among them changes the gradient. (In two factors: see
        ``Precision.loss_divisor``.)
        """
        # One number normalises all microbatches of all ranks.
        targets, units = self.world.all_reduce_sums(*self.count(microbatches))
        if not targets and not self._lacked_targets and self.world.is_main:
            self._lacked_targets = True
            message = "step %d has no targets: nothing is learnt from it, and a loss that is their mean is nan"
            log.warning(message, self.step + 1)
        divisor, correction = self.precision.loss_divisor(max(1, targets))
        loss: Tensor | None = None
        for number, microbatch in enumerate(microbatches, 1):
            batch, last = to_device(microbatch, self.device), number == len(microbatches)
            # Only the last one exchanges gradients, which is decided before its forward pass.
            with self.config.parallel.microbatch(self.replica, last), self.precision.widened():
                with self.precision.autocast(self.device):
                    output = self.recipe.loss(self.replica, batch)
                share = output.loss_sum / divisor
                self.update.backward(share, exchanged=last and self.config.parallel.kind != "single")
            loss = share.detach() if loss is None else loss + share.detach()
        assert loss is not None, "an optimizer step has at least one microbatch"
        return Gradients(loss if correction == 1 else loss * correction, correction, units)

    def count(self, microbatches: list[Batch]) -> tuple[int, int]:
        """Return this rank's valid targets and units of work in one step, from the values of CPU tensors."""
        targets = sum(self.recipe.count_targets(batch) for batch in microbatches)
        return targets, sum(self.recipe.count_units(batch) for batch in microbatches)

    @cached_property
    def metrics(self) -> Metrics:
        """The torchmetrics objects that evaluation updates."""
        return Metrics(self.recipe, self.datasets, self.config.metrics, self.device)

    @overload
    def evaluate(self, progress: Progress = ...) -> dict[str, float]: ...

    @overload
    def evaluate(self, progress: Progress, should_stop: Callable[[], bool]) -> dict[str, float] | None: ...

    def evaluate(
        self, progress: Progress = lambda done, total: None, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the recipe's metrics over the validation samples of all ranks, in the precision of training.

        Every rank has to call it. It returns None where ``should_stop`` ended it between two batches, on all ranks.
        """
        self._validation = self._validation or self._evaluation(self.datasets.valid, self.plan.eval_samples)
        return self._metrics(self._validation, progress, should_stop)

    def test(
        self, progress: Progress = lambda done, total: None, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the recipe's metrics over all test samples, as ``evaluate`` does."""
        assert self.datasets.test is not None
        return self._metrics(self._evaluation(self.datasets.test, None), progress, should_stop)

    @torch.no_grad()
    def metric_names(self) -> list[str]:
        """Return the names of all metrics, from a forward pass over a few samples."""
        samples = [SampleId(index, None) for index in range(min(_INSPECTED, len(self.datasets.valid)))]
        self.model.eval()
        try:
            with self.config.compile.graphs_kept():
                return self.metrics.names_in(self._inspecting_forward(self.datasets.valid.batch(samples)))
        finally:
            self.model.train()

    def ledger(self) -> MemoryLedger:
        """Return what records the memory of a step, that of averaged weights as well."""
        return MemoryLedger(self.model, self.optimizer, self.average.persistent_weights().values())

    def synchronise_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (batch norm's running statistics, which differ by rank)."""
        self.world.broadcast([*self.model.buffers(), *self.average.buffers()])

    def close(self) -> None:
        """End the loading processes that are kept for evaluation.

        The garbage collector would never end them: it closes their queues first, and then DataLoader cannot
        stop them.
        """
        self._validation = None

    def _evaluation(self, dataset: Dataset, limit: int | None) -> Evaluation:
        size = self.plan.batching.micro_batch_size
        return Evaluation(dataset, limit, size, self.config.loader, self.hardware, self.world)

    @torch.no_grad()
    def _metrics(
        self, evaluation: Evaluation, progress: Progress, should_stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        size, compile = self.plan.batching.micro_batch_size, self.config.compile

        def forward(batch: Batch, counts: bool) -> dict[str, Tensor]:
            whole = len(next(iter(batch.values()))) == size
            with nullcontext() if whole else compile.graphs_kept(), self.precision.autocast(self.device):
                output = self.recipe.loss(self.model, batch)
            if counts:
                self.metrics.update(output)
            return {"loss": output.loss_sum, **output.metric_sums}

        self.metrics.reset()
        self.synchronise_buffers()
        self.model.eval()
        generators = random_state(self.device)  # a loss may draw in evaluation, too, which may be interrupted
        try:
            with self.average.in_place():
                summed = evaluation.sums(forward, self.recipe.count_targets, progress, should_stop)
        finally:
            self.model.train()
            set_random_state(generators, self.device)
        return None if summed is None else reported(self.recipe, *summed) | self.metrics.values(self.world)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. The range test overrides this."""
        return self.config.optimizer.lr * self.config.schedule.factor(step, self.plan.steps)

    def _set_lr(self) -> float:
        """Set the learning rate of every group, and return the highest."""
        lr = self.lr(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group[LR_FACTOR]
        return max(group["lr"] for group in self.optimizer.param_groups)
