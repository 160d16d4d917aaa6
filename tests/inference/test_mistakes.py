"""What evaluate.py, generate.py and predict.py answer to a mistake, and that what they say to do ends well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.command_line.conftest import Result
from tests.command_line.mistakes import Row, check, rows
from tests.inference.conftest import photo, script

TABLE = """
EVALUATE run=photos | - | the folder has no config.json, so it is no run and no exported model
EVALUATE run=halved | - | halved/config.json cannot be read (Unterminated string … ); restore it
EVALUATE run=empty | - | has no whole model in empty/best: it has no checkpoint either
EVALUATE run=unsaved | - | it was trained with checkpoint=none, which keeps none
EVALUATE run=foreign | - | config.json is of a model of type mamba, which is not read here
EVALUATE run=resnet | - | config.json is of ResNetForImageClassification, which is not read here
generate prompt=a max_new_tokens=4 run=bare | - | run=bare has no tokenizer that opens (there is none, or
EVALUATE run=bare data=text data.path=text.txt | - | run=bare has no tokenizer that opens
generate max_new_tokens=4 run=small | prompt=fox | the model of run=small knows 90; give it the tokenizer
EVALUATE run=mlflow:a/b | - | is not a valid run; use run=mlflow:RUN_ID
EVALUATE run=outputs/gpt2/best/model.safetensors | - | this is a file; give a run folder, such as outputs/gpt2
EVALUATE run=outputs/chars/best/model.safetensors | - | this is a file; give a run folder, such as outputs/chars
EVALUATE GPT2 | recipe=llama | recipe has no effect: run=outputs/gpt2 is a gpt2; leave it out
EVALUATE GPT2 | optimizer.lr=1 | has no effect: the model is trained
EVALUATE GPT2 | preciison=bf16 | preciison is not an option
EVALUATE GPT2 | data=digits | recipe=gpt2 cannot read data=digits
EVALUATE GPT2 | recipe.context=17 | is longer than the pretrained model's 16; set recipe.context=16
EVALUATE data=text data.path=text.txt run=outputs/bert/best | recipe.context=513 | set recipe.context=512
EVALUATE GPT2 | split=test | (data.test=… names one)
EVALUATE GPT2 | micro_batch_size=4,8 | has several values; only those of precision=
EVALUATE GPT2 | precision=fp32,bf16 | 8 samples cannot fill the 20 batches of an interval; set eval_samples=20
EVALUATE GPT2 data=text data.path=other.txt | data.tokenizer=chars | data.tokenizer has no effect
EVALUATE GPT2 | output=text.txt/here | cannot be written
EVALUATE run=outputs/chars | data=text data.path=greek.txt | characters of the training text: 'γλοςό' (5 in all)
EVALUATE PHOTOS | data=digits | the class '0', which the model was not trained on
EVALUATE PHOTOS | recipe.mean=[0,0,0] | recipe.mean has no effect: run=outputs/images normalises
EVALUATE PHOTOS | path=photos | -
EVALUATE PHOTOS | split=test | there is none in imagefolder (training photos,
generate prompt=λ run=outputs/chars | - | 'λ' (1 in all) … or train a new model, without init_from
generate prompt=a GPT2 max_new_tokens=4 | temperature=-1 | must be at least 0 and finite
generate prompt=a GPT2 max_new_tokens=4 | seed=99999999999999999999999 | must lie between 0 and 4294967295
generate prompt=a GPT2 max_new_tokens=4 | top_p=0 | must be above 0 and at most 1
generate prompt=a GPT2 max_new_tokens=4 | data=text | has no effect: the model is trained
generate prompt=a GPT2 max_new_tokens=4 | precision=bf61 | -
generate prompt=a run=outputs/bert | - | is a bert, which cannot generate text; give a run of causal_lm
generate prompt=a PHOTOS | - | is a resnet, which cannot generate text
EVALUATE outputs/images | run=outputs/gpt2 | run is typed twice, and takes one value; set run=outputs/gpt2
predict PHOTOS | path=https://example.org/a.png | an address is not opened; download what is there
predict PHOTOS | path=outputs/gpt2 | no images in this folder (looked for .jpg
predict PHOTOS | path=phone | passed over: 1 .heic)
predict PHOTOS | path=cut | path=cut: no photo can be read; give images such as .jpg or .png files
predict PHOTOS path=photos | output=text.txt/y.csv | output=text.txt/y.csv cannot be written
predict path=photos run=outputs/bert | - | is a bert, which does not classify images; give a run of recipe
"""
SCRIPTS = {name: script(f"inference.{name}:{name}") for name in ("evaluate", "generate", "predict")}


@pytest.fixture
def files(here: Path) -> None:
    """Runs that have not ended, a model of another program, and photos that cannot be read."""
    Path("greek.txt").write_text("λόγος\n" * 400)
    for name in ("foreign", "resnet", "empty", "unsaved", "phone", "halved"):
        Path(name).mkdir(exist_ok=True)
    Path("foreign/config.json").write_text('{"model_type": "mamba"}')
    Path("resnet/config.json").write_text('{"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}')
    Path("halved/config.json").write_text(Path("outputs/gpt2/config.json").read_text()[:300])
    known = json.loads(Path("outputs/gpt2/best/config.json").read_text())
    shutil.copytree("outputs/gpt2/best", "bare", ignore=shutil.ignore_patterns("tokenizer*"), dirs_exist_ok=True)
    shutil.copytree("outputs/gpt2/best", "small", dirs_exist_ok=True)
    Path("small/config.json").write_text(json.dumps(known | {"vocab_size": 90}))
    for name, config in (("empty", {}), ("unsaved", {"checkpoint.enabled": False})):
        of = json.loads(Path("outputs/gpt2/config.json").read_text())
        Path(name, "config.json").write_text(json.dumps(of | config))
    Path("phone/IMG_1.HEIC").touch()
    photo(Path("cut/half.png"), 10, np.random.default_rng(0))
    Path("cut/half.png").write_bytes(Path("cut/half.png").read_bytes()[:500])


NAMES = {"EVALUATE": "evaluate eval_samples=8", "GPT2": "run=outputs/gpt2", "PHOTOS": "run=outputs/images"}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("row", rows(TABLE, **NAMES))
def test_a_mistake_and_its_remedy(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str]) -> Result:
        return SCRIPTS[words[0]](*words[1:])

    check(row, run, monkeypatch)
