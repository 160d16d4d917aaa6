"""Chats: what is taken for one, the text that a template makes of it, and which tokens are targets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from inference.data import Joined
from recipes.bert import Bert
from recipes.data.hub import Hub
from recipes.data.text import chats
from recipes.data.text.pretrained import Pretrained
from recipes.data.text.samples import NO_TARGET, Padded, Part
from recipes.data.text.tokenizers import CHATML, Bytes, Tokenizer
from recipes.data.text.tokens import Samples, TokenData
from recipes.gpt2 import GPT2
from tests.command_line.conftest import _command
from tests.helpers import trainer_of
from tests.inference.conftest import script
from trainer.data.contract import SampleId
from trainer.errors import UserError

MARKED = """\
{%- for message in messages %}
    {{- "<|" + message.role + "|>" }}
    {%- if message.role == "assistant" %}{% generation %}{{ message.content + "<|end|>" }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""
UNMARKED = re.sub(r"{% (end)?generation %}", "", MARKED)
STRICT = """\
{%- if messages[0].role == "system" %}{{ raise_exception("no system role here") }}{% endif %}
{{- bos_token }}
{%- for message in messages %}{{ "[" + message.role + "]" + message.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}"""
"""It has no text without a message, and refuses a system's."""
FORGETFUL = """\
{%- for message in messages %}
    {{- "[" + message.role + "]" }}
    {%- if loop.last or message.role != "assistant" %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}"""
"""As templates that leave out what was thought in earlier turns."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[str | None], str]:
    """A folder of a tokenizer of bytes, with this chat template."""

    def write(template: str | None) -> str:
        folder = tmp_path / f"tokenizer{len(template or '')}"
        folder.mkdir(exist_ok=True)
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        own = Bytes().with_special(special, "{bos_token} $A | $A $B")
        own.chat_template = template
        own.save(folder)
        return str(folder)

    return write


def say(*turns: str) -> list[dict[str, str]]:
    """``say("u hi", "a ho")``: a user's and the assistant's message."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def opened(
    folder: Path, given: list[Any], file: str = "chats.jsonl", tokenizer: str = "bytes", **options: Any
) -> TokenData:
    (folder / file).write_text("\n".join(map(json.dumps, given)))
    return Hub(name=str(folder / file), tokenizer=tokenizer, **options).tokens(None)


def marked(data: TokenData, part: str = "train") -> list[str]:
    """The text of each sample of a part, what is a target in ‹ ›."""
    ids, (starts, targets), texts = getattr(data, part), data.samples[part], []
    for first, end in pairwise(starts):
        text, inside = "", False
        for id, is_target in zip(ids[first:end].tolist(), targets[first:end].tolist(), strict=True):
            text += "‹" * (is_target and not inside) + "›" * (inside and not is_target) + data.tokenizer.decode([id])
            inside = is_target
        texts.append(text + "›" * inside)
    return texts


EXACT = {
    # template (None: ours), train_on, messages, the text with its targets
    "one turn": (
        None,
        "assistant",
        say("u hi", "a ho"),
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n‹ho<|im_end|>\n›",
    ),
    "system, two turns": (
        None,
        "assistant",
        say("s be", "u a", "a b", "u c", "a d"),
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n‹b<|im_end|>\n›"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n‹d<|im_end|>\n›",
    ),
    "the assistant first": (
        None,
        "assistant",
        say("a ho", "u hi"),
        "<|im_start|>assistant\n‹ho<|im_end|>\n›<|im_start|>user\nhi<|im_end|>\n",
    ),
    "everything": (
        None,
        "all",
        say("u hi", "a ho"),
        "<|im_start|>‹user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n›",
    ),
    "marks": (
        MARKED,
        "assistant",
        say("u hi", "a ho", "u A", "a B"),
        "<|user|>hi<|assistant|>‹ho<|end|>›<|user|>A<|assistant|>‹B<|end|>›",
    ),
    "no marks": (
        UNMARKED,
        "assistant",
        say("u hi", "a ho", "u A", "a B"),
        "<|user|>hi<|assistant|>‹ho<|end|>›<|user|>A<|assistant|>‹B<|end|>›",
    ),
    "marks, the assistant first": (
        MARKED,
        "assistant",
        say("a ho", "a hm"),
        "<|assistant|>‹ho<|end|>›<|assistant|>‹hm<|end|>›",
    ),
    "no text without a message": (STRICT, "assistant", say("a ho", "u hi"), "<s>[assistant]‹ho</s>›[user]hi</s>"),
    "white space": (MARKED, "assistant", say("u \n", "a \n x "), "<|user|>\n<|assistant|>‹\n x <|end|>›"),
    "forgetful, the last turn": (FORGETFUL, "assistant", say("u hi", "a ho"), "[user]hi[assistant]‹ho›"),
}


