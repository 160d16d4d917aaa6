"""What several test files need: a config through Hydra, tiny recipes, comparisons by bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.formats import MXFP8
from recipes.language import torch_can_chunk
from tests.mantissa.bits import same_bits as same_bits
from trainer.config.build import build
from trainer.config.registration import register
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.optim.update import Clip
from trainer.parallel.world import World
from trainer.precision.scaled import ARITHMETIC, Product
from trainer.recipe import Context, DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import StepRecord, Trainer

PROJECT = Path(__file__).resolve().parents[1]
CONF = PROJECT / "conf"
SHIPPED = sorted(CONF.rglob("*.yaml"))
"""The project's YAMLs, without those that scripts/advise.py wrote here for a user's own data and machine."""
CPU = Hardware(torch.device("cpu"), "a CPU", 2**34, 2)
GPU = Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))
GPT2 = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "batch_size=4")
BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "data.samples=64", "batch_size=4")
"""Jobs whose models train in no time; more options may follow, and change these."""
old_transformers = pytest.mark.skipif(
    version("transformers").startswith("5.17."), reason="this transformers has a fault of its own here"
)
needs_chunks = pytest.mark.skipif(not torch_can_chunk(), reason="this torch has no chunked linear_cross_entropy")


def compose(*overrides: str) -> Config:
    """The config of a command line, without the command line."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build(hydra_compose("config", list(overrides)))


def context(data: DataSource, hardware: Hardware = CPU, **known: Any) -> Context:
    """What a component of one process is resolved by."""
    return Context(hardware, World(), data, **known)


def trainer_of(*overrides: str, device: str = "cpu") -> Trainer:
    return start(compose(f"device={device}", *overrides))


def start(composed: Config) -> Trainer:
    return Trainer.from_config(composed)


def fit(trainer: Trainer, until: int | None = None) -> list[StepRecord]:
    """Train to the end of the plan, or until that step, and return every step's record."""
    batches = trainer.batches()
    last = trainer.plan.steps if until is None else until
    return [trainer.train_step(next(batches)) for _ in range(last - trainer.step)]


def gradients(*overrides: str) -> list[Tensor | None]:
    """The gradients of the first microbatch, with the same dropout in every call."""
    trainer = trainer_of(*overrides)
    torch.manual_seed(0)
    trainer.recipe.loss(trainer.model, next(trainer.batches())[0]).loss_sum.backward()
    return [parameter.grad for parameter in trainer.model.parameters()]


def mxfp8_of_torchao(native: bool) -> Product:
    """The product of mxfp8; without torchao, or where it does not fit the Triton that is here, the test is skipped."""
    pytest.importorskip("torchao", reason="torchao is optional")
    try:
        return ARITHMETIC[MXFP8].product("", native)
    except UserError as error:
        pytest.skip(str(error))


def without_padding(logits: Tensor, vocabulary: int) -> Tensor:
    """The logits, those of the vocabulary's padding made -inf in place (the gradient of which is 0 by itself)."""
    logits.data[..., vocabulary:] = -math.inf
    return logits


def copied(state: Any) -> Any:
    """A deep copy of a state dict that shares no memory with it."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(item) for item in state)
    return state


class Operators(TorchDispatchMode):
    """Counts the operators that are really run, in place or not: on a GPU, launches and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__.removesuffix("_")] += not func.is_view
        return func(*args, **(kwargs or {}))


@dataclass
class KeptGradients(Clip):
    """Changes nothing and keeps the gradients, which the step clears."""

    gradients: list[Tensor] = field(default_factory=list)

    def apply(self, gradients: list[Tensor], norm: Tensor) -> None:
        self.gradients[:] = [gradient.clone() for gradient in gradients]


@dataclass
class NoData(DataSource):
    """For recipes that bring their own."""


class Arrays:
    """Named tensors whose rows are the samples."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        rows = torch.tensor([sample.index for sample in samples])
        return {name: tensor[rows] for name, tensor in self.tensors.items()}


@dataclass
class SmallConvNet(Recipe):
    """Convolutions, batch norm and a linear head on noise, channels_last."""

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(8, 8, 8)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        generator = torch.Generator().manual_seed(1)
        arrays = Arrays(
            image=torch.randn(64, 3, 12, 12, generator=generator), label=torch.randint(5, (64,), generator=generator)
        )
        return Datasets(arrays, arrays, "noise")

    def build_model(self, datasets: Datasets) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )
        return model.to(memory_format=torch.channels_last)

    def count_targets(self, batch: Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits = model(batch["image"].to(memory_format=torch.channels_last)).float()
        return LossOutput(F.cross_entropy(logits, batch["label"], reduction="sum"), {})
