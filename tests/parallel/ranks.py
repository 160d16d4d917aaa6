"""What each rank does in tests/parallel: started by torchrun, it writes what it found as JSON, rank by rank.

torchrun --nproc-per-node=2 -m tests.parallel.ranks <case> <folder>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers import NoData, compose, fit, same_bits
from tests.parallel import training
from tests.parallel.test_metrics import metrics
from tests.parallel.training import whole
from tests.parity.test_accumulation import SAMPLES, Tagging
from trainer.config.schema import Config
from trainer.data.contract import Datasets
from trainer.errors import Interrupted, UserError
from trainer.hardware import detect
from trainer.optim.update import ClipNorm
from trainer.parallel import wrap as parallel
from trainer.parallel.activation import ActivationCheckpointing
from trainer.parallel.shards import is_sharded
from trainer.parallel.wrap import DDP, FSDP, Parallel
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.recipe import DataSource, Recipe
from trainer.trainer import Trainer

DEVICE = os.environ.get("MANTISSA_TEST_DEVICE", "cpu")
MODES: dict[str, Callable[[], Parallel]] = {"single": Parallel, "ddp": DDP, "fsdp": FSDP}


@dataclass
class Gradients(ClipNorm):
    """Clips, and keeps the gradients, which the step clears, before and after."""

    max_norm: float = 0.01
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)

    def apply(self, gradients: list[Tensor], norm: Tensor) -> None:
        self.before[:] = map(whole, gradients)
        super().apply(gradients, norm)
        self.after[:] = map(whole, gradients)


def trainer_of(config: Config) -> Trainer:
    world = config.parallel.world(DEVICE)
    return Trainer.from_config(config, detect(DEVICE), world)


def tagging(mode: str, micro_batch_size: int, recipe: Recipe | None = None, **options: Any) -> Config:
    options = {"clip": Gradients(), "batch_size": SAMPLES, "micro_batch_size": micro_batch_size} | options
    return Config(recipe or Tagging(), NoData(), parallel=MODES[mode](), **options)


def step_of(trainer: Trainer) -> dict[str, Any]:
    """Take one step and return what it did, in full precision."""
    clip = trainer.config.clip
    record = fit(trainer, 1)[0]
    return {
        "gradient": torch.cat([tensor.flatten() for tensor in clip.before]).tolist(),
        "clipped": torch.cat([tensor.flatten() for tensor in clip.after]).tolist(),
        "norm": record.grad_norm.item(),
        "loss": trainer.world.all_reduce_sum(record.loss.double()).item(),
        "units": record.units,
        "weights": torch.cat([whole(p).flatten() for p in trainer.model.parameters()]).tolist(),
        "valid": trainer.evaluate(),
    }


class Float32(Tagging):
    """The same in fp32."""

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        datasets = super().datasets(data, seed)
        for part in (datasets.train, datasets.valid):
            part.tensors["x"] = part.tensors["x"].float()
        return datasets

    def build_model(self, datasets: Datasets) -> nn.Module:
        return super().build_model(datasets).float()


def gradient(mode: str) -> dict[str, Any]:
    world = MODES[mode]().world(DEVICE).size
    result = {}
    for micro in (1, 2, 4, 8):
        if SAMPLES % (micro * world) == 0:
            result[f"fp64 {micro}"] = step_of(trainer_of(tagging(mode, micro)))
    result["fp32 1"] = step_of(trainer_of(tagging(mode, 1, Float32())))
    return result


def flag(mode: str) -> dict[str, Any]:
    """Three steps, the second with an infinity on one rank; the fused optimizer gets the flag as on CUDA, or the host
    reads it.
    """
    states: dict[bool, list[dict[str, Any]]] = {}
    records: dict[bool, list[tuple[bool, float]]] = {}
    for given in (True, False):
        config = tagging(mode, 1, Float32(), precision=Precision("fp16"), scaler=AutoScaler(), clip=ClipNorm())
        trainer = trainer_of(config)
        assert trainer.optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
        assert trainer.update._takes_flag is (DEVICE == "cuda")
        trainer.update._takes_flag = given
        states[given], records[given] = [], []
        microbatches = next(trainer.batches())
        for bad in (False, True, False):
            step = [{name: tensor.clone() for name, tensor in batch.items()} for batch in microbatches]
            if bad and trainer.world.is_main:  # the last rank's own gradient is finite
                step[1]["x"][0, 0] = torch.inf
            record = trainer.train_step(step)
            records[given].append((bool(record.skipped), record.loss_scale.item()))
            held = {"weights": trainer.model.state_dict(), "state": trainer.optimizer.state_dict()["state"]}
            states[given].append(pytree.tree_map_only(Tensor, whole, held))
    first, second, third = states[True]
    return {
        "skipped, scale": records[True],
        "the skipped step changed nothing": same_bits(first, second),
        "the next one went on": not same_bits(second["weights"], third["weights"]),
        "as where the host looks": same_bits(states[True], states[False]) and records[True] == records[False],
        "cut": any(is_sharded(parameter) for parameter in trainer.model.parameters()),
    }


def flag_obeyed(mode: str) -> dict[str, Any]:
    """Return what ``flag`` has to find."""
    return {
        "skipped, scale": [[False, 65536.0], [True, 65536.0], [False, 32768.0]],
        "the skipped step changed nothing": True,
        "the next one went on": True,
        "as where the host looks": True,
        "cut": mode == "fsdp",
    }


def communication(mode: str) -> dict[str, Any]:
    """How often gradients are exchanged in a step of four microbatches."""
    exchanged = 0

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(exchange)  # torch looks at the signature of DDP's
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal exchanged
            exchanged += 1
            return exchange(*arguments, **options)

        return count

    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with mock.patch.object(parallel, "_sum", counted(parallel._sum)):
        trainer = trainer_of(tagging(mode, 1, clip=ClipNorm()))
        with mock.patch.object(dist, scatter, counted(getattr(dist, scatter))):
            fit(trainer, 1)
    return {"microbatches": trainer.plan.batching.accumulation, "exchanged": exchanged}


def accumulation(mode: str) -> dict[str, Any]:
    """The gradient of 128 samples, one a microbatch, that the masters of 16-bit weights get."""
    config = compose(*BIGNET, "batch_size=128", "micro_batch_size=1", f"parallel={mode}", "precision=bf16_master")
    clip = Gradients()
    trainer = trainer_of(replace(config, clip=clip))
    fit(trainer, 1)
    return {
        "gradient": torch.cat([tensor.flatten() for tensor in clip.before]).tolist(),
        "cleared": all(parameter.grad is None for parameter in trainer.model.parameters()),
    }


def gathered(mode: str) -> dict[str, Any]:
    """Two steps in each precision, with weights gathered as autocast rounds them, and all in fp32."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), [0]

    def counted(output: Tensor, given: Tensor, *rest: Any, **options: Any) -> Any:
        sent[0] += given.nbytes
        return gather(output, given, *rest, **options)

    found: dict[str, Any] = {}
    for precision in ("bf16", CHANGING):
        states, outcomes = [], []
        for operands in (parallel._operands, lambda _: set()):
            with mock.patch.object(parallel, "_operands", operands):
                trainer = trainer_of(compose(*TWO_STEPS, *GPT2, *f"precision={precision}".split(), f"parallel={mode}"))
            block, sent[0] = trainer.model.get_submodule("gpt2.transformer.h.0"), 0
            with mock.patch.object(dist, name, counted):
                losses = [record.loss.item() for record in fit(trainer)]
            outcomes.append({"bytes": sent[0]})
            states.append([losses, trainer.evaluate(), *map(whole, trainer.model.parameters())])
            block.unshard()  # type: ignore[operator]
            outcomes[-1] |= {each: str(block.get_parameter(each).dtype) for each in ("mlp.c_fc.weight", "ln_1.weight")}
        found[precision] = {"same bits": same_bits(*states), "rounded": outcomes[0], "fp32": outcomes[1]}
    return found


