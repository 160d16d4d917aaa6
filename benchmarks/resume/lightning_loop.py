"""Lightning with ``ckpt_path="last"``, for ``python -m mantissa certify``.

python benchmarks/resume/lightning_loop.py FOLDER
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, WIDTH = 200, 16


class Regression(lightning.LightningModule):
    """A network with dropout; it prints the samples and the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        samples, inputs, targets = batch
        print(f"step {self.global_step + 1} samples {samples.tolist()}")
        loss = F.mse_loss(self.layers(inputs), targets)
        print(f"step {self.global_step + 1} loss {loss.item()!r}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(out: str) -> None:
    """Train, from the last checkpoint where there is one."""
    lightning.seed_everything(0)
    inputs = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))
    checkpoints = ModelCheckpoint(out, save_last=True, save_top_k=1, every_n_train_steps=10)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=100, logger=False, callbacks=[checkpoints], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1])
