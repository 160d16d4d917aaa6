"""What a message says to do instead is typed, and accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line.conftest import Train
from trainer.config.step import StepConfig
from trainer.trainer import Trainer

# What both commands have | the mistake | what its message says to write instead | or instead; "-" is nothing.
ROWS = """
- | precision=bf61 | precision=bf16
- | presicion=bf16 | precision=bf16
- | batch=8 | batch_size=8
- | optimizer.name=Adamw | optimizer.name=AdamW
- | recipe.size=125M | recipe.size=124M
recipe=resnet | recipe.arch=resnet51 | recipe.arch=resnet50
- | device=tpu | device=auto
- | recipe.sise=mini | recipe.size=mini
- | metrics=[f1_marco] | metrics=[f1_macro]
- | optimizer.betas=1 | optimizer.options.betas=1 optimizer=adamw
- | lr=1e-3 | optimizer.lr=1e-3
- | --steps=10 | steps=10
- | --steps 10 | steps=10
optimizer.name=Adagrad | optimizer.options.betas=[0.9,0.99] | ~optimizer.options.betas
optimizer.options.momentum=0.9 | - | optimizer=muon
- | optimizer.options.amsgrad=true | +optimizer.options.amsgrad=true
data.path=notes.txt | - | data=text
- | +data=synthetic | data=synthetic
- | ~recipe | - | recipe=bert
recipe=bignet | ~clip | - | clip=none
recipe=bignet | ~steps | -
recipe=bignet | limit_train_batches=2 | steps=2
recipe=bignet | trainer.precision=bf16 | precision=bf16
recipe=bignet | --fp16 | precision=fp16
recipe=bignet | +steps=2 | steps=2
recipe=gpt2,bignet | - | -m
- | optimizer.lr=0,001 | -m optimizer.lr=0,001 | optimizer.lr=0.001
- | seed=4294967296 | seed=0
- | optimizer.lr=high | optimizer.lr=0.001
- | optimizer.fused=auto | optimizer.fused=true
precision=bf16 | precision.fp32_modules=lm_head | precision.fp32_modules=[a,b]
clip=norm | ~clip.max_norm | -
batch_size=7 | micro_batch_size=2 | micro_batch_size=1
precision=fp16 | scaler=none | scaler=auto | scaler=none scaler.force=true
recipe=gpt2 | data=digits | data=python_docs
data=text | - | data.path=notes.txt
recipe=gpt2 | data=text 'data.path=mein Ordner ü' | data=python_docs
recipe=gpt2 data=text | data.path=*.txt | data.path=. data.pattern=*.txt
recipe=gpt2 | recipe.lr=1e-3 | optimizer.lr=1e-3
recipe=gpt2 | data=text data.path=docs.jsonl | data=hub data.name=docs.jsonl
- | resume=true | resume=auto
recipe=gpt2 | recipe.attention=flash | recipe.attention=sdpa
recipe=gpt2 | recipe.chunked_loss=maybe | recipe.chunked_loss=true
recipe=gpt2 | recipe.vocabulary_multiple=0 | recipe.vocabulary_multiple=1
recipe=gpt2 | recipe.dropout=1 | recipe.dropout=0
recipe=llama recipe.heads=8 | recipe.width=100 | recipe.width=96
recipe=llama recipe.heads=4 | recipe.kv_heads=3 | recipe.kv_heads=2
recipe=gpt2 recipe.lora.rank=2 | recipe.lora.target=[] | recipe.lora.target=[c_attn]
recipe=gpt2 recipe.lora.rank=2 | recipe.lora.alpha=0 | recipe.lora.alpha=1.0
recipe=resnet | recipe.arch=timm/resnet5O | recipe.arch=timm/resnet50
recipe=resnet | recipe.arch=timm/resnet50.a1_in1 | recipe.arch=timm/resnet50.a1_in1k
recipe=resnet | recipe.class_weights=[1,-2] | recipe.class_weights=[1,2.5]
recipe=resnet | recipe.class_weights=equal | recipe.class_weights=[1,2.5]
recipe=resnet | recipe.bce_threshold=0.2 | -
recipe=resnet | init_from=IMAGENET1K_V3 | init_from=IMAGENET1K_V1
recipe=resnet | data=python_docs | data=digits
recipe=bignet | data=digits | data=synthetic
recipe=gpt2 | data.vocab_size=256 | data.vocab_size=256 data.tokenizer=bytes | data.vocab_size=1024
recipe=gpt2 | data.valid_fraction=0.6 | data.valid_fraction=0.5
recipe=gpt2 | data.tokenizer= | data.tokenizer=bpe
recipe=gpt2 | data=text data.path=nowhere.txt | data=text data.path=notes.txt | data=python_docs
recipe=gpt2 data=hub | - | data.name=ag_news
recipe=gpt2 | data=hub data.name=LICENSE | data=text data.path=LICENSE
recipe=resnet data=imagefolder data.path=docs | data.valid_fraction=1 | data.valid_fraction=0.5
recipe=resnet augment=none | augment.mixup=-1 | augment.mixup=0
recipe=resnet augment=light | augment.shift=0.6 | augment.shift=0
recipe=gpt2 | augment.mixup=0.2 | -
recipe=bignet | augment.mixup=0.2 | -
recipe=gpt2 data=synthetic | augment=light | -
recipe=bignet | optimizer.name=LBFGS | optimizer.name=AdamW
recipe=bignet | +optimizer.options.beta=[0.9] | -
recipe=bignet | +optimizer.options.lr=0.1 | optimizer.lr=0.1
recipe=bignet | +optimizer.options.params=0 | -
recipe=bignet | optimizer.groups=[head] | 'optimizer.groups={head: {lr: 10}}'
recipe=bignet | optimizer.groups={0:2.0} | 'optimizer.groups={0: {lr: 0.1}}'
recipe=bignet schedule=onecycle | schedule.warmup_steps=5 | schedule.rise=0.3
recipe=bignet | clip=norm clip.max_norm=0.0 | clip=norm clip.max_norm=1.0 | clip=none
recipe=bignet precision.fp32_modules=['0'] | precision=fp32 | precision=bf16
recipe=bignet precision.fp32_ops=[softmax] | precision=fp32 | precision=bf16
recipe=bignet precision.fp8_scaling=rowwise | precision=bf16 | precision=fp8
recipe=gpt2 data=synthetic precision=bf16_pure | precision.fp32_modules=[lm_head] | precision.fp32_modules=[lm_head,wte]
recipe=bignet optimizer.name=NAdam | precision=fp16_pure | precision=fp16_master
recipe=gpt2 data=synthetic recipe.lora.rank=2 | recipe.lora.target=[c_atn] | recipe.lora.target=[c_attn]
recipe=gpt2 data=text data.path=latin.txt | - | data.encoding=latin-1
recipe=gpt2 data=text data.path=notes.txt | data.encoding=latin-l | data.encoding=latin-1
recipe=bignet | precision=fp32 precision.kernels=native | precision=fp32 | precision.kernels=native precision=bf16
recipe=bignet scaler=dynamic precision=fp16 | scaler.init=0.0 | scaler.init=65536
recipe=bignet scaler=dynamic precision=fp16 | scaler.floor_scale=0.0 | scaler.floor_scale=1.0
recipe=bignet | epochs=2 steps=10 | steps=10 | epochs=2
recipe=bignet | threads=0 | threads=1 | -
recipe=bignet steps=10 | schedule.warmup_steps=20 | schedule.warmup_steps=auto
recipe=bignet | early_stopping.min_delta=1 | early_stopping.patience=5
recipe=bignet | early_stopping.metric=valid/los | early_stopping.patience=5
recipe=bignet | checkpoint.best=los | checkpoint.best=valid/loss
recipe=bignet | metrics=[accuracy] | -
precision=mxfp8 | recipe=resnet | recipe=gpt2
recipe=bignet precision=bf16 | precision.fp32_ops=[sofmax] | precision.fp32_ops=[softmax]
recipe=bignet | precision=bf16_pure 'precision.fp32_modules=["*"]' | precision=fp32
recipe=bignet precision=bf16 | scaler=dynamic | scaler=auto | scaler=dynamic scaler.force=true
recipe=bignet precision=fp16_pure optimizer=adamw | optimizer.fused=false | optimizer.fused=true
recipe=bignet optimizer=muon | diagnostics=numerics | diagnostics=none
recipe=bignet precision=bf16_pure | optimizer.state=bf16 | -
recipe=bignet | optimizer.state=bf16 optimizer=sgd | optimizer=sgd | optimizer.state=bf16 optimizer=adamw
recipe=bignet | checkpoint=none checkpoint.save_on_signal=[USR1] | checkpoint=none | checkpoint.save_on_signal=[USR1]
recipe=bignet | checkpoint.save_on_signal=[KILL] | checkpoint.save_on_signal=[USR1]
recipe=bignet | tracking.register=a/b | tracking.register=my-model
recipe=bignet | tracking.uri=runs.db | tracking.uri=sqlite:///runs.db
recipe=bignet freeze=[0.0] | optimizer.groups={0.0.*:{lr:2}} | -
recipe=bignet | optimizer.groups={*.bias:{weight_decay:0.1}} | -
recipe=resnet recipe.arch=squeezenet1_1 | optimizer=muon | optimizer=adamw
recipe=bignet optimizer.name=Rprop ~optimizer.options.betas | - | optimizer.weight_decay=0
recipe=bignet | parallel=ddp | parallel=single
recipe=bignet | device=cuda | device=cpu
recipe=bignet | device=hpu | device=auto
recipe=resnet | recipe.mean=[0.5,0.5,0.5] | -
recipe=resnet recipe.std=[1,1,1] | recipe.mean=0.5 | recipe.mean=[0.5,0.5,0.5]
recipe=resnet recipe.arch=squeezenet1_1 | recipe.image_size=8 | recipe.image_size=224
recipe=resnet recipe.train_image_size=64 | recipe.arch=vit_b_16 | -
recipe=resnet | recipe.class_weights=[1,-1,2] | recipe.class_weights=[1,2.5]
recipe=gpt2 data=text data.path=notes.txt | recipe.context=4096 | recipe.context=270
init_from=exported | recipe=llama | recipe=gpt2
recipe=gpt2 | init_from=exported recipe.size=nano | init_from=exported | recipe.size=nano
recipe=gpt2 | data=text data.path=note.txt | data=text data.path=notes.txt | data=python_docs
recipe=gpt2 data=hub data.name=docs.jsonl | data.text_column=txt | data.text_column=text
recipe=gpt2 data=text data.path=notes.txt | data.tokenizer=./nowhere | -
recipe=resnet data=imagefolder data.path=broken recipe.arch=squeezenet1_1 | - | data.on_error=skip
recipe=bignet | learning_rate=0.1 | optimizer.lr=0.1
recipe=bignet | max_steps=10 | steps=10
recipe=bignet | grad_clip=1.0 | clip.max_norm=1.0 clip=norm
recipe=bignet | num_workers=2 | loader.workers=2
recipe=bignet | amp=bf16 | precision=bf16
recipe=bignet | momentum=0.9 | optimizer.options.momentum=0.9 optimizer=muon
recipe=bignet | workers=2 | loader.workers=2
- | recipe=[gpt2,bignet] | -m recipe=gpt2,bignet
recipe=bignet | --batch-size 8 | batch_size=8
recipe=bignet | recipe.layers=2.5 | recipe.layers=2
recipe=bignet clip.max_norm=1.0 | - | clip=norm
recipe=bignet clip.max_value=1.0 | - | clip=value
recipe=bignet schedule=wsd | schedule.warmup=10 | schedule.warmup_steps=10
recipe=bignet ema.decay=0.9 | - | ema=default
recipe=bignet schedule.rise=0.2 | - | schedule=onecycle
recipe=bignet profiler.wait=1 | - | profiler=torch
recipe=bignet | max_epochs=2 | epochs=2
recipe=bignet | num_train_epochs=2 | epochs=2
recipe=bignet | per_device_train_batch_size=8 | micro_batch_size=8
recipe=bignet | weight_decay=0.1 | optimizer.weight_decay=0.1
recipe=bignet | warmup_steps=3 | schedule.warmup_steps=3
recipe=bignet | gradient_checkpointing=true | activation_checkpointing=blocks
recipe=bignet | logger=local | tracking=local
recipe=bignet | bf16=true | precision=bf16
recipe=bignet | mixed_precision=bf16 | precision=bf16
recipe=bignet | default_root_dir=here | output_dir=here
recipe=bignet | fast_dev_run=true | debug=fast
recipe=bignet | save_steps=5 | checkpoint.every=5
recipe=bignet | seed_everything=1 | seed=1
recipe=bignet | overfit_batches=1 | debug=overfit
recipe=bignet | ckpt_path=auto | resume=auto
recipe=bignet | strategy=single | parallel=single
recipe=bignet | accelerator=cpu | device=cpu
recipe=bignet | gradient_clip_val=1.0 | clip.max_norm=1.0 clip=norm
recipe=bignet | --gradient_checkpointing | activation_checkpointing=blocks
recipe=bignet | --num_train_epochs 2 | epochs=2
recipe=bignet | clip=1.0 | clip=norm clip.max_norm=1.0
recipe=bignet | loader=2 | loader.workers=2
"""
SMALL = {"recipe=bignet": ["recipe.layers=2", "recipe.width=16"], "recipe=gpt2": ["recipe.size=nano"]}
"""What makes a model small, where a command does not choose it."""
TryOut = Callable[..., tuple[Any, str]]


class Began(BaseException):
    """All that was typed has been accepted."""


def cells(row: str) -> tuple[list[str], list[str], list[list[str]]]:
    """The words that all commands of a row have, the wrong ones, and what is written in their place."""
    common, wrong, *remedies = ([] if cell == "-" else shlex.split(cell) for cell in row.split(" | "))
    return common, wrong, remedies


def names(said: str, wrong: list[str], instead: list[str]) -> bool:
    """Whether a message has each word that is new in a command, or its key, or a value of it; else what goes."""
    new = [word for word in instead if word not in wrong]
    gone = [word for word in wrong if word not in instead]
    parts = [
        {word, *word.lstrip("+~").removeprefix("space.").split("=", 1), *re.split(r"[=\s,()]+", word)}
        for word in new or gone
    ]
    return all(any(part in said for part in parts_of_word - {""}) for parts_of_word in parts)


@pytest.fixture
def try_out(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TryOut:
    """``try_out(words)``: the place that a command of train.py did not come to, and its message."""

    def begin(*_: object, **__: object) -> None:
        raise Began

    def attempt(words: list[str], *places: tuple[type, str]) -> tuple[Any, str]:
        keys = {word.partition("=")[0] for word in words}
        for choice, small in SMALL.items():
            if choice in words and "init_from" not in keys:
                words = [*words, *(word for word in small if word.partition("=")[0] not in keys)]
        for place in places or [(StepConfig, "open_datasets"), (Trainer, "train_step")]:
            with monkeypatch.context() as patch:
                patch.setattr(*place, begin)
                try:
                    done = train(*words)
                except Began:
                    continue
            if done.code:
                return place, done.err
        return None, ""

    for name in ("empty", "runs/mine", "exported", "docs"):
        (folder / name).mkdir(parents=True)
    (folder / "runs/mine/config.json").write_text('{"precision.mode": "bf16"}')
    (folder / "exported/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "docs.jsonl").write_text('{"text": "a row of words"}\n' * 900)
    for name in ("notes.txt", "LICENSE"):
        (folder / name).write_text("one two three four five\n" * 900)
    (folder / "latin.txt").write_bytes("na\u00efve caf\u00e9\n".encode("latin-1") * 900)
    for name in ("broken/one", "broken/two"):
        write_images(folder / name)
    for number in range(4):
        (folder / f"broken/one/{number}.png").write_bytes(b"no image")
    return attempt


def write_images(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(folder / f"{number}.png")


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_what_a_message_says_to_do_is_accepted(row: str, try_out: TryOut) -> None:
    common, wrong, remedies = cells(row)
    place, said = try_out([*common, *wrong])
    assert said, "no mistake"
    for words in remedies:
        assert names(said, wrong, words), said
        assert try_out([*common, *words], place)[1] == ""
