"""Trainings by transformers and accelerate, watched: what is requested is read from them, a planted fault is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mantissa
from tests.mantissa.bits import same_bits

accelerate = pytest.importorskip("accelerate")  # transformers' Trainer needs it
hf = pytest.importorskip("transformers", minversion="5")


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
    torch.manual_seed(0)
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**options, bos_token_id=0, eos_token_id=0))


def watched(said: list[str], every: int = 50) -> Any:
    from mantissa.callbacks.transformers import Precision

    return Precision(every, say=said.append)


def trained(model: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Take 6 steps of two microbatches with transformers' Trainer."""
    fixed = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 1}
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    arguments = hf.TrainingArguments(folder, **fixed, **accumulated, **options, logging_steps=1)
    trainer = hf.Trainer(model, arguments, train_dataset=Tokens(), callbacks=callbacks)
    trainer.train()
    return trainer


def test_transformers_trainer_trains_the_same_and_its_loss_of_several_passes_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    callback = watched(said, every=3)
    seen, unseen = trained(gpt2(), tmp_path, [callback], bf16=True), trained(gpt2(), tmp_path, [], bf16=True)
    assert same_bits(unseen.model.state_dict(), seen.model.state_dict())
    assert said[0].startswith("requested: bf16; effective:")
    assert callback.watch.setup.differences == []
    logged = [row["loss"] for row in seen.state.log_history if "loss" in row]
    measured = {row.step: row.loss for row in callback.watch.history}
    assert measured == {3: pytest.approx(logged[2], rel=1e-3), 6: pytest.approx(logged[5], rel=1e-3)}
    assert "transformer.h.1.mlp.act" in callback.watch.history[0].overflow


def test_weights_that_nobody_asked_to_be_bf16_are_named(tmp_path: Path) -> None:
    """Transformers 5 loads what the checkpoint has; the Trainer says nothing of it."""
    gpt2().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model, said = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), list[str]()
    trained(model, tmp_path, [watched(said, every=2)], bf16=True)
    assert "are bfloat16, and precision=bf16 asks for fp32 ones" in said[0]
    assert "from_pretrained(…, dtype=torch.float32)" in said[0]
    assert "Gradients of 2 forward passes are summed in bfloat16" in said[0]
    assert "the model's config: sdpa" in said[0]
    assert any("are lost, too small" in text for text in said[1:])


def test_fp16_that_transformers_ignores_on_a_cpu_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    trained(gpt2(), tmp_path, [watched(said)], fp16=True)
    assert "precision=fp16 asks for autocast to float16, but the forward ran without it" in said[0]


def test_a_step_of_transformers_trainer_is_replayed(tmp_path: Path) -> None:
    class Spoil(hf.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                kwargs["model"].transformer.h[1].mlp.level.data.fill_(1 + 2.0**-10)

    model, said = gpt2(), list[str]()
    model.transformer.h[1].mlp = Edge(model.transformer.h[1].mlp)
    with pytest.raises(mantissa.NotFiniteError, match="step 4: the loss is not finite"):
        trained(model, tmp_path, [Spoil(), watched(said)], bf16=True)
    assert "fp32 ok · bf16 BREAKS" in said[-1]  # accelerate's autocast is inside of the model's forward
    assert (tmp_path / "mantissa" / "report.html").exists()


@pytest.mark.parametrize("steps", [1, 2])
def test_accelerates_loop_is_watched(steps: int, tmp_path: Path) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # which a Trainer before may have set
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), Edge(nn.Linear(8, 1)))
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
