"""Loops that resume within an epoch, as in two threads, for ``python -m mantissa certify``.

python benchmarks/resume/loader_loops.py FOLDER accelerate   skip_first_batches, then the loader (accelerate 4071)
python benchmarks/resume/loader_loops.py FOLDER stateful     StatefulDataLoader, saved at an epoch's end (verl 7401)
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, WIDTH, BATCH, EVERY, EPOCHS = 80, 16, 4, 5, 5
PER_EPOCH = SAMPLES // BATCH


def loss_of(model: nn.Module, number: int, batch: list[Tensor]) -> Tensor:
    """Return the loss of step ``number``, and print it and its samples."""
    samples, inputs = batch
    print(f"step {number} samples {samples.tolist()}")
    loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    print(f"step {number} loss {loss.item()!r}")
    return loss


def with_accelerate(out: Path, data: TensorDataset, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train as accelerate's documentation of checkpoints says."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
    done = max((int(path.parent.name) for path in out.glob("*/complete")), default=0)
    if done:
        accelerator.load_state(str(out / str(done)))
    start, skip = divmod(done, PER_EPOCH)
    for epoch in range(start, EPOCHS):
        for batch in accelerator.skip_first_batches(loader, skip) if skip and epoch == start else loader:
            done += 1
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, done, batch))
            optimizer.step()
            if done % EVERY == 0:
                accelerator.save_state(str(out / str(done)))
                (out / str(done) / "complete").touch()


def with_stateful_loader(out: Path, data: TensorDataset, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train with a loader that saves its own place, and a sampler that is told the epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = StatefulDataLoader(data, BATCH, sampler=sampler)
    done = 0
    if (path := out / "last.pt").exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        done = saved["step"]
    for epoch in range(done // PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            done += 1
            optimizer.zero_grad()
            loss_of(model, done, batch).backward()
            optimizer.step()
            if done % PER_EPOCH == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                torch.save(state | {"loader": loader.state_dict()}, out / "new.pt")
                (out / "new.pt").replace(path)


def main(out: Path, kind: str) -> None:
    """Train, from the last checkpoint where there is one."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, WIDTH))
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    {"accelerate": with_accelerate, "stateful": with_stateful_loader}[kind](out, data, model, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
