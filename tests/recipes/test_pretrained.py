"""``init_from``: folders of transformers' own, written here by transformers, and the ``best/`` of runs."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.helpers import PROJECT, fit, trainer_of
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.files import read_json, write_json
from trainer.trainer import Trainer

WORDS = 90
BERTS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def words(folder: Path, special: dict[str, str], more: Sequence[str] = (), count: int = WORDS) -> dict[str, int]:
    """Write a tokenizer of so many words, in front of which its special tokens stand; return the ids."""
    names = [*special.values(), *more, *(f"w{index}" for index in range(count))]
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", **special).save_pretrained(folder)
    return {name: id for id, name in enumerate(names)}


@pytest.fixture(params=["gpt2", "llama", "llama-tied, bf16", "bert", "t5"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The recipe, and the folder of a tiny model."""
    write_model(request.param, tmp_path / "model")
    return request.param.partition("-")[0], tmp_path / "model"


def write_model(kind: str, path: Path) -> None:
    """Write a tiny model, in the shape of a published one, and its tokenizer; its kind is its recipe, or begins so."""
    torch.manual_seed(0)
    recipe = kind.partition("-")[0]
    if recipe == "gpt2":
        words(path, {"eos_token": "<|end|>"})
        config = GPT2Config(
            vocab_size=WORDS + 1,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=2,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).save_pretrained(path)
    elif recipe == "llama":
        words(path, {"eos_token": "<|end|>"})
        config = LlamaConfig(
            vocab_size=WORDS + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=32, tie_word_embeddings="tied" in kind,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, initializer_range=0.2,
        )  # fmt: skip
        saved = torch.bfloat16 if "bf16" in kind else torch.float32
        LlamaForCausalLM(config).to(saved).save_pretrained(path)
    elif recipe == "bert":
        ids = words(path, BERTS)
        config = BertConfig(
            vocab_size=len(ids), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=32, initializer_range=0.2,
        )  # fmt: skip
        BertForMaskedLM(config).save_pretrained(path)
    else:
        sentinels = [f"<extra_id_{number}>" for number in reversed(range(8))]  # as published: the first is the last id
        ids = words(path, {"pad_token": "<pad>", "eos_token": "</s>"}, sentinels)
        config = T5Config(
            vocab_size=len(ids) + 4, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        )  # fmt: skip
        T5ForConditionalGeneration(config).save_pretrained(path)


def options(recipe: str, path: Path, *more: str, words: int = WORDS) -> list[str]:
    text = path.parent / "text.txt"
    text.write_text(" ".join(f"w{(index * index) % words}" for index in range(3000)))
    data = ["data=text", f"data.path={text}", f"data.cache_dir={path.parent / 'cache'}", "device=cpu"]
    return [f"recipe={recipe}", f"init_from={path}", "recipe.context=32", "batch_size=4", "steps=3",
            "eval_samples=8", *data, *more]  # fmt: skip


def transformers_loss(recipe: str, path: Path, trainer: Trainer) -> float:
    """The loss that transformers' own model computes for the first eight samples, from the files alone."""
    batch = trainer.datasets.valid.batch([SampleId(index, None) for index in range(8)])
    with torch.no_grad():
        if recipe in ("gpt2", "llama"):
            tokens = batch["tokens"]
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            logits = model(tokens[:, :-1]).logits
            return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        if recipe == "t5":
            model = T5ForConditionalGeneration.from_pretrained(path).eval()
            return float(model(input_ids=batch["inputs"], labels=batch["labels"]).loss)
        model = BertForMaskedLM.from_pretrained(path).eval()
        labels = torch.full_like(batch["tokens"], -100).scatter_(1, batch["places"], batch["labels"])
        return float(model(input_ids=batch["tokens"], labels=labels).loss)


