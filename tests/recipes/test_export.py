"""``best/`` is opened by a process that knows nothing of this project, and gives there what it gives here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from recipes.data.images.arrays import Digits
from recipes.data.synthetic import Synthetic
from recipes.data.text.pretrained import Pretrained
from recipes.data.text.tokenizers import BytePairs, Bytes, Characters, Tokenizer
from recipes.resnet import ResNet
from tests.helpers import PROJECT, trainer_of
from trainer.data.contract import SampleId

TEXT = "The quick (brown) fox — naïve, “quoted” 😀 e\u0301.\r\n\tIt's 5 o'clock ;  isn't it ?\n\n"
STRANGE = "\x00 <|endoftext|> [UNK] \u2028 日本 \ufffd"
SMALL = ("batch_size=2", "steps=2", "eval_samples=2", "recipe.context=64")
TOKENIZERS: dict[str, Tokenizer] = {
    "chars": Characters.train([TEXT, STRANGE]),
    "bytes": Bytes(),
    "bpe": BytePairs.train([TEXT * 20], 300),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_opens_elsewhere_with_the_same_ids_and_decodes_exactly(name: str, tmp_path: Path) -> None:
    ours = TOKENIZERS[name]
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size
    for text in (TEXT, STRANGE, TEXT + STRANGE, " . , ? n't", "\r\n", "\n", ""):
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert set(theirs(TEXT)) == {"input_ids", "attention_mask"}  # token_type_ids would be looked up as tokens


def test_text_that_has_no_ids_is_an_error_elsewhere_too(tmp_path: Path) -> None:
    for name, tokenizer in {
        "chars": Characters.train(["abc"]),
        "numbers": Synthetic(vocab_size=7).tokens(None).tokenizer,
    }.items():
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
        with pytest.raises(Exception, match=r"WordLevel error: Missing \[UNK\] token"):
            AutoTokenizer.from_pretrained(tmp_path / name)("<9>")


OUTSIDE = """
import importlib.util, json, re, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

sys.path[:] = [each for each in sys.path if not Path(each, "trainer").is_dir()]
assert not any(importlib.util.find_spec(name) for name in ("trainer", "recipes"))
root = Path(sys.argv[1])
request = json.loads((root / "request.json").read_text())
found = {}

def follow(block, best):
    names = {}
    exec(re.sub('best = .*', f"best = {str(best)!r}", block), names)
    return names

for name, text in request["texts"].items():
    got = follow(request["language"].replace("def ", text), root / name)
    model, tokenizer = got["model"], got["tokenizer"]
    expected = load_file(root / name / "expected")
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    found[name] = {
        "same": torch.allclose(logits, expected["logits"], atol=1e-5),
        "vocabulary": [model.config.vocab_size, logits.shape[-1], len(tokenizer)],
        "eos": [model.config.eos_token_id, tokenizer.eos_token_id],
        "ids": tokenizer(text)["input_ids"],
        "longest": [tokenizer.model_max_length, model.config.max_position_embeddings],
    }
model = AutoModelForMaskedLM.from_pretrained(root / "bert")
tokenizer, config = AutoTokenizer.from_pretrained(root / "bert"), model.config
batch = tokenizer("fox", "quick", return_tensors="pt", return_token_type_ids=True)
found["bert"] = {
    "tokenizer": [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id],
    "sizes": [len(tokenizer), config.vocab_size],
    "ids": batch["input_ids"][0].tolist(),
    "segments": batch["token_type_ids"][0].tolist(),
    "scores": list(model(**batch).logits.shape[:2]),
}
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(root / "t5"), AutoTokenizer.from_pretrained(root / "t5")
batch = tokenizer("The <extra_id_0>", return_tensors="pt")
found["t5"] = {
    "tokenizer": [tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)],
    "config": [model.config.decoder_start_token_id, model.config.eos_token_id, model.config.vocab_size],
    "ids": batch["input_ids"][0].tolist(),
    "written": len(model.generate(**batch, max_new_tokens=3)),
}
got = follow(request["images"], root / "resnet")
expected = load_file(root / "resnet" / "expected")
mean, std = (torch.tensor(got["config"][name]).view(3, 1, 1) for name in ("mean", "std"))
with torch.no_grad():
    logits = got["model"].eval()((expected["image"].float() / 255 - mean) / std)
