"""Options that cannot work: each is named in the error, with what can be set instead."""

from __future__ import annotations

import pytest

from tests.helpers import CPU, PROJECT, compose
from trainer.config.settle import settle
from trainer.errors import UserError

ROWS = {
    # models of transformers
    "gpt2 recipe.attention=flash": r"recipe.attention=flash is unknown; use recipe.attention=sdpa\|eager",
    "gpt2 recipe.context=long": "recipe.context=long must be a whole number, or auto",
    "gpt2 recipe.chunked_loss=maybe": "recipe.chunked_loss=maybe must be true, false or auto",
    "gpt2 recipe.vocabulary_multiple=0": "recipe.vocabulary_multiple=0 must be at least 1",
    "gpt2 recipe.dropout=1": "recipe.dropout=1.0 must be at least 0 and below 1",
    "gpt2 recipe.size=125M": "recipe.size=125M is unknown; use .*; did you mean '124M'",
    "gpt2 recipe.gelu=exact": r"recipe.gelu=exact is unknown; use recipe.gelu=tanh\|erf",
    "gpt2 recipe.gelu=erf init_from=gpt2": "recipe.gelu=erf has no effect with init_from",
    "llama recipe.layers=0": "recipe.layers=0 must be at least 1",
    "llama recipe.width=100 recipe.heads=8": "recipe.width=100 .*recipe.heads=8; use recipe.width=96",
    "llama recipe.heads=4 recipe.kv_heads=3": "kv_heads=3 must divide recipe.heads=4; use recipe.kv_heads=2",
    "bert recipe.context=15": "recipe.context=15 must be at least 16",
    "gpt2 recipe.lora.rank=2 recipe.lora.target=[]": r"must be auto, or names of layers such as \[c_attn\]",
    "gpt2 recipe.lora.rank=2 recipe.lora.alpha=0": "recipe.lora.alpha=0.0 must be above 0",
    "gpt2 recipe.lora.rank=2 recipe.lora.dropout=1": "recipe.lora.dropout=1.0 must be at least 0 and below 1",
    "gpt2 recipe.lora.rank=-1": "recipe.lora.rank=-1 must be at least 0",
    # other models
    "bignet recipe.layers=0": "recipe.layers=0",
    "bignet recipe.loss_weight=0": "recipe.loss_weight=0",
    "resnet recipe.arch=resnet5O": r"recipe\.arch=resnet5O .*did you mean 'resnet50'",
    "resnet recipe.arch=fasterrcnn_resnet50_fpn": r"recipe\.arch=fasterrcnn_resnet50_fpn is not a classifier",
    "resnet recipe.arch=resnet50d": r"resnet50d is not a classifier of torchvision\.models.*recipe\.arch=timm/…",
    "resnet recipe.arch=timm/resnet5O": "timm/resnet5O is not a model of timm .*did you mean 'timm/resnet50'",
    "resnet recipe.arch=timm/resnet50.a1_in1": r"has no weights of that tag; did you mean 'timm/resnet50\.a1_in1k'",
    "resnet recipe.image_size=0": "recipe.image_size=0 must be at least 1",
    "resnet recipe.std=[1,1,0] recipe.mean=[0,0,0]": r"recipe.std=\[1.0, 1.0, 0.0\] must be three numbers, each",
    "resnet recipe.label_smoothing=1": "recipe.label_smoothing=1.0 must be at least 0 and below 1",
    "resnet recipe.class_weights=[1,2]": "recipe.class_weights has 2 numbers, but there are 10 classes",
    "resnet recipe.class_weights=[1,-2]": r"recipe.class_weights=\[1, -2\] must be balanced, or a list",
    "resnet recipe.class_weights=equal": "recipe.class_weights=equal must be balanced",
    "resnet recipe.criterion=focal": r"recipe.criterion=focal is unknown; use recipe.criterion=cross_entropy\|bce",
    "resnet recipe.bce_threshold=0.2": "recipe.bce_threshold has no effect without recipe.criterion=bce",
    "resnet init_from=IMAGENET1K_V3": r"not among torchvision's weights of .*did you mean 'IMAGENET1K_V1'",
    "resnet init_from=none/w.pth": r"init_from=none/w\.pth: there is no such file or folder",
    "resnet recipe.arch=timm/test_vit init_from=r160_in1k": r"must be DEFAULT .*timm/test_vit\.r160_in1k",
    "resnet recipe.arch=timm/mixer_s32_224 init_from=DEFAULT": "timm has no weights of mixer_s32_224",
    # data
    "t5 data=digits": "recipe=t5 cannot read data=digits; use data=python_docs",
    "resnet data=python_docs": "data=python_docs has none; use data=digits",
    "bignet data=digits": "data=digits",
    "bignet data.samples=1": "data.samples=1 must be at least 8",
    "gpt2 data.vocab_size=256": "data.vocab_size=256: a BPE starts with 256 bytes",
    "gpt2 data.valid_fraction=0.6": "data.valid_fraction=0.6 must be above 0 and at most 0.5",
    "gpt2 data.tokenizer=": "data.tokenizer is empty; use bpe, chars, bytes",
    "gpt2 data=text": "missing required option: data.path; set a text file or a folder",
    "gpt2 data=text data.path=nowhere.txt": "data.path=nowhere.txt: there is no such file or folder",
    "gpt2 data=text data.path=LICENSE data.encoding=latin-l": r"data\.encoding=latin-l is not a text encoding",
    "gpt2 data=hub": "missing required option: data.name",
    "gpt2 data=hub data.name=./nowhere": "data.name=./nowhere: there is no such file or folder",
    "gpt2 data=hub data.name=rows.jsonl": "data.name=rows.jsonl: there is no such file or folder",
    "gpt2 data=hub data.name=a/b/c": "data.name=a/b/c: there is no such file or folder",
    "gpt2 data=hub data.name=LICENSE": "data.name=LICENSE: the name of a file must end with .parquet",
    "gpt2 data=hub data.name=docs data.rows=line": r"use data.rows=auto\|lines\|documents",
    "resnet data=imagefolder": r"missing required option: data\.path",
    "resnet data=imagefolder data.path=nowhere": r"data\.path=nowhere is not a folder",
    "resnet data=imagefolder data.path=docs data.test=nowhere": r"data\.test=nowhere is not a folder",
    "resnet data=imagefolder data.path=docs data.valid_fraction=1": "valid_fraction=1.0 must be above 0 and below 1",
    # augmentation
    "resnet augment=none augment.mixup=-1": "augment.mixup=-1.0 must be at least 0 and finite",
    "resnet augment=light augment.cutmix=nan": "augment.cutmix=nan must be at least 0 and finite",
    "resnet augment=light augment.shift=0.6": "augment.shift=0.6 must be at least 0 and at most 0.5",
    "resnet augment=imagenet augment.min_area=0": "augment.min_area=0.0 must be above 0 and at most 1",
    "resnet augment=imagenet augment.eval_crop=2": "augment.eval_crop=2.0 must be above 0 and at most 1",
    "resnet augment=randaugment augment.operations=0": "augment.operations=0 must be at least 1",
    "resnet augment=randaugment augment.magnitude=31": "augment.magnitude=31 must be at least 0 and at most 30",
    "gpt2 augment.mixup=0.2": "augment.mixup=0.2 has no effect: data=python_docs has no images",
    "bignet augment.mixup=0.2": "augment.mixup=0.2 has no effect: recipe=bignet does not mix images",
    "gpt2 augment=light": "augment=light has no effect: data=python_docs has no images",
    "gpt2 data=synthetic augment=light": "augment=light has no effect: this recipe reads no images",
    "resnet augment.mixup=0.4 micro_batch_size=3 batch_size=6": "micro_batch_size=3 must be a multiple of 2",
}


@pytest.mark.parametrize("command", ROWS)
def test_what_cannot_work_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(UserError, match=ROWS[command]):
        settle(compose(*f"recipe={command}".split()), CPU)