CHANGING = "bf16 precision.then=fp32 precision.until=1"
ACTIVATIONS = ("none", "blocks", "selective")
GPT2 = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "steps=2")
VISION = (
    *("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.samples=16", "steps=2"),
    "batch_size=4",  # FSDP keeps no weights in channels_last, and a CPU without bf16 is slow in the other layout
)
BIGNET = ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "steps=2", "device=cpu")
JOBS = {"gpt2": GPT2, "resnet": VISION, "bignet": BIGNET}
COLUMNS = [("gpt2", "fp32", "off"), ("gpt2", "bf16", "off"), ("gpt2", "fp16", "off"), ("resnet", "bf16", "off")]
COLUMNS += [("bignet", "bf16", "default")]
TWO_STEPS = ("batch_size=8", "micro_batch_size=2", "clip=norm", "eval_samples=3", "device=cpu")


def composition(modes: list[str]) -> dict[str, float]:
    """Two steps and an evaluation: the loss of the second step.

    Each precision meets each mode, each mode each way to checkpoint activations, and each of these each precision.
    Compiled graphs are run by torch: inductor's code is that of one process, and takes long to make.
    """
    outcome, compile_by = {}, torch.compile
    with mock.patch.object(torch, "compile", lambda call, **_: compile_by(call, backend="aot_eager")):
        for row, (name, precision, compiled) in enumerate(COLUMNS):
            column = compose(*TWO_STEPS, *JOBS[name], f"precision={precision}", f"compile='{compiled}'")
            for mode in modes:
                activation = ACTIVATIONS[(row + [*MODES].index(mode)) % len(ACTIVATIONS)]
                key = " ".join((name, precision, compiled, mode, activation))
                outcome[key] = attempt(column, MODES[mode](), ActivationCheckpointing(activation))
    return outcome


