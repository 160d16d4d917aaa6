"""The baseline of the measurement ``nanogpt``: a small GPT and its loop, as the project nanoGPT describes them.

Written from the description of the model (GPT-2's blocks without biases, exact GELU, tied tables, a smaller start of
what is added to the residual) and of the loop (random windows of one array, AdamW, a cosine after a warm-up, the
loss read in every iteration). No code is shared with that project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIP = 1.0
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
EVAL_BATCHES = 20
"""Of the training text, and as many of the validation text, in each evaluation."""


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
        train, valid: token ids.
        seed: of the weights and of the batches.
        compiled: with torch.compile.
        autocast: opens the context of a forward pass; None: fp32. (The project itself has none on a CPU.)
        device: where it trains; with fused AdamW only where the project has it, on CUDA.
    """

    def __init__(
        self,
        shape: PlainShape,
        train: np.ndarray,
        valid: np.ndarray,
        seed: int = 0,
        compiled: bool = False,
        autocast: Callable[[], AbstractContextManager[None]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.train, self.valid = shape, train.astype(np.uint16), valid.astype(np.uint16)
        self.device = device or torch.device("cpu")
        torch.manual_seed(seed)
        self.model = PlainGPT(shape).to(self.device)
        if compiled:
            self.model.compile()
        self.autocast = autocast or nullcontext
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(groups, lr=shape.lr, betas=BETAS, **fused)
        self._windows = torch.Generator().manual_seed(seed)
        self._batch = self._next(self.train)
        self.step = 0
        self.loss = math.nan
        """Of the last step."""

    def run(self, steps: int) -> None:
        """Take optimizer steps."""
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.shape.lr_at(self.step)
            with self.autocast():
                loss = self.model(*self._batch)
            self._batch = self._next(self.train)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.loss = loss.item()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean losses of random batches of both texts."""
        self.model.eval()
        means = {}
        for part, array in (("train", self.train), ("valid", self.valid)):
            losses = torch.zeros(EVAL_BATCHES)
            for number in range(EVAL_BATCHES):
                with self.autocast():
                    losses[number] = self.model(*self._next(array)).item()
            means[part] = losses.mean().item()
        self.model.train()
        return means

    def _next(self, array: np.ndarray) -> tuple[Tensor, Tensor]:
        context = self.shape.context
        starts = torch.randint(len(array) - context, (self.shape.batch_size,), generator=self._windows).tolist()
        rows = torch.stack([torch.from_numpy(array[start : start + context + 1].astype(np.int64)) for start in starts])
        rows = rows.to(self.device)
        return rows[:, :-1], rows[:, 1:]