found["resnet"] = torch.allclose(logits, expected["logits"], atol=1e-4)
print(json.dumps(found))
"""


def export(folder: Path, *overrides: str) -> Any:
    trainer = trainer_of(*overrides)
    trainer.model.eval()
    trainer.recipe.export(trainer.model, trainer.datasets, folder)
    return trainer


def page_block(words: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (PROJECT / "docs/finetune.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if words in block]
    return str(block)


def in_another_process(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what models of every kind were here, and what they are in a process without this project."""
    (root / "text.txt").write_text((TEXT + STRANGE[1:]) * 40, encoding="utf-8")
    text = ("data=text", f"data.path={root / 'text.txt'}", f"data.cache_dir={root / 'cache'}", "data.vocab_size=300")
    jobs = {"chars": ("recipe=gpt2", "recipe.size=nano", *SMALL, *text, "data.tokenizer=chars")}
    jobs["llama"] = ("recipe=llama", "recipe.layers=1", "precision=bf16_pure", *SMALL, *text, "data.tokenizer=bpe")
    jobs["llama"] += ("precision.kernels=native",)  # the other process knows no others
    here: dict[str, Any] = {}
    texts = dict.fromkeys(jobs, "The fox")
    for name, overrides in jobs.items():
        trainer = export(root / name, *overrides)
        tokenizer = trainer.datasets.tokens.tokenizer
        ids = torch.randint(tokenizer.vocab_size, (2, 16))
        with torch.no_grad():
            logits = trainer.model.network(ids).logits[..., : tokenizer.vocab_size]
        save_file({"ids": ids, "logits": logits.contiguous()}, root / name / "expected")
        here[name] = (tokenizer.vocab_size, tokenizer.encode(texts[name]))
    for name in ("bert", "t5"):
        here[name] = export(
            root / name, f"recipe={name}", *SMALL, *text, "recipe.context=16", "data.tokenizer=chars"
        ).datasets
    resnet = export(root / "resnet", "recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "batch_size=2")
    batch = resnet.datasets.valid.batch([SampleId(index, None) for index in range(3)])
    recorded: list[torch.Tensor] = []
    resnet.model.register_forward_hook(lambda model, inputs, output: recorded.append(output.detach()))
    resnet.recipe.loss(resnet.model, batch)
    save_file({"image": batch["image"], "logits": recorded[0]}, root / "resnet" / "expected")
    request = {"texts": texts, "language": page_block("AutoModelForCausalLM"), "images": page_block("torchvision")}
    (root / "request.json").write_text(json.dumps(request))
    done = subprocess.run([sys.executable, "-P", "-c", OUTSIDE, str(root)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return here, json.loads(done.stdout.splitlines()[-1])


def test_another_process_has_the_same_models_tokens_and_logits(tmp_path: Path) -> None:
    here, there = in_another_process(tmp_path)
    for name, end in (("chars", None), ("llama", 0)):  # the end of a document is the BPE's first token
        vocabulary, ids = here[name]
        about = {"vocabulary": [vocabulary] * 3, "eos": [end, end], "longest": [64, 64]}
        assert there[name] == {"same": True, "ids": ids} | about
    check_bert(here["bert"], there["bert"])
    check_t5(here["t5"], there["t5"])
    assert there["resnet"] is True


def check_bert(datasets: Any, found: dict[str, Any]) -> None:
    ids = datasets.tokens.tokenizer
    cls, sep, pad, mask = range(ids.vocab_size, ids.vocab_size + 4)
    assert found["tokenizer"] == [cls, sep, pad, mask]
    assert found["sizes"] == [mask + 1, mask + 1]
    assert found["ids"] == [cls, *ids.encode("fox"), sep, *ids.encode("quick"), sep]
    assert found["segments"] == [0] * 5 + [1] * 6
    assert found["scores"] == [1, 11]


def check_t5(datasets: Any, found: dict[str, Any]) -> None:
    ids = datasets.tokens.tokenizer
    start, eos, sentinel = range(ids.vocab_size, ids.vocab_size + 3)
    assert found["tokenizer"] == found["config"] == [start, eos, sentinel + datasets.train.spans]
    assert found["ids"] == [*ids.encode("The "), sentinel, eos]
    assert found["written"] == 1


@pytest.mark.parametrize("arch", ["googlenet", "vit_b_32"])
def test_the_description_is_enough_for_every_constructor(arch: str) -> None:
    import torchvision

    with torch.device("meta"):
        recipe = ResNet(arch=arch, image_size=224)
        datasets = recipe.datasets(Digits(), seed=0)
        model = recipe.build_model(datasets)
        config = json.loads(json.dumps(recipe.description(datasets)))
        other = torchvision.models.get_model(config["arch"], **config["arch_options"])
    assert [(name, tensor.shape) for name, tensor in other.state_dict().items()] == [
        (name, tensor.shape) for name, tensor in model.state_dict().items()
    ]
    assert config["classes"] == [str(digit) for digit in range(10)]
    assert (config["image_size"], config["arch_options"]["num_classes"]) == (224, 10)


def test_special_tokens_are_added_to_a_tokenizer_that_has_others_in_their_roles(tmp_path: Path) -> None:
    """A run's own BPE, opened for a run that starts from it, has the ids that its model was trained with."""
    special, template = {"cls_token": "[CLS]", "eos_token": "</s>"}, "{cls_token} $A {eos_token}|$A $B"
    ours = TOKENIZERS["bpe"]
    for name in ("plain", "more"):
        (tmp_path / name).mkdir()
    ours.save(tmp_path / "plain")
    more = Pretrained.open(str(tmp_path / "plain"), "data.tokenizer").with_special(special, template)
    assert more.vocab_size == ours.with_special(special, template).vocab_size == ours.vocab_size + 2
    more.save(tmp_path / "more")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "more")
    assert (theirs.cls_token_id, theirs.eos_token_id) == (ours.vocab_size, ours.vocab_size + 1)
    assert theirs("fox")["input_ids"] == [ours.vocab_size, *ours.encode("fox"), ours.vocab_size + 1]
    again = Pretrained.open(str(tmp_path / "more"), "data.tokenizer")
    assert again.with_special(special, template) is again
