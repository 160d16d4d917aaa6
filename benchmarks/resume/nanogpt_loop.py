"""A loop in nanoGPT's style, for ``python -m mantissa certify``: what its checkpoint holds is all that it resumes with.

Written from the description of that project: random windows drawn from torch's generator, an evaluation that draws from
it too, AdamW, a cosine after a warm-up, and a checkpoint of model, optimizer, iteration, best loss and config. No code
is shared with it.

python benchmarks/resume/nanogpt_loop.py FOLDER [STEPS]
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, BATCH, WIDTH, EVERY, WARMUP = 64, 8, 64, 10, 10


class GPT(nn.Module):
    """Two blocks with dropout, for bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.2, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets`` from ``tokens``, both int64, batch × context."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.blocks(self.tokens(tokens) + self.positions(torch.arange(CONTEXT)), mask=mask, is_causal=True)
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), targets.flatten())


def main(out: Path, steps: int) -> None:
    """Train, from the checkpoint where there is one."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1337)
    data = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()

    def batch() -> tuple[Tensor, Tensor, list[int]]:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:], starts

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    iteration, best = 0, math.inf
    if (path := out / "ckpt.pt").exists():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iteration, best = checkpoint["iter_num"], checkpoint["best_val_loss"]
    tokens, targets, starts = batch()
    while iteration <= steps:
        after = max(0.0, (iteration - WARMUP) / (steps - WARMUP))
        lr = 1e-3 * min((iteration + 1) / (WARMUP + 1), 0.1 + 0.45 * (1 + math.cos(math.pi * after)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iteration % EVERY == 0:
            model.eval()
            with torch.no_grad():
                best = min(best, sum(model(*batch()[:2]).item() for _ in range(4)) / 4)
            model.train()
            if iteration:
                state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {
                    "model_args": {},
                    "iter_num": iteration,
                    "best_val_loss": best,
                    "config": {"context": CONTEXT},
                }
                torch.save(state, path)
        print(f"iter {iteration}: samples {starts}")
        loss = model(tokens, targets)
        tokens, targets, starts = batch()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {iteration}: loss {loss.item():.4f}")
        iteration += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
