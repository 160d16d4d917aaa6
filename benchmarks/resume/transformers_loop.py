"""transformers' Trainer with ``resume_from_checkpoint``, for ``python -m mantissa certify``.

python benchmarks/resume/transformers_loop.py FOLDER [complete]

complete: resume from the last checkpoint that was saved to its end, not from the last one.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

SAMPLES, LENGTH = 200, 32


class Shown(Trainer):
    """Prints the samples and the loss of each step."""

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        """Take it."""
        step = self.state.global_step + 1
        print(f"step {step} samples {inputs['input_ids'][:, 0].tolist()}")
        loss = super().training_step(model, inputs, *others)
        print(f"step {step} loss {loss.item()!r}")
        return loss


def main(out: str, complete: bool) -> None:
    """Train, from the last checkpoint where there is one."""
    set_seed(0)
    # A sample is known by its first token.
    tokens = torch.randint(SAMPLES, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.arange(SAMPLES)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=SAMPLES, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        out, max_steps=100, per_device_train_batch_size=4, save_steps=10, save_total_limit=2, report_to="none",
        disable_tqdm=True, use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    last = get_last_checkpoint(out)
    if complete:
        whole = sorted(Path(out).glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        last = str(whole[-1].parent) if whole else None
    Shown(model, arguments, train_dataset=data).train(resume_from_checkpoint=last or False)


if __name__ == "__main__":
    main(sys.argv[1], complete="complete" in sys.argv)
