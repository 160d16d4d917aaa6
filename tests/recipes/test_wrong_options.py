"""Options that cannot work: each is named in the error, with what can be set instead.

Those whose remedies are tried, too, are in tests/command_line/test_mistakes.py.
"""

from __future__ import annotations

import pytest

from tests.helpers import CPU, PROJECT, compose
from trainer.config.settle import plan_of, settle
from trainer.errors import UserError

ROWS = {
    # the last option is named, and these words
    "gpt2 recipe.attention=flash": "recipe.attention=flash is unknown (sdpa, eager)",
    "gpt2 recipe.context=long": "auto",
    "gpt2 recipe.chunked_loss=maybe": "true, false or auto",
    "gpt2 recipe.vocabulary_multiple=0": "at least 1",
    "gpt2 recipe.dropout=1": "below 1",
    "gpt2 recipe.gelu=exact": "recipe.gelu=exact is unknown (tanh, erf)",
    "gpt2 init_from=gpt2 recipe.gelu=erf": "has no effect: init_from",
    "llama recipe.layers=0": "at least 1",
    "llama recipe.heads=8 recipe.width=100": "use recipe.width=96",
    "bert recipe.context=15": "at least 16",
    "gpt2 recipe.lora.rank=2 recipe.lora.target=[]": "[c_attn]",
    "gpt2 recipe.lora.rank=2 recipe.lora.alpha=0": "above 0",
    "gpt2 recipe.lora.rank=2 recipe.lora.dropout=1": "below 1",
    "gpt2 recipe.lora.rank=-1": "at least 0",
    "bignet recipe.layers=0": "",
    "bignet recipe.loss_weight=0": "",
    "resnet recipe.arch=fasterrcnn_resnet50_fpn": "not a classifier",
    "resnet recipe.arch=resnet50d": "recipe.arch=timm/",
    "resnet recipe.arch=timm/resnet5O": "did you mean 'timm/resnet50'",
    "resnet recipe.image_size=0": "at least 1",
    "resnet recipe.mean=[0,0,0] recipe.std=[1,1,0]": "three numbers",
    "resnet recipe.label_smoothing=1": "below 1",
    "resnet recipe.class_weights=[1,2]": "10 classes",
    "resnet recipe.class_weights=equal": "balanced",
    "resnet recipe.criterion=focal": "recipe.criterion=focal is unknown (auto, cross_entropy, bce)",
    "resnet recipe.bce_threshold=0.2": "recipe.criterion=bce",
    "resnet init_from=none/w.pth": "no such file",
    "resnet recipe.arch=timm/test_vit init_from=r160_in1k": "timm/test_vit.r160_in1k",
    "resnet recipe.arch=timm/mixer_s32_224 init_from=DEFAULT": "mixer_s32_224",
    "t5 data=digits": "use data=python_docs",
    "resnet data=python_docs": "set data=digits",
    "bignet data.samples=1": "at least 8",
    "gpt2 data.valid_fraction=0.6": "at most 0.5",
    "gpt2 data.tokenizer=": "bpe, chars, bytes",
    "gpt2 data=text data.path=nowhere.txt": "no such file",
    "gpt2 data=text data.path=LICENSE data.encoding=latin-l": "utf-8, latin-1",
    "gpt2 data=text data.path=LICENSE data.tokenizer=docs": "has no tokenizer",
    "gpt2 data=hub data.name=./nowhere": "no such file",
    "gpt2 data=hub data.name=rows.jsonl": "no such file",
    "gpt2 data=hub data.name=./README.m": "set data.name=README.md",
    "gpt2 data=hub data.name=a/b/c": "no such file",
    "gpt2 data=hub data.name=docs data.rows=line": "data.rows=line is unknown (auto, lines, documents)",
    "resnet data=imagefolder": "missing required option: data.path",
    "resnet data=imagefolder data.path=docs data.labels=REDME.md": "no such file or folder; set data.labels=",
    "resnet data=imagefolder data.path=nowhere": "no such file or folder; if it was moved, set data.path=",
    "resnet data=imagefolder data.path=docs data.test=nowhere": "no such file or folder",
    "resnet data=imagefolder data.path=docs data.valid_fraction=1": "below 1",
    "resnet augment=none augment.mixup=-1": "at least 0",
    "resnet augment=light augment.cutmix=nan": "finite",
    "resnet augment=light augment.shift=0.6": "at most 0.5",
    "resnet augment=imagenet augment.min_area=0": "above 0",
    "resnet augment=imagenet augment.eval_crop=2": "at most 1",
    "resnet augment=randaugment augment.operations=0": "at least 1",
    "resnet augment=randaugment augment.magnitude=31": "at most 30",
    "bignet augment.mixup=0.2": "recipe=bignet",
    "gpt2 augment=light": "data=python_docs has no images",
    "gpt2 data=synthetic augment=light": "no images",
    "resnet augment.mixup=0.4 batch_size=6 micro_batch_size=3": "a multiple of 2",
}


@pytest.mark.parametrize("command", ROWS)
def test_what_cannot_work_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(UserError) as refused:
        settle(plan_of(compose(*f"recipe={command}".split()), CPU))
    assert command.split()[-1].partition("=")[0] in str(refused.value)
    assert ROWS[command] in str(refused.value)
