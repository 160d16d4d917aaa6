"""Perplexity of rows that are lines, as wikitext has them: that of their text, by a script that shares no code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command_line.conftest import _command
from tests.inference.conftest import SIZES, script

evaluate = script("inference.evaluate:evaluate")
CONTEXT = 16
MODEL = ("recipe=gpt2", "recipe.size=nano", f"recipe.context={CONTEXT}", "data.vocab_size=300", "steps=6", *SIZES[:1])
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
    encoded = tokenizer(text, add_special_tokens=False)
    ids, loss, count = torch.tensor(encoded["input_ids"]), 0.0, 0
    for start in range(0, len(ids) - CONTEXT, CONTEXT):
        window = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0].double()
        loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += CONTEXT
    return {
        "loss": loss / count,
        "perplexity": math.exp(loss / count),
        "bits_per_byte": loss / count / math.log(2) * len(ids) / len(text.encode()),
    }


@pytest.fixture
def runs(tmp_path: Path, commands_in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """rows/ (JSON lines), train.txt and valid.txt with the same text; the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    for part, rows in (("train", lines(0, 40)), ("validation", lines(40, 50))):
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