@pytest.mark.parametrize("case", EXACT)
def test_the_targets_are_what_the_assistant_says(
    case: str, tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    template, train_on, messages, expected = EXACT[case]
    name = tokenizer(template) if template else "bytes"
    data = opened(tmp_path, [{"messages": messages}] * 2, tokenizer=name, train_on=train_on)
    assert marked(data) == marked(data, "valid") == [expected]


def test_a_character_of_several_tokens_is_a_target_with_all_of_them(
    tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    data = opened(tmp_path, [{"messages": say("u né", "a né")}] * 2, tokenizer=tokenizer(FORGETFUL))
    assert data.samples["train"].targets.tolist()[-4:] == [False, True, True, True]


def test_a_token_counts_by_what_it_overlaps() -> None:
    """Across a border; without a character; the first token, which nothing comes before."""
    places = np.array([[0, 3], [3, 5], [5, 5], [5, 9], [9, 9], [9, 12]])
    assert chats._targets(places, [(4, 9)]).tolist() == [False, True, True, True, False, False]
    assert chats._targets(places, [(0, 1), (11, 12)]).tolist() == [False] * 5 + [True]
    assert chats._targets(places, [(5, 6)]).tolist() == [False, False, True, True, False, False]


def test_a_tokenizer_that_trims_places_loses_no_white_space(tmp_path: Path) -> None:
    from tokenizers import processors

    backend = Bytes()._backend
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    ((ids, places),) = Tokenizer(backend, "").encode_with_places(["a \n b"])
    assert places.tolist() == [[n, n + 1] for n in range(5)]
    assert ids.tolist() == list(b"a \n b")


def test_turns_that_change_are_refused_and_everything_can_be_trained_on(
    tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    rows = [{"messages": say("u hi", "a ho")}] * 2 + [{"messages": say("u A", "a B", "u C", "a D")}] * 2
    with pytest.raises(UserError, match=r"split train, row [23]: .*changes earlier turns") as refused:
        opened(tmp_path, rows, tokenizer=tokenizer(FORGETFUL))
    assert refused.value.remedies == ("data.train_on=all",)
    data = opened(tmp_path, rows, tokenizer=tokenizer(FORGETFUL), train_on="all")
    assert "[‹user]A[assistant][user]C[assistant]D›" in marked(data) + marked(data, "valid")


def test_what_a_template_refuses_is_said_in_its_words(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    rows = [{"messages": say("u hi", "a ho")}, {"messages": say("s be", "u hi", "a ho")}]
    with pytest.raises(UserError, match=r"row 1: .*no system role here"):
        opened(tmp_path, rows, tokenizer=tokenizer(STRICT))
    with pytest.raises(UserError, match=r"row [01]: .*ChatML has no tools"):
        opened(tmp_path, [row | {"tools": [{"name": "add"}]} for row in rows])


TOOLS = """{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}{% endfor %}"""


def test_a_template_gets_tools_and_no_keys_that_a_row_does_not_have(
    tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    rows = [
        {"messages": [*say("u hi"), call], "tools": [{"name": "add"}]},
        {"messages": say("u hi", "a ho"), "tools": [{"name": "now", "about": "x"}]},
    ]
    data = opened(tmp_path, rows, tokenizer=tokenizer(TOOLS), train_on="all")
    given = ["".join(json.dumps(part) for part in (row["tools"], *row["messages"])) for row in rows]
    assert sorted(re.sub("[‹›]", "", text) for text in marked(data) + marked(data, "valid")) == sorted(given)


# --- which columns mean a chat

ANSWER = say("u hi", "a ho")
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "messages": ({"messages": ANSWER, "prompt": "hi", "text": "x"}, ANSWER),
    "ShareGPT": (
        {
            "id": 1,
            "conversations": [
                {"from": "system", "value": "be"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "ho"},
            ],
        },
        say("s be", "u hi", "a ho"),
    ),
    "conversations with roles": ({"conversations": ANSWER}, ANSWER),
    "JSON in a text": ({"messages": json.dumps(ANSWER)}, ANSWER),
    "prompt": ({"prompt": "hi", "completion": "ho"}, ANSWER),
    "prompt of messages": ({"prompt": say("s be", "u hi"), "completion": say("a ho")}, say("s be", "u hi", "a ho")),
    "instruction": ({"instruction": "hi", "output": "ho"}, ANSWER),
    "input": ({"instruction": "hi", "input": "you", "output": "ho", "text": "x"}, say("u hi\n\nyou", "a ho")),
    "no input": ({"instruction": "hi", "input": "", "output": "ho"}, ANSWER),
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_mean_a_chat(form: str, tmp_path: Path) -> None:
    row, messages = FORMS[form]
    data = opened(tmp_path, [row] * 2)
    assert marked(data) == marked(opened(tmp_path, [{"messages": messages}] * 2, "plain.jsonl"))
    used = [name for name in row if name not in ("id", "text", *["prompt"] * ("messages" in row))]
    assert re.search(rf"columns? {', '.join(sorted(used, key=list(row).index))}|columns? ", data.description)
    assert all(name in data.description for name in used)


BROKEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "an unknown role": (
        [{"messages": [*ANSWER, {"role": "narrator", "content": "x"}]}],
        {},
        "row 1, message 2 has the role 'narrator'; known are system",
    ),
    "no messages": ([{"messages": []}], {}, "row 1 has no messages"),
    "no content": (
        [{"messages": [*ANSWER, {"role": "user", "content": None}]}],
        {},
        "row 1, message 2 has role, and no content",
    ),
    "content in parts": (
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}],
        {},
        "message 0 has as content a list",
    ),
    "nested lists": ([{"messages": [ANSWER]}] * 2, {}, ", message 0 is a list"),
    "texts": ([{"messages": ["hi", "ho"]}] * 2, {}, "message 0 is a text"),
    "other keys": (
        [{"messages": [{"speaker": "user", "text": "hi"}]}] * 2,
        {},
        "has speaker, text; a message has role and content",
    ),
    "no JSON": ([{"messages": "hi"}] * 2, {}, "'hi', and no JSON"),
    "a number": ([{"prompt": "hi", "completion": 3}] * 2, {}, "completion is a number"),
    "pairs": (
        [{"prompt": "hi", "chosen": "ho", "rejected": "ha"}] * 2,
        {},
        "chosen and rejected, which are not trained on",
    ),
    "one column": (
        [{"prompt": "hi", "completion": "ho"}] * 2,
        {"text_column": "prompt"},
        "prompt is one column of chats",
    ),
    "one of three": (
        [{"instruction": "hi", "input": "", "output": "ho"}] * 2,
        {"text_column": "input"},
        "input is one column of chats",
    ),
    "nothing known": (
        [{"question": "hi", "answer": "ho"}] * 2,
        {},
        "question .string., answer .string.; a row has one text",
    ),
    "a list of nearly the name": ([{"mesages": ANSWER}] * 2, {}, "mesages .List"),
    "rows": ([{"messages": ANSWER}] * 2, {"rows": "documents"}, "data.rows=documents has no effect"),
    "text, all": ([{"text": "hi"}] * 2, {"train_on": "all"}, "data.train_on=all has no effect"),
    "text, packed": ([{"text": "hi"}] * 2, {"packing": True}, "data.packing=true has no effect"),
    "one row": ([], {}, "has one row, and training and validation need one each"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_chat_is_named(case: str, tmp_path: Path) -> None:
    rows, options, words = BROKEN[case]
    first = [] if len(rows) == 2 else [{"messages": ANSWER}]
    with pytest.raises(UserError, match=re.escape(words).replace(r"\.", ".")):
        opened(tmp_path, first + rows, **options)


def test_options_of_chats_have_no_effect_on_images(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": "x", "label": 1}))
    with pytest.raises(UserError, match=r"data.packing=true has no effect"):
        Hub(name=str(tmp_path / "a.jsonl"), packing=True).images(8)


def test_a_column_of_text_beside_a_chat_can_be_named(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"messages": ANSWER, "text": "A long tale."}] * 20, text_column="text")
    assert not data.samples
    assert "column text" in data.description


def test_a_csv_has_chats_whose_answers_are_texts(tmp_path: Path) -> None:
    """Also where all look like numbers, or a word for nothing; an empty one is no answer."""
    (tmp_path / "a.csv").write_text("instruction,output\n" + "one and one,1.50\n" * 9 + "two,\n")
    data = Hub(name=str(tmp_path / "a.csv"), tokenizer="bytes").tokens(None)
    texts = marked(data) + marked(data, "valid")
    assert sum("‹1.50<|im_end|>" in text for text in texts) == 9
    assert GPT2(context=64).sample_datasets(data).description.endswith("1 row without a target left out")


def test_recipes_of_running_text_refuse_chats(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": ANSWER})] * 2))
    with pytest.raises(UserError, match="recipe=bert trains on running text"):
        Bert(size="nano", context=32).datasets(Hub(name=str(tmp_path / "a.jsonl"), tokenizer="bytes"), 0)


# --- splits, the cache, and what is cut


def numbered(count: int) -> list[Any]:
    return [{"messages": say(f"u {number}?", f"a {number}!")} for number in range(count)]


def answers(data: TokenData, part: str) -> list[int]:
    return [int(re.findall(r"‹(\d+)!", text)[0]) for text in marked(data, part)]


def test_whole_rows_are_set_aside_and_every_row_is_somewhere(tmp_path: Path) -> None:
    data = opened(tmp_path, numbered(30))
    assert len(answers(data, "valid")) == 3
    assert sorted(answers(data, "train") + answers(data, "valid")) == list(range(30))
    whole = Hub(name=str(tmp_path / "chats.jsonl"), tokenizer="bytes", whole=True).tokens(None)
    assert whole.valid is whole.train
    assert answers(whole, "train") == answers(whole, "valid") == list(range(30))


def test_the_splits_of_a_dataset_are_used(tmp_path: Path) -> None:
    for name, rows in (("train", numbered(5)), ("validation", numbered(3)), ("test", numbered(4))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Hub(name=str(tmp_path), tokenizer="bytes", test="test").tokens(None)
    assert [len(answers(data, part)) for part in ("train", "valid", "test")] == [5, 3, 4]
    assert "the dataset's split validation" in data.description


def test_a_second_run_renders_nothing_and_another_choice_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Callable[[str | None], str]
) -> None:
    first = opened(tmp_path, numbered(9))
    other = tokenizer(MARKED)
    monkeypatch.setattr(chats.Template, "render", lambda *_: pytest.fail("rendered"))
    name = str(tmp_path / "chats.jsonl")
    again = Hub(name=name, tokenizer="bytes", packing=True).tokens(None)
    assert marked(again) == marked(first)
    for options in ({"train_on": "all"}, {"tokenizer": other}, {"valid_fraction": 0.3}):
        with pytest.raises(pytest.fail.Exception):
            Hub(**{"name": name, "tokenizer": "bytes", **options}).tokens(None)


def test_what_fails_half_way_leaves_nothing_that_looks_whole(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbered(9)
    monkeypatch.setattr(chats, "_AT_ONCE", 2)
    rows[5]["messages"][0]["role"] = "narrator"
    with pytest.raises(UserError, match="narrator"):
        opened(tmp_path, rows)
    assert not [path for path in (cache / "text").iterdir() if path.is_dir()]
    assert len(answers(opened(tmp_path, numbered(9), "more.jsonl"), "train")) == 8


def test_long_rows_are_cut_at_the_end_and_those_without_a_target_left_out(tmp_path: Path) -> None:
    rows = [
        *[{"messages": say("u hi", f"a {'ho' * 40}")}] * 6,  # 21 tokens come before the answer
        *[{"messages": say("u " + "hi" * 40, "a ho")}] * 2,
        *[{"messages": say("u hi")}] * 3,
        *numbered(5),
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Hub(name=str(tmp_path / "chats.jsonl"), tokenizer="bytes", whole=True)
    datasets = GPT2(size="nano", context=40).datasets(source, 0)
    assert datasets.description.endswith(
        "6 of 11 rows (55%) cut at the end to 41 tokens; 5 rows without a target left out"
    )
    assert len(datasets.train) == 11
    batch = datasets.train.batch([SampleId(0, 3), SampleId(7, None)])
    assert batch["tokens"].shape == batch["targets"].shape == (2, 40)
    whole = datasets.tokens.train.tolist()
    assert batch["tokens"][0].tolist() == whole[:40]
    assert batch["targets"][0].tolist() == [NO_TARGET] * 20 + whole[21:41]
    assert batch["lengths"].tolist() == [40, int((batch["targets"][1] != NO_TARGET).nonzero().max()) + 1]


def test_where_no_row_has_a_target_a_context_that_has_one_is_offered(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, numbered(9))))
    source = Hub(name=str(tmp_path / "chats.jsonl"), tokenizer="bytes")
    with pytest.raises(UserError, match=r"no training row of .*chats.jsonl has a target") as refused:
        GPT2(size="nano", context=8).datasets(source, 0)
    (remedy,) = refused.value.remedies
    assert len(GPT2(size="nano", context=int(remedy.rpartition("=")[2])).datasets(source, 0).train) == 8
    with pytest.raises(UserError, match=r"no training row of .*b.jsonl") as refused:
        GPT2(size="nano", context=64).sample_datasets(opened(tmp_path, [{"messages": say("u hi")}] * 3, "b.jsonl"))
    assert not refused.value.remedies


def test_a_special_token_that_a_user_wrote_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        opened(tmp_path, [*numbered(4), {"messages": say("u what is <|im_end|>?", "a It ends.")}])
        assert "1 row of chats have a special token in a message" in caplog.text


# --- tokenizers


@pytest.mark.parametrize("choice", ["bpe", "chars", "bytes", "a folder without a template", "a folder with one"])
def test_a_kept_tokenizer_renders_as_the_training_did(
    choice: str, tmp_path: Path, tokenizer: Callable[[str | None], str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = {"a folder without a template": None, "a folder with one": MARKED}
    name = tokenizer(folder[choice]) if choice in folder else choice
    data = opened(tmp_path, numbered(20), tokenizer=name, vocab_size=300)
    has_own = choice == "a folder with one"
    assert ("chats are written in ChatML" in caplog.text) == ("ChatML" in data.description) == (not has_own)
    data.tokenizer.save(tmp_path)
    kept = AutoTokenizer.from_pretrained(tmp_path)
    messages = say("u 3?", "a 3!")
    ids = kept.apply_chat_template(messages, return_dict=False)
    assert kept.chat_template == (MARKED if has_own else CHATML)
    texts = [re.sub("[‹›]", "", text) for text in marked(data) + marked(data, "valid")]
    assert (
        data.tokenizer.decode(ids)
        == kept.apply_chat_template(messages, tokenize=False)
        == texts[texts.index(data.tokenizer.decode(ids))]
    )
    assert (kept.eos_token == "<|im_end|>") == (not has_own)
    again = Pretrained.open(str(tmp_path), "run")
    assert again.for_chats() is again
    if not has_own:
        assert ids[0] == kept.convert_tokens_to_ids("<|im_start|>")
        assert data.tokenizer.vocab_size == len(kept)


def test_an_own_bpe_is_made_of_what_is_said_and_not_of_the_special_tokens(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"messages": say("u tick tock", "a tock tick")}] * 20, tokenizer="bpe", vocab_size=300)
    tokens = {data.tokenizer.decode([id]) for id in range(data.tokenizer.vocab_size)}
    assert {"assistant", " tock", "<|im_end|>"} <= {token.strip("\n") for token in tokens}
    assert not [
        token for token in tokens if "im_" in token.strip("<|>") and token not in ("<|im_start|>", "<|im_end|>")
    ]


def test_an_own_bpe_is_made_of_the_training_chats_alone(tmp_path: Path) -> None:
    for name, word in (("train", "tock"), ("validation", "zing")):
        rows = [{"messages": say(f"u {word} {word}", f"a {word} {word}")}] * 20
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Hub(name=str(tmp_path), tokenizer="bpe", vocab_size=300, cache_dir=str(tmp_path / "cache")).tokens(None)
    tokens = {data.tokenizer.decode([id]) for id in range(data.tokenizer.vocab_size)}
    assert " tock" in tokens
    assert not any("zi" in token for token in tokens)


def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    opened(tmp_path, numbered(9), tokenizer="chars").tokenizer.save(tmp_path)
    with pytest.raises(UserError, match=r"row 0 or one of the 200 from there on: .* cannot encode it"):
        opened(tmp_path, [{"messages": say("u é", "a é")}] * 3, "b.jsonl", tokenizer=str(tmp_path))


# --- from the command line

SMALL = (
    "recipe=gpt2",
    "data=hub",
    "data.name=chats.jsonl",
    "batch_size=4",
    "steps=3",
    "eval_every=3",
    "tracking=local",
)
NEW = (*SMALL, "recipe.size=nano", "recipe.context=48", "data.tokenizer=bytes")


@pytest.fixture
def here(tmp_path: Path, commands_in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": say(f"u {'hi ' * (number % 5)}{number}?", f"a {number}!")} for number in range(30)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_on_chats_is_trained_resumed_evaluated_and_opened(packing: bool, here: Path) -> None:
    done = _command(*NEW, f"data.packing={packing}", "run_name=a", "checkpoint.every=2")
    assert done.code == 0, done.err
    assert "column messages" in " ".join(done.out.split())
    assert "chat=true" in done.out
    best = AutoTokenizer.from_pretrained("outputs/a/best")
    text = best.apply_chat_template(say("u hi"), tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads(Path("outputs/a/best/generation_config.json").read_text())
    assert config["eos_token_id"] == best.convert_tokens_to_ids("<|im_end|>")
    resumed = _command("resume=outputs/a", "steps=5")
    assert resumed.code == 0, resumed.err
    evaluate = script("inference.evaluate:evaluate")
    trained = json.loads(Path("outputs/a/summary.json").read_text())["best"]
    for split, count in (("valid", 3), ("all", 30)):
        result = evaluate("run=outputs/a", f"split={split}")
        assert result.code == 0, result.err
        facts = json.loads(Path("outputs/a/evaluation/evaluation.json").read_text())
        assert packing or facts["samples"] == count
        if split == "valid":
            assert facts["metrics"]["loss"] == pytest.approx(trained["value"], rel=1e-5)
    other = evaluate("run=outputs/a", "data=hub", "data.name=chats.jsonl", "split=all")
    assert other.code == 0, other.err


def test_what_a_trained_model_is_shown_with_is_a_question(here: Path) -> None:
    assert trainer_of(*NEW, "data.vocab_size=300").datasets.first_words.endswith("?")


def test_parts_of_several_widths_are_evaluated_together() -> None:
    parts = [Padded(Part(np.arange(size), whole_of(size), 128), 128) for size in (5, 83)]
    batch = Joined(parts).batch([SampleId(0, None), SampleId(1, None)])
    assert batch["tokens"].shape == (2, 128)
    assert batch["tokens"][0].tolist() == [0, 1, 2, 3] + [0] * 124
    assert batch["targets"][0].tolist() == [1, 2, 3, 4] + [NO_TARGET] * 124
    assert batch["lengths"].tolist() == [4, 82]


def whole_of(size: int) -> Samples:
    return Samples(np.array([0, size]), np.ones(size, dtype=bool))


def test_a_run_on_text_goes_on_with_chats_and_that_one_with_others(here: Path) -> None:
    (here / "text.txt").write_text("Once upon a time.\n" * 200)
    text = ("recipe=gpt2", "recipe.size=nano", "recipe.context=48", "data=text", "data.path=text.txt")
    options = ("data.tokenizer=bytes", "batch_size=4", "steps=2", "eval_every=2", "tracking=local")
    assert _command(*text, *options, "run_name=text").code == 0
    for before, after in (("text", "chat"), ("chat", "more")):
        done = _command(*SMALL, f"init_from=outputs/{before}", f"run_name={after}")
        assert done.code == 0, done.err


def test_a_pretrained_model_without_a_template_gets_two_tokens_that_adapters_could_not_learn(
    here: Path, tokenizer: Callable[[str | None], str]
) -> None:
    folder = tokenizer(None)
    config = GPT2Config(
        vocab_size=258, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=257, bos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    done = _command(*SMALL, f"init_from={folder}", "run_name=a")
    assert done.code == 0, done.err
    assert "2 tokens are new to the model" in " ".join(done.out.split())
    kept = json.loads(Path("outputs/a/best/generation_config.json").read_text())
    best = AutoTokenizer.from_pretrained("outputs/a/best")
    assert kept["eos_token_id"] == best.eos_token_id == best.convert_tokens_to_ids("<|im_end|>") >= 258
    refused = _command(*SMALL, f"init_from={folder}", "recipe.lora.rank=2", "run_name=b")
    assert refused.code == 2
    assert "recipe.lora.rank=0" in refused.err
    tuned = _command(*SMALL, "init_from=outputs/a", "recipe.lora.rank=2", "run_name=b")
    assert tuned.code == 0, tuned.err