def attempt(column: Config, mode: Parallel, activation: ActivationCheckpointing) -> float:
    torch.use_deterministic_algorithms(False)
    trainer = trainer_of(replace(deepcopy(column), parallel=mode, activation_checkpointing=activation))
    records = fit(trainer)
    losses = [trainer.world.all_reduce_sum(record.loss.double()).item() for record in records]
    valid = trainer.evaluate()["loss"]
    assert all(torch.isfinite(torch.tensor([*losses, valid])))
    return losses[1]


def exchange() -> dict[str, Any]:
    """What every rank receives from work that only rank 0 did."""
    world = DDP(timeout_s=60).world("cpu")

    def fails(error: BaseException) -> Any:
        raise error

    heard: dict[str, Any] = {"result": world.run_on_main(lambda: f"from {world.rank}")}
    for name, error in (
        ("mistake", UserError("no", "a=1", mistake="b=2")),
        ("signal", Interrupted("enough", 15)),
        ("bug", ValueError("x")),
    ):
        try:
            world.run_on_main(partial(fails, error))
        except (Exception, Interrupted) as raised:
            heard[name] = [type(raised).__name__, str(raised), getattr(raised, "exit_code", None)]
            if isinstance(raised, UserError):  # the command line mends remedies on every rank
                heard["remedies"] = [raised.problem, list(raised.remedies), raised.mistake, raised.shared]
    return heard


CASES: dict[str, Callable[[str], Any]] = {
    "gradient": gradient,
    "flag": flag,
    "communication": communication,
    "accumulation": accumulation,
    "metrics": lambda mode: metrics(MODES[mode](), DEVICE),
    "training": lambda mode: training.found(mode, DEVICE),
}


def main() -> None:
    case, folder = sys.argv[1:3]
    torch.set_num_threads(1)
    several = parallel.launched_processes() > 1 or DEVICE == "cuda"  # one GPU is enough to shard on it
    modes = ["ddp", "fsdp"] if several else ["single"]
    everything = [*CASES] if several else ["gradient", "accumulation", "metrics", "training"]
    names = everything if case == "all" else [case]
    found: dict[str, Any] = {name: {mode: CASES[name](mode) for mode in modes} for name in names}
    if case == "all":
        found["composition"] = composition(modes)
        if several:
            found |= {"gathered": gathered("fsdp"), "exchange": exchange(), "refusals": training.refusals(DEVICE)}
    rank = dist.get_rank() if dist.is_initialized() else 0
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
