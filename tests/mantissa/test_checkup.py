"""``python -m mantissa checkup`` on tiny models of some families, with weights as large as published ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mantissa.__main__ import main
from mantissa.commands.checkup import CAUSAL, load, topics
from tests.mantissa.families import FAMILIES, LAYER, USUAL, hf

SHAPE = ("--passes", "2", "--batch", "2", "--length", "16")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a row of a table, by the first one."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_overflows_in_fp16_is_named_and_cured_and_whether_bf16_is_clean(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = FAMILIES[name]
    family.save(tmp_path)
    attention = ["--attention", family.attention] if family.attention else []
    code = main(["checkup", str(tmp_path), *SHAPE, *attention])
    table = rows(capsys.readouterr().out.rpartition("precision")[2])
    assert code == (7 if family.fp16 else 0)
    islands = family.islands or family.fp16
    assert table["fp16"][:3] == (["FOUND", f"overflow: {family.fp16}", islands] if islands else ["HEALTHY", "-", "-"])
    assert table["bf16"][:2] == (["FOUND", f"error: {family.bf16}"] if family.bf16 else ["HEALTHY", "-"])
    if islands:
        assert re.match(r"[-+]\d", table["fp16"][3])


def test_an_overflow_in_the_second_pass_alone_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["llama"].save(tmp_path / "model", seed=1)
    check = ["checkup", str(tmp_path / "model"), *SHAPE, "--precision", "fp16"]
    assert main([*check, "--report", str(tmp_path / "pages")]) == 7
    assert (tmp_path / "pages" / "fp16" / "report.html").exists()
    assert main([*check, "--passes", "1"]) == 0
    assert f"overflow: {LAYER}.mlp" in capsys.readouterr().out


def test_a_tokenizer_beside_the_model_reads_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["bert"].save(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[MASK]"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=special)
    tokenizer.train_from_iterator(topics.values(), trainer)
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    )
    fast.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(topics.values())[:5000])
    assert main(["checkup", str(tmp_path), *SHAPE, "--precision", "bf16", "--text", str(text)]) == 0
    assert f"2 passes over 2 x 16: {text}" in capsys.readouterr().out
    assert main(["checkup", str(tmp_path), "--passes", "100", "--text", str(text)]) == 2
    assert "set smaller --length, --batch or --passes" in capsys.readouterr().err
    text.write_text("a short text")  # which is not taken for the lack of a tokenizer
    assert main(["checkup", str(tmp_path), *SHAPE, "--text", str(text)]) == 2
    assert "set smaller --length, --batch or --passes" in capsys.readouterr().err


def test_a_model_is_loaded_for_the_task_of_its_architecture(tmp_path: Path) -> None:
    hf.BertLMHeadModel(hf.BertConfig(**USUAL, is_decoder=True)).save_pretrained(tmp_path)  # BERT is most often masked
    assert load(str(tmp_path))[1] == CAUSAL


def test_a_model_without_a_head_in_bf16_is_loaded_in_fp32_as_what_its_type_can_be_trained_for(tmp_path: Path) -> None:
    hf.LlamaModel(FAMILIES["llama"].config()).bfloat16().save_pretrained(tmp_path)
    model, task = load(str(tmp_path))
    assert (type(model).__name__, task) == ("LlamaForCausalLM", CAUSAL)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "cannot be loaded: Error while deserializing header"),
        (lambda file: file.rename(file.with_name("tf_model.h5")), "wrote, with weights for torch"),
    ],
)
def test_why_a_folder_cannot_be_loaded_is_said(
    damage: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES["llama"].save(tmp_path)
    damage(tmp_path / "model.safetensors")
    assert main(["checkup", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}/model"], "/model: there is no such folder"),
        (["{file}"], "there is no such folder"),
        (["tests/nothing"], "tests/nothing: there is no such folder"),
        (["/nowhere/model"], "/nowhere/model: there is no such folder"),
        (["path/to/model"], "path/to/model: there is no such folder"),
        (["~/model"], "{home}/model: there is no such folder"),
        (["~nobody-here/model"], "~nobody-here/model: there is no such folder"),
        (["nobody/nothing"], "nobody/nothing cannot be loaded: We couldn't connect"),
        (["{empty}"], ": there is no config.json in this folder; give a folder that save_pretrained wrote"),
        (["{speech}"], "a model of type wav2vec2 is no language model"),
        (["{half}"], "WhisperForConditionalGeneration is no language model"),  # of which only a decoder would be loaded
        (["{empty}", "--precision", "fp16,quarter"], "--precision quarter is unknown; use some of fp32,"),
        (["{empty}", "--length", "1"], "--length must be 2 or more"),
        (["{empty}", "--text", "/nowhere/text"], "--text /nowhere/text: there is no such file"),
    ],
)
def test_a_mistake_is_a_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folders = {name: tmp_path / name for name in ("empty", "speech", "half")}
    folders["empty"].mkdir()
    folders["file"] = tmp_path / "model.gguf"
    folders["file"].touch()
    (tmp_path / "tests").mkdir()
    folders["home"] = tmp_path / "home"
    monkeypatch.setenv("HOME", str(folders["home"]))
    monkeypatch.chdir(tmp_path)
    hf.Wav2Vec2Config().save_pretrained(folders["speech"])
    hf.WhisperConfig(architectures=["WhisperForConditionalGeneration"]).save_pretrained(folders["half"])
    assert main(["checkup", *(argument.format(**folders) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert message.format(**folders) in said
    assert said.count("\n") == 1


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["checkup", "model"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
