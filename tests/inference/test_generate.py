"""Generated text: what plain transformers gives for the exported folder, seeds, and mistakes."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5ForConditionalGeneration

from recipes.huggingface import generated
from tests.command_line.conftest import _command
from tests.inference.conftest import JOBS, SIZES, script

generate = script("inference.generate:generate")


@pytest.mark.parametrize("name", ["gpt2", "chars", "windows"])
@pytest.mark.parametrize("prompt", ["The fox", 3 * "The quick brown fox jumps over the lazy dog. "])
def test_greedy_text_is_of_the_last_tokens_that_the_context_has_room_for(
    name: str, prompt: str, here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nanoGPT crops them, in the prompt, too, of which transformers does not warn; computed without a cache."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    given = (f"run=outputs/{name}", f"prompt={prompt}", "temperature=0", "max_new_tokens=20", "precision=fp32")
    done = generate(*given)
    assert done.code == 0, done.err
    assert not caplog.records
    best = f"outputs/{name}/best"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    length, context = ids.shape[1], model.config.max_position_embeddings
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, model(ids[:, -context:]).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert ids.shape[1] > context
    assert done.out == prompt + tokenizer.decode(ids[0, length:]) + "\n"
    assert re.fullmatch(r"[\d.]+ tokens/s \(20 in [\d.]+ s\)\n", done.err)


def test_the_same_seed_gives_the_same_texts(here: Path) -> None:
    def texts(*options: str) -> str:
        return generate("run=outputs/gpt2/best", "prompt=The ", "max_new_tokens=12", *options).out

    three = [texts("n=3", "top_k=1000", f"seed={seed}") for seed in (0, 0, 1)]
    assert three[0] == three[1] != three[2]
    parts = re.split(r"--- \d of 3\n", three[0])[1:]
    assert len(set(parts)) == 3
    assert all(part.startswith("The ") for part in parts)
    assert texts("top_k=1000") == parts[0]
    assert texts("top_k=1", "n=2", "seed=7").count("The ") == 2


def test_t5_fills_gaps_and_its_sentinels_are_shown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained("outputs/t5/best")
    answer = tokenizer.convert_tokens_to_ids(["<extra_id_0>", "fox", "</s>"])
    answer[1] = tokenizer("fox")["input_ids"][0]
    steps = iter(answer)
    forward = T5ForConditionalGeneration.forward

    def given_answer(self: Any, **given: Any) -> Any:
        output = forward(self, **given)
        output.logits[:, -1] = -100.0
        output.logits[:, -1, next(steps)] = 100.0
        return output

    monkeypatch.setattr(T5ForConditionalGeneration, "forward", given_answer)
    done = generate("run=outputs/t5", "prompt=The <extra_id_0> jumps", "max_new_tokens=9")
    assert done.code == 0, done.err
    assert done.out == "<extra_id_0>" + tokenizer.decode(answer[1]) + "\n"
    assert "warning" not in done.err
    steps = iter(answer)
    assert "the prompt has no gap to fill" in generate("run=outputs/t5", "prompt=The fox", "max_new_tokens=9").err


def test_it_computes_in_the_precision_that_is_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = torch.nn.Embedding.forward

    def watched(self: Any, input: Any) -> Any:
        found = forward(self, input)
        seen.append((found.dtype, torch.is_autocast_enabled("cpu")))
        return found

    monkeypatch.setattr(torch.nn.Embedding, "forward", watched)
    for precision, expected in (
        ("bf16_pure", (torch.bfloat16, False)),
        ("fp32", (torch.float32, False)),
        ("nvfp4", (torch.float32, True)),
        (None, (torch.float32, True)),  # the run's own: bf16 by autocast
    ):
        seen.clear()
        own = [] if precision is None else [f"precision={precision}"]
        done = generate("run=outputs/gpt2", "prompt=The", "max_new_tokens=2", *own)
        assert done.code == 0, done.err
        assert set(seen) == {expected}


def test_a_row_that_the_tokenizer_lacks_is_never_drawn(here: Path, tmp_path: Path) -> None:
    """As of models whose tables are padded beyond their tokenizer."""
    folder = shutil.copytree(here / "outputs/gpt2/best", tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(folder)
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 64, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[known:] = 9 * model.get_output_embeddings().weight[:1]
    model.save_pretrained(folder)
    given = ("prompt=The fox", "temperature=0", "max_new_tokens=9", "precision=fp32")
    assert generate(f"run={folder}", *given).out == generate("run=outputs/gpt2", *given).out


def test_what_ends_a_text_is_not_printed(here: Path, tmp_path: Path) -> None:
    shutil.copytree("outputs/gpt2/best", tmp_path / "best")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "best")
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    ids = best.generate(**tokenizer("The fox", return_tensors="pt"), max_new_tokens=3, do_sample=False)[0, -3:]
    config = json.loads((tmp_path / "best/generation_config.json").read_text())
    (tmp_path / "best/generation_config.json").write_text(json.dumps(config | {"eos_token_id": int(ids[0])}))
    done = generate(f"run={tmp_path}/best", "prompt=The fox", "temperature=0")
    assert done.code == 0, done.err
    assert "tokens/s (1 in" in done.err


def test_a_chat_gets_the_answer_to_the_prompt_by_the_tokenizers_template(here: Path, tmp_path: Path) -> None:
    """It is what follows the rendered message; the plain folder tells which recipe reads it."""
    chat = ("prompt=The fox", "chat=true", "temperature=0", "max_new_tokens=5", "precision=fp32")
    refused = generate("run=outputs/windows", *chat)
    assert refused.code == 2
    assert "chat=true: the tokenizer of run=outputs/windows has no chat template; set chat=false" in refused.err
    folder = shutil.copytree("outputs/windows/best", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    tokenizer.save_pretrained(folder)
    answer = generate(f"run={folder}", *chat)
    assert answer.code == 0, answer.err
    continued = generate(f"run={folder}", "prompt=Q: The fox\nA:", *chat[2:])
    assert f"Q: The fox\nA:{answer.out}" == continued.out


def test_a_prompt_begins_as_the_texts_of_training_did(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had no token before them, though the tokenizer adds one; the model of a folder alone may want it."""
    run = shutil.copytree("outputs/gpt2", tmp_path / "run")
    tokenizer = json.loads((run / "best/tokenizer.json").read_text())
    begin = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {begin["id"]: begin},
    }
    (run / "best/tokenizer.json").write_text(json.dumps(tokenizer))
    seen = []

    def watched(network: Any, ids: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return generated(network, ids, *given, **options)

    monkeypatch.setattr("inference.generate.generated", watched)
    for folder in (run, shutil.copytree(run / "best", tmp_path / "alone")):
        done = generate(f"run={folder}", "prompt=The fox", "max_new_tokens=1")
        assert done.code == 0, done.err
    assert seen[1] == [0, *seen[0]]


OWN = '''"""A Recipe of one's own."""
from dataclasses import dataclass
from typing import ClassVar

from recipes.causal_lm import CausalLM


@dataclass
class Mine(CausalLM):
    name: ClassVar[str] = "mine"
'''


def test_a_recipe_of_ones_own_that_continues_texts_generates(here: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.py").write_text(OWN)
    small = JOBS["windows"][1:]
    own = ("recipe=mine", f"recipe_path={tmp_path / 'mine'}", f"output_dir={tmp_path}", "run_name=run", "steps=2")
    trained = _command(*own, *small, *SIZES, "data=text", "data.path=text.txt")
    assert trained.code == 0, trained.err
    done = generate(f"run={tmp_path}/run", "prompt=The fox", "max_new_tokens=2")
    assert done.code == 0, done.err
    assert done.out.startswith("The fox")


@pytest.mark.parametrize("temperature", [0, 1])
def test_outputs_that_are_not_finite_end_it(temperature: int, here: Path, tmp_path: Path) -> None:
    shutil.copytree("outputs/gpt2/best", tmp_path / "best")
    weights = load_file(tmp_path / "best/model.safetensors")
    weights["transformer.wte.weight"].mul_(1e38)  # finite, and what is computed with them is not
    save_file(weights, tmp_path / "best/model.safetensors", {"format": "pt"})
    done = generate(f"run={tmp_path}/best", "prompt=The fox", f"temperature={temperature}")
    assert done.code == 1, done.out
    assert "the model's outputs are not finite; generate with precision=fp32, or from earlier weights" in done.err
