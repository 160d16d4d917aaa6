"""Perplexity of rows that are lines, as wikitext has them: that of their text, by a script that shares no code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.command_line.conftest import _command
from tests.inference.conftest import SIZES, script

evaluate = script("inference.evaluate:evaluate")
CONTEXT = 16
MODEL = ("recipe=gpt2", "recipe.size=nano", f"recipe.context={CONTEXT}", "data.vocab_size=400", "steps=6", *SIZES[:1])
REST = ("eval_samples=1000", "tracking=local", "schedule=constant", "optimizer.lr=0.01")


def lines(first: int, last: int) -> list[str]:
    """Rows as the hub's wikitext has them: titles, blank rows without anything, paragraphs that end with their line."""
    rows = []
    for number in range(first, last):
        rows += ["", f" = Fox {number} = \n", "", f" The {number * 7} quick brown foxes jump , naïve as ever . \n"]
        rows += [f" Lazy dogs @-@ some {number} – look on . \n", "", f" = = Section of {number} = = \n", ""]
    return rows


def bare(folder: Path, text: str) -> dict[str, float]:
    """The text as one sequence, cut into windows in which each token is predicted from those before it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, loss, count = torch.tensor(encoded["input_ids"]), 0.0, 0
    for start in range(0, len(ids) - CONTEXT, CONTEXT):
        window = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0].double()
        loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += CONTEXT
    predicted = text[encoded["offset_mapping"][0][1] : encoded["offset_mapping"][count][1]]
    return {
        "loss": loss / count,
        "perplexity": math.exp(loss / count),
        "bits_per_byte": loss / math.log(2) / len(predicted.encode()),
    }


@pytest.fixture
def runs(tmp_path: Path, commands_in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """rows/ (JSON lines), train.txt and valid.txt with the same text; the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    for part, rows in (("train", lines(0, 80)), ("validation", lines(80, 100))):
        (tmp_path / "rows" / f"{part}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
        (tmp_path / f"{part}.txt").write_text("".join(rows))
    return tmp_path


def measured(folder: Path, *arguments: str) -> dict[str, float]:
    done = evaluate(*arguments, f"output={folder / 'out'}")
    assert done.code == 0, done.err
    found: dict[str, float] = json.loads((folder / "out" / "evaluation.json").read_text())["metrics"]
    return found


@pytest.mark.parametrize("trained_on", ["rows", "text"])
def test_rows_that_are_lines_have_the_perplexity_of_their_text(trained_on: str, runs: Path) -> None:
    rows, text = ("data=hub", "data.name=rows"), ("data=text", "data.path=train.txt", "data.test=validation.txt")
    done = _command(*MODEL, *REST, *(rows if trained_on == "rows" else text), "run_name=run")
    assert done.code == 0, done.err
    summary = json.loads(Path("outputs/run/summary.json").read_text())
    content = Path("validation.txt").read_text()
    expected = bare(Path("outputs/run/best"), content)
    if trained_on == "rows":
        assert "rows are lines: joined" in done.out
        assert summary["final"]["valid/perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    else:
        assert summary["test"]["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    of_file = ("data=text", "data.path=validation.txt", "split=all")
    alone = ("run=outputs/run/best", f"recipe.context={CONTEXT}", *of_file)
    for arguments in (("run=outputs/run", *rows), ("run=outputs/run", *of_file), alone):
        assert measured(runs, *arguments) == pytest.approx(expected, rel=1e-6)
    assert measured(runs, "run=outputs/run", *text, "split=test") == pytest.approx(expected, rel=1e-6)


def byte_level() -> Tokenizer:
    """GPT-2's kind, with words added to its vocabulary that are not written as bytes, one of them with its spaces."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(lines(0, 9), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    made.add_tokens([AddedToken("naïve", normalized=False), AddedToken("look – on", lstrip=True, rstrip=True)])
    return made


def word_piece() -> Tokenizer:
    """BERT's kind, which loses case, accents and white space; here most words are unknown, too."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(["= the fox some of look"], trainers.WordPieceTrainer(special_tokens=["[UNK]"]))
    return made


def sentence_piece() -> Tokenizer:
    """T5's kind, which begins every text with a space and has one where there were several."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    made.train_from_iterator(lines(0, 9), trainers.UnigramTrainer(vocab_size=90, **special))
    return made


@pytest.mark.parametrize("made", [byte_level, word_piece, sentence_piece])
def test_bits_per_byte_count_the_text_whatever_the_tokenizer_loses(made: Callable[[], Tokenizer], runs: Path) -> None:
    tokenizer = made()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("model")
    vocabulary = tokenizer.get_vocab_size()
    shape = {"n_positions": CONTEXT, "n_embd": 8, "n_layer": 1, "n_head": 1}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **shape)).save_pretrained("model")
    content = Path("train.txt").read_text()
    found = measured(runs, "run=model", "data=text", "data.path=train.txt", "split=all", "eval_samples=10000")
    assert found == pytest.approx(bare(Path("model"), content), rel=2e-3)  # the last window is left out
