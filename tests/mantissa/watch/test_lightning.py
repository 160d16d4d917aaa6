"""Lightning's trainer, watched: what is requested is read from it, and a planted fault is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mantissa
from tests.mantissa.bits import same_bits


class Logarithm(nn.Module):
    """Adds the logarithm of ``level``, so 0, in front of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.level = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.level.log())


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
            optimizers = [torch.optim.AdamW(part.parameters(), 0.1) for part in self.net]
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
    assert [measured.step for measured in callback.watch.history] == [2, 4]
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
    assert not any("cannot follow" in text for text in said)
    with pytest.raises(mantissa.NotFiniteError, match=f"step 6: .*{words}"):
        fitted(lightning, base, tmp_path, [Precision(say=said.append)], 5)


def test_the_loss_stays_on_its_device(lightning: Any) -> None:
    from mantissa.callbacks.lightning import Precision

    callback, given = Precision(), list[Tensor]()
    callback.watch, callback._steps = SimpleNamespace(step=given.append), 0  # type: ignore[assignment]
    trainer = SimpleNamespace(global_step=1, accumulate_grad_batches=2)
    callback.on_train_batch_end(trainer, None, {"loss": torch.empty((), device="meta")}, None, 0)
    assert given[0].is_meta  # of which nothing can be read