@torch.no_grad()
def own_loss(trainer: Trainer) -> float:
    """The trainer's loss of the same samples."""
    batch = trainer.datasets.valid.batch([SampleId(index, None) for index in range(8)])
    output = trainer.recipe.loss(trainer.model.eval(), batch)
    return float(output.loss_sum) / trainer.recipe.count_targets(batch)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_adapters_of_a_vocabulary_that_would_be_padded_open_on_their_base_model(folder: tuple[str, Path]) -> None:
    recipe, path = folder
    trainer = trainer_of(*options(recipe, path, "recipe.lora.rank=2"))
    trainer.recipe.export(trainer.model, trainer.datasets, path.parent / "best")
    kind = getattr(transformers, trainer.recipe.model_class)  # type: ignore[attr-defined]
    adapter = PeftModel.from_pretrained(kind.from_pretrained(path), str(path.parent / "best" / "adapter"))
    assert sum(".lora_" in name for name in adapter.state_dict()) == sum(
        ".lora_" in name for name in trainer.model.state_dict()
    )


def test_it_starts_with_the_loss_that_transformers_computes(folder: tuple[str, Path]) -> None:
    recipe, path = folder
    trainer = trainer_of(*options(recipe, path))
    assert all(module.training for module in trainer.model.modules())  # transformers opens models for evaluation
    expected = transformers_loss(recipe, path, trainer)
    assert own_loss(trainer) == pytest.approx(expected, rel=2e-5)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert trainer.config.optimizer.lr == pytest.approx(5e-5 if recipe == "bert" else 1e-4)
    assert "pretrained" in trainer.recipe.summary_fields(trainer.model, trainer.datasets)["size"]
    tokens = [tensor[0].tolist() for tensor in trainer.datasets.valid.batch([SampleId(0, None)]).values()]
    if recipe == "bert":  # [PAD] 0, [CLS] 1, [SEP] 2, [MASK] 3
        assert (tokens[0][0], tokens[0][-1], 3 in tokens[0]) == (1, 2, True)
    elif recipe == "t5":  # <pad> 0, </s> 1, <extra_id_7> 2, … <extra_id_0> 9
        assert [[id for id in ids if id < 10] for ids in tokens] == [[9, 8, 1], [9, 8, 1]]
    if recipe in ("gpt2", "llama"):
        assert trainer.model.network.config._attn_implementation == "sdpa_causal"
    eager = trainer_of(*options(recipe, path, "recipe.attention=eager"))
    assert getattr(eager.model, "network", eager.model).config._attn_implementation == "eager"
    assert own_loss(eager) == pytest.approx(expected, rel=2e-5)
    if recipe in ("gpt2", "llama"):
        unpadded = trainer_of(*options(recipe, path, "recipe.vocabulary_multiple=1"))
        assert own_loss(unpadded) == pytest.approx(expected, rel=2e-5)


def test_it_learns_and_its_export_is_another_such_folder(folder: tuple[str, Path], tmp_path: Path) -> None:
    recipe, path = folder
    trainer = trainer_of(*options(recipe, path, "precision=bf16", "optimizer.lr=3e-3"))
    first = trainer.evaluate()["loss"]
    fit(trainer)
    trainer.model.eval()
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
    again = trainer_of(*options(recipe, tmp_path / "best", f"data.path={path.parent / 'text.txt'}"))
    assert again.datasets.vocabulary == trainer.datasets.vocabulary
    assert again.evaluate()["loss"] < first
    assert own_loss(again) == pytest.approx(transformers_loss(recipe, tmp_path / "best", again), rel=2e-5)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_what_contradicts_the_folder_is_named(folder: tuple[str, Path]) -> None:
    recipe, path = folder
    for option in ("recipe.size=nano", "data.tokenizer=chars", "data.vocab_size=512", "recipe.layers=3"):
        with pytest.raises(UserError, match=rf"{option.partition('=')[0]}.* has no effect: init_from"):
            trainer_of(*options(recipe, path, option))
    with pytest.raises(UserError, match=r"recipe.context=64 is longer .*=32"):
        trainer_of(*options(recipe, path, "recipe.context=64"))
    with pytest.raises(UserError, match="set recipe=llama"):
        trainer_of(*options("t5", path))


