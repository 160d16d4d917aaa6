"""Options that cannot work: each is named in the error, with what can be set instead.

Those whose remedies are tried, too, are in tests/command_line/test_mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from trainer.api import compose
from trainer.checkpoint.store import Checkpoint
from trainer.config.schema import EarlyStopping
from trainer.data.loader import Loader
from trainer.errors import UserError
from trainer.optim.ema import ExponentialMovingAverage
from trainer.optim.optimizer import Optimizer
from trainer.optim.schedule import Cosine, Linear, OneCycle, Schedule, WarmupStableDecay
from trainer.optim.update import ClipNorm, ClipValue
from trainer.parallel.activation import ActivationCheckpointing
from trainer.precision.modes import Precision
from trainer.precision.scaler import DynamicScaler, StaticScaler
from trainer.profiling.diagnostics import Numerics
from trainer.profiling.profiler import MemoryProfiler, TorchProfiler

ROWS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Checkpoint, {"every": "often"}, r"checkpoint.every=often"),
    (Checkpoint, {"every": 0}, r"checkpoint.every=0"),
    (Checkpoint, {"keep": -1}, r"checkpoint.keep=-1 must be at least 0"),
    (compose, {"recipe": "bignet", "batch_size": 0}, r"batch_size=0"),
    (compose, {"recipe": "bignet", "micro_batch_size": 0}, r"micro_batch_size=0"),
    (Loader, {"workers": -1}, r"loader.workers=-1"),
    (Loader, {"workers": "many"}, r"loader.workers=many"),
    (ExponentialMovingAverage, {"decay": 0.0}, r"ema.decay=0.0 must be above 0 and below 1"),
    (ExponentialMovingAverage, {"decay": 1.0}, r"ema.decay=1.0 must be above 0 and below 1"),
    (Optimizer, {"name": "lr_scheduler"}, r"optimizer.name=lr_scheduler is not in torch.optim"),
    (Optimizer, {"name": "LBFGS"}, r"optimizer.name=LBFGS needs a closure"),
    (Optimizer, {"lr": 0.0}, r"optimizer.lr=0"),
    (Optimizer, {"lr": nan}, r"optimizer.lr=nan"),
    (Optimizer, {"weight_decay": -1.0}, r"optimizer.weight_decay=-1"),
    (Optimizer, {"options": {"beta": [0.9]}}, r"options.beta: AdamW has no such argument; did you mean 'betas'"),
    (Optimizer, {"options": {"lr": 0.1}}, r"optimizer.options.lr has its own key"),
    (Optimizer, {"options": {"params": 0}}, r"optimizer.options.params"),
    (Optimizer, {"groups": ["head"]}, r"optimizer.groups=\['head'\] must be a mapping, such as '{head: {lr: 10}}'"),
    (Optimizer, {"groups": {0.1: {"lr": 2.0}}}, r"groups: 0.1 is read as a number, not as a name; write 0.1.\* for"),
    (Optimizer, {"groups": {"0": 2.0}}, r"optimizer.groups: 0 must have lr, weight_decay or both"),
    (Optimizer, {"groups": {"0": {"lrr": 2.0}}}, r"0 must have lr, weight_decay or both and no more"),
    (Optimizer, {"groups": {"0": {"lr": 0}}}, r"0 has lr=0; .*freeze="),
    (Optimizer, {"groups": {"0": {"weight_decay": -1}}}, r"0 has weight_decay=-1"),
    (Schedule, {"warmup_steps": "soon"}, r"schedule.warmup_steps="),
    (Cosine, {"final": nan}, r"schedule.final="),
    (Linear, {"final": -0.1}, r"schedule.final="),
    (WarmupStableDecay, {"decay": -0.1}, r"schedule.decay="),
    (WarmupStableDecay, {"final": 2.0}, r"schedule.final="),
    (OneCycle, {"rise": 0.0}, r"schedule.rise="),
    (OneCycle, {"rise": 1.0}, r"schedule.rise="),
    (OneCycle, {"warmup_steps": 5}, r"schedule.warmup_steps=5 has no effect"),
    (ClipNorm, {"max_norm": 0.0}, r"clip.max_norm=0"),
    (ClipNorm, {"max_norm": nan}, r"clip.max_norm=nan"),
    (ClipValue, {"max_value": nan}, r"clip.max_value=nan"),
    (
        ActivationCheckpointing,
        {"mode": "block"},
        r"checkpointing.mode=block is unknown .*; set .*=blocks",
    ),
    (Precision, {"mode": "bf61"}, r"precision=bf61 is unknown"),
    (Precision, {"mode": "fp32", "modules": {"head": "fp32"}}, r"precision.modules has no effect: precision=fp32"),
    (Precision, {"mode": "fp32", "fp32_ops": ["softmax"]}, r"precision.fp32_ops has no effect: precision=fp32"),
    (Precision, {"mode": "bf16", "kernels": "fast"}, r"kernels=fast is unknown \(auto, native, "),
    (
        Precision,
        {"mode": "fp8", "fp8_scaling": "blockwise"},
        r"fp8_scaling=blockwise is unknown \(tensorwise, ro",
    ),
    (DynamicScaler, {"init": 0.0}, r"scaler.init="),
    (DynamicScaler, {"init": nan}, r"scaler.init="),
    (DynamicScaler, {"init": 1e39}, r"scaler.init="),
    (DynamicScaler, {"growth": 1.0}, r"scaler.growth="),
    (DynamicScaler, {"growth": inf}, r"scaler.growth="),
    (DynamicScaler, {"backoff": 1.0}, r"scaler.backoff="),
    (DynamicScaler, {"backoff": 0.0}, r"scaler.backoff="),
    (DynamicScaler, {"interval": 0}, r"scaler.interval="),
    (DynamicScaler, {"floor_scale": 0.0}, r"scaler.floor_scale="),
    (DynamicScaler, {"floor_scale": 1e6}, r"scaler.floor_scale="),
    (DynamicScaler, {"max_consecutive_skips": 0}, r"scaler.max_consecutive_skips="),
    (StaticScaler, {"scale": nan}, r"scaler.scale="),
    (StaticScaler, {"scale": 1e39}, r"scaler.scale="),
    (TorchProfiler, {"wait": -1}, r"profiler.wait=-1"),
    (TorchProfiler, {"warmup": 0}, r"profiler.warmup=0"),
    (TorchProfiler, {"active": 0}, r"profiler.active=0"),
    (MemoryProfiler, {"at_step": 0}, r"profiler.at_step=0"),
    (Numerics, {"every": 0}, r"diagnostics.every=0"),
    (EarlyStopping, {"patience": 0}, r"early_stopping.patience"),
    (EarlyStopping, {"min_delta": -1}, r"early_stopping.min_delta"),
    (EarlyStopping, {"metric": "valid/loss"}, r"early_stopping.metric"),
]


@pytest.mark.parametrize(("make", "options", "message"), ROWS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_cannot_work_is_named(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sofmax", r"fp32_ops: torch has no operator 'sofmax'.*did you mean 'softmax'"),
        ("relu_", r"no operator 'relu_' that returns a new tensor; did you mean 'relu'"),
    ],
)
def test_operators_that_cannot_have_a_dtype_are_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Precision("bf16", fp32_ops=["gelu", name]).check_operators()
