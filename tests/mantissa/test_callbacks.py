"""Watched trainings of other libraries: what is requested is read from them, and a planted fault is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mantissa
from tests.helpers import same_bits

BF16 = torch.bfloat16


class Logarithm(nn.Module):
    """Adds the logarithm of ``level``, so 0, in front of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.level = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.level.log())


class Edge(nn.Module):
    """Adds the logarithm of ``level - 1`` times 0, where a product in bf16 may round ``level`` to 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.level = nn.Parameter(torch.full((1, 1), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        level = nn.functional.linear(x.new_ones(1, 1), self.level).float()
        return self.inner(x + 0 * (level - 1).log())


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(32, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**options, bos_token_id=0, eos_token_id=0))


def trained(model: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Take 6 steps of two microbatches with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    fixed = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 1}
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    trainer = Trainer(
        model, TrainingArguments(folder, **fixed, **accumulated, **options), train_dataset=Tokens(), callbacks=callbacks
    )
    trainer.train()
    return model


def test_transformers_trainer_is_watched_and_trains_the_same(tmp_path: Path) -> None:
    from mantissa.callbacks.transformers import Precision

    said: list[str] = []
    callback = Precision(every=3, say=said.append)
    watched = trained(gpt2(), tmp_path, [callback], bf16=True)
    assert same_bits(trained(gpt2(), tmp_path, [], bf16=True).state_dict(), watched.state_dict())
    assert said[0].startswith("requested: bf16; effective:")
    assert callback.watch.setup.differences == []
    assert [each.step for each in callback.watch.history] == [3, 6]
    assert "transformer.h.1.mlp.act" in callback.watch.history[0].overflow


def test_the_loss_of_several_passes_is_what_the_trainer_logs(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from mantissa.callbacks.transformers import Precision

    class Logs(TrainerCallback):  # type: ignore[misc]
        losses: ClassVar[list[float]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.losses += [logs["loss"]] if "loss" in logs else []

    callback = Precision(every=1, say=lambda text: None)
    trained(gpt2(), tmp_path, [callback, Logs()], logging_steps=1)
    assert [each.loss for each in callback.watch.history] == pytest.approx(Logs.losses, rel=1e-3)


def test_weights_that_nobody_asked_to_be_bf16_are_named(tmp_path: Path) -> None:
    """Transformers 5 loads what the checkpoint has; the Trainer says nothing of it."""
    from transformers import AutoModelForCausalLM

    from mantissa.callbacks.transformers import Precision

    gpt2().to(BF16).save_pretrained(tmp_path / "model")
    said: list[str] = []
    trained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path, [Precision(2, say=said.append)], bf16=True
    )
    assert "are bfloat16, and precision=bf16 asks for fp32 ones" in said[0]
    assert "from_pretrained(…, dtype=torch.float32)" in said[0]
    assert "Gradients of 2 forward passes are summed in bfloat16" in said[0]
    assert "the model's config: sdpa" in said[0]
    assert any("are lost, too small" in each for each in said[1:])


def test_fp16_that_transformers_ignores_on_a_cpu_is_named(tmp_path: Path) -> None:
    from mantissa.callbacks.transformers import Precision

    said: list[str] = []
    trained(gpt2(), tmp_path, [Precision(say=said.append)], fp16=True)
    assert "precision=fp16 asks for autocast to float16, but the forward ran without it" in said[0]


def test_a_step_of_transformers_trainer_is_replayed(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from mantissa.callbacks.transformers import Precision

    class Spoil(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                kwargs["model"].transformer.h[1].mlp.level.data.fill_(1 + 2.0**-10)

    model = gpt2()
    model.transformer.h[1].mlp = Edge(model.transformer.h[1].mlp)
    said: list[str] = []
    with pytest.raises(mantissa.NotFiniteError, match="step 4: the loss is not finite"):
        trained(model, tmp_path, [Spoil(), Precision(say=said.append)], bf16=True)
    assert "fp32 ok · bf16 BREAKS" in said[-1]  # accelerate's autocast is inside of the model's forward
    assert (tmp_path / "mantissa" / "report.html").exists()


@pytest.mark.parametrize("steps", [1, 2])
def test_accelerates_loop_is_watched(steps: int, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # which a Trainer before may have set
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), Logarithm(nn.Linear(8, 1)))
    data = DataLoader(TensorDataset(torch.rand(32, 4)), 4)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)
    said: list[str] = []
    watch = mantissa.Watch(
        model, optimizer, every=2, precision=accelerator.mixed_precision, folder=tmp_path, say=said.append,
        loss=lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip

    def train() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(watch.keep(batch)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                watch.step(loss)

    train()
    assert watch.number == 8 // steps
    assert watch.setup is not None
    assert watch.setup.differences == []
    assert watch.setup.effective["autocast"] == "bfloat16"
    net[1].level.data.fill_(-1.0)
    with pytest.raises(mantissa.NotFiniteError, match=rf"step {8 // steps + 1}: .*domain, forward: 1;"):
        train()


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    """Lightning, by each of its two names."""
    return pytest.importorskip(request.param, minversion="2.5")


def fitted(lightning: Any, base: type, folder: Path, callbacks: list[Any], bad: int = -1, **options: Any) -> Any:
    """Train 8 batches of a module whose step is that of ``base``; one of number ``bad`` has no logarithm."""

    class Module(base, lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), Logarithm(nn.Linear(8, 1)))
            self.automatic_optimization = not hasattr(base, "manual")

        def loss(self, batch: list[Tensor]) -> Tensor:
            loss = self.net(batch[0].to(self.net[0].weight.dtype)).float().square().mean()
            self.log("loss", loss)
            return loss * (1 + 0 * self.trainer.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in self.net]
            return torch.optim.AdamW(self.parameters()) if self.automatic_optimization else (optimizers, [])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == bad:
                self.net[1].level.data.fill_(-1.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=folder, enable_model_summary=False, callbacks=callbacks,
        **quiet, **options,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(32, 4)), 4))
    return module


class Automatic:
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)  # type: ignore[attr-defined]


class Sometimes(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)} if batch_idx % 3 else None


class Manual:
    manual = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[attr-defined]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))  # type: ignore[attr-defined]
            optimizer.step()


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of torch's newer names
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_lightnings_trainer_is_watched_and_a_step_is_replayed(lightning: Any, precision: Any, tmp_path: Path) -> None:
    from mantissa.callbacks.lightning import Precision

    said: list[str] = []
    options = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    callback = Precision(every=2, say=said.append)
    watched = fitted(lightning, Automatic, tmp_path, [callback], **options)
    assert same_bits(fitted(lightning, Automatic, tmp_path, [], **options).state_dict(), watched.state_dict())
    assert [each.step for each in callback.watch.history] == [2, 4]
    assert callback.watch.history[1].loss == pytest.approx(watched.trainer.callback_metrics["loss"].item(), rel=1e-6)
    assert callback.watch.setup.differences == []
    with pytest.raises(mantissa.NotFiniteError, match=r"step 3: a gradient is not finite; .*net\.1"):
        fitted(lightning, Automatic, tmp_path, [Precision(say=said.append)], 5, **options)
    assert (tmp_path / "mantissa" / "report.html").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("base", "words"), [(Sometimes, "domain, forward: net.1"), (Manual, "steps its optimizers")])
def test_steps_without_a_loss_or_with_their_own_optimizers_end_no_training(
    lightning: Any, base: type, words: str, tmp_path: Path
) -> None:
    from mantissa.callbacks.lightning import Precision

    said: list[str] = []
    callback = Precision(every=2, say=said.append)
    watched = fitted(lightning, base, tmp_path, [callback])
    assert same_bits(fitted(lightning, base, tmp_path, []).state_dict(), watched.state_dict())
    assert callback.watch.number == 8
    assert not any("cannot follow" in each for each in said)
    with pytest.raises(mantissa.NotFiniteError, match=f"step 6: .*{words}"):
        fitted(lightning, base, tmp_path, [Precision(say=said.append)], 5)


def test_the_loss_stays_on_its_device(lightning: Any) -> None:
    from mantissa.callbacks.lightning import Precision

    callback, given = Precision(), list[Tensor]()
    callback.watch, callback._steps = SimpleNamespace(step=given.append), 0  # type: ignore[assignment]
    trainer = SimpleNamespace(global_step=1, accumulate_grad_batches=2)
    callback.on_train_batch_end(trainer, None, {"loss": torch.empty((), device="meta")}, None, 0)
    assert given[0].is_meta  # of which nothing can be read
