"""The language model beside nanoGPT's recipe for a CPU: the time of a step.

The baseline is written from the description of that project's model (GPT-2's blocks without biases, exact GELU, tied
tables, a smaller start of what is added to the residual) and of its loop (random windows of one array, AdamW, a cosine
after a warm-up, the loss read in every iteration; autocast around the forward pass, which that project has on a GPU).
No code is shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.jobs import Job, shakespeare
from benchmarks.rows import ENDLESS, Bench, Row, Times, interleave, ratios
from evidence.stopwatch import steps_of, stopwatch
from recipes.data.text.tokens import TextDatasets
from trainer.precision import kernels
from trainer.trainer import Trainer

CLIP = 1.0
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
DEFAULT, PLAIN, AGAIN = "Mantissa", "nanoGPT's loop", "the loop again"
BLOCKS = 8
"""Short blocks of each loop for a repeat: each gives a ratio, of loops that saw the same load."""
TARGET = 0.95


@dataclass(frozen=True)
class PlainShape:
    """The numbers of the model and of its run. The defaults are shakespeare-char's for a CPU."""

    vocabulary: int = 65
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    batch_size: int = 12
    steps: int = 2000
    warmup: int = 100
    lr: float = 1e-3
    final_lr: float = 1e-4

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step ``step`` (from 0): a linear warm-up, then half a cosine."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final_lr + (self.lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class PlainBlock(nn.Module):
    """Attention and an MLP, each after a norm and inside a residual sum."""

    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` (B × T × width) and what the block adds."""
        split = (*x.shape[:2], self.heads, -1)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(x.shape))
        added: Tensor = self.narrow(self.gelu(self.wide(self.norm2(x))))
        return x + added


class PlainGPT(nn.Module):
    """GPT-2 without biases, the output layer tied to the embedding of tokens."""

    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                before_sum = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if before_sum else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets`` from ``tokens``, both int64 B × T."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class PlainLoop:
    """The loop of that project: a fixed learning-rate schedule, one batch a step, the loss read in every step.

    Args:
        shape: of model and run.
        train: token ids.
        seed: of the weights and of the batches.
        device: where it trains; with fused AdamW only where the project has it, on CUDA.
        bf16: whether the forward pass is under autocast.
        compiled: whether the model is.
    """

    def __init__(
        self,
        shape: PlainShape,
        train: np.ndarray,
        seed: int,
        device: torch.device,
        bf16: bool,
        compiled: bool,
    ) -> None:
        self.shape, self.train = shape, train.astype(np.uint16)
        self.device, self.bf16 = device, bf16
        torch.manual_seed(seed)
        self.model = PlainGPT(shape).to(self.device)
        self.forward = torch.compile(self.model) if compiled else self.model
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(groups, lr=shape.lr, betas=BETAS, **fused)
        self._windows = torch.Generator().manual_seed(seed)
        self._batch = self._next()
        self.step = 0
        self.loss = math.nan
        """Loss of the last step."""

    def run(self, steps: int) -> None:
        """Take optimizer steps."""
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.shape.lr_at(self.step)
            with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext():
                loss = self.forward(*self._batch)
            self._batch = self._next()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.loss = loss.item()

    def _next(self) -> tuple[Tensor, Tensor]:
        context = self.shape.context
        starts = torch.randint(len(self.train) - context, (self.shape.batch_size,), generator=self._windows).tolist()
        rows = torch.stack(
            [torch.from_numpy(self.train[start : start + context + 1].astype(np.int64)) for start in starts]
        )
        rows = rows.to(self.device)
        return rows[:, :-1], rows[:, 1:]


def _plain(shape: PlainShape, trainer: Trainer, seed: int, bf16: bool, compiled: bool) -> PlainLoop:
    """Return the baseline on a trainer's text."""
    assert isinstance(trainer.datasets, TextDatasets)
    tokens = trainer.datasets.tokens
    shape = replace(shape, vocabulary=tokens.tokenizer.vocab_size)
    return PlainLoop(shape, tokens.train[:], seed, trainer.device, bf16, compiled)


def nanogpt_steps(bench: Bench, job: Job | None = None, shape: PlainShape | None = None) -> Iterator[Row]:
    """Measure a step beside one of nanoGPT's loop, and of that loop beside itself: what the ratios are worth.

    Tests make the job, and the shape of the baseline, smaller.
    """
    job, shape = job or shakespeare(bench.text), shape or PlainShape()
    for mode, compiled in ((mode, compiled) for mode in ("fp32", "bf16") for compiled in (False, True)):
        name = f"{job.name}, step, {{}} / {PLAIN}, {mode}{', compiled' * compiled}"
        if why := bench.left_out(mode):
            yield Row(name.format(DEFAULT), "x", [], why)
            continue
        options = (f"precision={mode}", f"compile={'default' if compiled else 'off'}")
        times = _steps(bench, job, shape, mode == "bf16", compiled, options)
        how = f"{job.line(*options)}; blocks of {job.steps} steps"
        yield Row(name.format(DEFAULT), "x", ratios(times, DEFAULT, PLAIN), how, TARGET)
        yield Row(name.format(AGAIN), "x", ratios(times, AGAIN, PLAIN), "two instances of the loop")


def _steps(bench: Bench, job: Job, shape: PlainShape, bf16: bool, compiled: bool, options: tuple[str, ...]) -> Times:
    """Return the seconds of the blocks of each loop."""
    hardware = bench.hardware
    trainer = Trainer.from_config(job.config(*options, ENDLESS, f"device={hardware.device}"), hardware)
    loops = {DEFAULT: steps_of(trainer)}
    loops |= {name: _plain(shape, trainer, seed, bf16, compiled).run for seed, name in enumerate((PLAIN, AGAIN))}

    def block(name: str) -> float:
        kernels.clear()  # the kernels of 16-bit operands are the process's, and the others have torch's own
        if name == DEFAULT:
            trainer.config.precision.apply()
            trainer.config.use_kernels(trainer.hardware, trainer.convolves)
        return stopwatch(loops[name], hardware.device)(job.steps)

    return interleave({name: partial(block, name) for name in loops}, bench.repeats * BLOCKS)