def test_a_checkpoint_of_nanogpt_becomes_a_folder_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (PROJECT / "docs" / "finetune.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n.*?ckpt.pt.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    words(tmp_path / "gpt2", {"eos_token": "<|end|>"})
    sizes = {"vocab_size": WORDS + 1, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(n_positions=32, activation_function="gelu", initializer_range=0.2, **sizes)
    gpt2 = GPT2LMHeadModel(config).eval()
    state = {name: each for name, each in gpt2.state_dict().items() if not name.endswith(".bias")}
    gpt2.load_state_dict({name: torch.zeros_like(each) for name, each in gpt2.state_dict().items()} | state)
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # nanoGPT has nn.Linear, transformers Conv1D
    model = {f"_orig_mod.{name}": each.T if name.endswith(linear) else each for name, each in state.items()}
    model["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # its mask, without a fused kernel
    arguments = sizes | {"block_size": 32, "bias": False, "dropout": 0.0}
    torch.save({"model": model, "model_args": arguments, "iter_num": 9, "config": {"dataset": "x"}}, "ckpt.pt")
    exec(code, {})
    made = AutoModelForCausalLM.from_pretrained("nanogpt", dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(made(tokens).logits, gpt2(tokens).logits)
    trainer = trainer_of(*options("gpt2", tmp_path / "nanogpt"))
    assert own_loss(trainer) == pytest.approx(transformers_loss("gpt2", tmp_path / "nanogpt", trainer), rel=2e-5)
    with pytest.raises(UserError, match=r"ckpt.pt .*config.json; load it into transformers"):
        trainer_of(*options("gpt2", tmp_path / "ckpt.pt"), "data.tokenizer=bytes")


def test_the_newest_of_the_models_in_a_folder_is_named(tmp_path: Path) -> None:
    for number in (2, 10, 9):
        write_model("gpt2", tmp_path / f"out/checkpoint-{number}")
    with pytest.raises(UserError, match=rf"set init_from={tmp_path}/out/checkpoint-10$"):
        trainer_of(*options("gpt2", tmp_path / "out"))
    trainer_of(*options("gpt2", tmp_path / "out/checkpoint-10"))


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("config.json", "is a link to nothing"),
        ("tokenizer.json", "cannot be read as JSON"),
        ("model.safetensors", "cannot be read as safetensors or torch's"),
    ],
)
def test_a_file_that_was_not_copied_is_named(file: str, what: str, folder: tuple[str, Path]) -> None:
    recipe, path = folder
    (path / file).unlink()
    if "link" in what:
        (path / file).symlink_to("../../blobs/ab")
    else:  # a pointer of Git LFS
        (path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n")
    with pytest.raises(UserError, match=f"^init_from={path}: {file} {what}"):
        trainer_of(*options(recipe, path))


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
@pytest.mark.parametrize("known", [WORDS + 5, WORDS - 10])
def test_token_ids_of_model_and_tokenizer_may_differ(known: int, folder: tuple[str, Path], tmp_path: Path) -> None:
    """Ids that only the tokenizer has start as the average one; those that only the model has stay in the softmax."""
    recipe, path = folder
    gpt2 = GPT2LMHeadModel.from_pretrained(path)
    with torch.no_grad():  # logits near -36, as of the published model: those of random rows would lie near 0
        gpt2.transformer.ln_f.weight[0], gpt2.transformer.ln_f.bias[0] = 0, 72
        gpt2.transformer.wte.weight[:, 0] = -0.5
    gpt2.save_pretrained(path)
    words(path, {"eos_token": "<|end|>"}, count=known)
    trainer = trainer_of(*options(recipe, path, words=min(known, WORDS)))
    vocabulary = max(known, WORDS) + 1
    assert trainer.datasets.vocabulary == trainer.model.gpt2.lm_head.vocabulary == vocabulary
    assert (", 5 of the tokenizer's tokens are new to the model" in trainer.datasets.description) is (known > WORDS)
    rows = trainer.model.gpt2.transformer.wte.weight
    assert torch.allclose(rows[WORDS + 1 : vocabulary], rows[: WORDS + 1].mean(0).expand(vocabulary - WORDS - 1, -1))
    assert own_loss(trainer) < 2 * math.log(WORDS)
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
    assert trainer_of(*options(recipe, tmp_path / "best")).model.gpt2.lm_head.vocabulary == vocabulary


def edited(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return edit


def configured(**more: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        write_json(path / "config.json", read_json(path / "config.json") | more)

    return edit


def sharded(path: Path) -> None:
    GPT2LMHeadModel.from_pretrained(path).save_pretrained(path, max_shard_size="40KB")
    (path / "model.safetensors").unlink()
    (shard, *_) = sorted(path.glob("model-*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)


def of_own_code(path: Path) -> None:
    configured(model_type="own", auto_map={"AutoConfig": "own.Own"})(path)
    (path / "own.py").write_text(f"open({str(path / 'it-ran')!r}, 'w')")


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer": (
        edited(lambda state: {name: each for name, each in state.items() if ".h.1." not in name}),
        r"12 of 29 tensors are missing \(transformer.h.1.attn.c_attn.bias, ",
    ),
    "the embedding": (
        edited(lambda state: {name: each for name, each in state.items() if "wte" not in name}),
        r"tensors are missing \(lm_head.weight, transformer.wte.weight\)",
    ),
    "other depth": (configured(n_layer=3), r"12 of 41 tensors are missing"),
    "fewer blocks": (configured(n_layer=1), r"11 tensors \(.*\) of blocks beyond those that config.json describes"),
    "head of its own": (
        edited(lambda state: state | {"lm_head.weight": 2 * state["transformer.wte.weight"]}),
        "the head has weights of its own",
    ),
    "fp8": (
        edited(lambda state: {name: each.to(torch.float8_e4m3fn) for name, each in state.items()}),
        r"15 tensors \(.*of torch.float8_e4m3fn",
    ),
    "other vocabulary": (configured(vocab_size=120), r"transformer.wte.weight is 91 × 32, not 120 × 32"),
    "NaN": (
        edited(lambda state: {name: each.log() if "wpe" in name else each for name, each in state.items()}),
        r"1 tensor \(transformer.wpe.weight\) with NaN or infinities",
    ),
    "of TensorFlow": (
        lambda path: (path / "model.safetensors").rename(path / "tf_model.h5"),
        "give a folder that save_pretrained wrote, with weights for torch",
    ),
    "cut shard": (sharded, "model-00001-of-00004.safetensors cannot be read"),
    "mark of Windows": (
        lambda path: (path / "config.json").write_text((path / "config.json").read_text(), encoding="utf-8-sig"),
        r"config.json cannot be read as JSON \(Unexpected UTF-8 BOM .*; save it as plain UTF-8",
    ),
    "own code": (of_own_code, "it brings code of its own, which is not run"),
    "no tokenizer": (
        lambda path: [file.unlink() for file in path.glob("tokenizer*")],
        r"has no tokenizer that opens \(.*[^: ]\)",
    ),
    "quantized": (configured(quantization_config={"quant_method": "gptq", "bits": 4}), r"are quantized \(gptq\)"),
    "adapters": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        "it has no config.json.*merge adapters of peft",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_folder_that_is_not_whole_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to transformers' question whether to run its code
    write_model("gpt2", tmp_path / "model")
    damage, message = DAMAGED[name]
    damage(tmp_path / "model")
    with pytest.raises(UserError, match=f"^init_from={tmp_path / 'model'}.*{message}"):
        trainer_of(*options("gpt2", tmp_path / "model"))
    assert not (tmp_path / "model" / "it-ran").exists()


def test_a_body_without_a_head_gets_one_and_what_is_left_out_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mantissa"), "propagate", True)  # a terminal of an earlier test took it
    write_model("bert", tmp_path / "model")
    BertModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    caplog.clear()
    trainer_of(*options("bert", tmp_path / "model"))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = list(dict.fromkeys(line for line in warned if line.startswith("init_from=")))  # two handlers may take one
    assert [line.partition(": ")[2][:28] for line in said] == [
        "left out, as this model has ",
        "the head is new, 6 tensors (",
    ]
    assert "pooler.dense.bias" in said[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_an_adapter_finds_its_base_model_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # else peft asks the hub for a tokenizer beside the adapter
    write_model("gpt2", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(*options("gpt2", Path("model"), "recipe.lora.rank=2"))
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
    monkeypatch.chdir(tmp_path / "best")
    AutoPeftModelForCausalLM.from_pretrained("adapter")
