"""What each rank of watched loops does, started by torchrun: ``-m tests.parallel.watched FOLDER``.

At step 3, rank 1's own batch makes a square root of something below 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mantissa
from mantissa.errors import NotFiniteError
from mantissa.tensors import local


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.root = Root()
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.root(self.first(x).square() + x[:, :1])).float().square().mean()


def trained(kind: str, folder: Path | None) -> tuple[list[Tensor], dict[str, object]]:
    """Train two steps and a bad third one; without a folder, unwatched, and the good ones alone."""
    low = kind == "fsdp_low"
    net = Net(torch.bfloat16 if low else torch.float32)
    early = torch.optim.SGD(net.parameters(), 0.1)
    model: nn.Module = net
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(net)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, None if low else torch.float32)
        fully_shard(net.first, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    optimizer = early if kind == "fsdp_early" else torch.optim.SGD(net.parameters(), 0.1)
    said: list[str] = []
    found: dict[str, object] = {"said": said}
    watch = None
    alone = kind == "ddp_alone"  # watched on rank 0, as loggers are
    if folder is not None and (not alone or dist.get_rank() == 0):
        build = Net if kind == "fsdp" else None
        watch = mantissa.Watch(model, optimizer, every=2, folder=folder, build=build, precision="bf16", say=said.append)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(1, 4 if watch and not alone else 3):
        x = torch.rand(4, 4, generator=generator) + 0.1
        if number == 3 and dist.get_rank() == 1:
            x[1, 0] = -50
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind.startswith("ddp")):
            loss = model(x)
        loss.backward()
        try:
            optimizer.step()
            if watch is not None:
                watch.step(loss)
        except NotFiniteError as error:
            found["error"] = str(error)
        optimizer.zero_grad()
    if watch is not None and watch.setup is not None:
        found["differences"] = watch.setup.differences
        found["effective"] = watch.setup.effective
        found["overflow"] = [name for each in watch.history for name in each.overflow]
        found["lost"] = [counts.lost_share for each in watch.history for counts in each.lost.values()]
    return [local(each.detach()).clone() for each in net.parameters()], found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in ("ddp", "ddp_alone", "fsdp", "fsdp_low", "fsdp_early"):
        folder = Path(sys.argv[1], kind)
        folder.mkdir(exist_ok=True)
        plain, _ = trained(kind, None)
        watched, found = trained(kind, folder / "pages")
        found["same"] = all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
