"""``data.max_tokens``: the beginning of a dataset, to the token, whatever stops the reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from recipes.data.hub import Hub
from recipes.data.text import stream
from recipes.data.text.tokens import TokenData
from trainer.errors import UserError

STORIES = [f"Story {i}: once there were {i * 7} hats.\nThe énd." * (1 + i % 3) for i in range(300)]
END = "\n"
"""What separates documents of bytes."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stream, "_CHARACTERS_AT_ONCE", 700)
    return tmp_path / "cache"


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A folder with two files of training text, and one for validation."""
    folder = tmp_path / "stories"
    folder.mkdir()
    parts = {"train-0": STORIES[:120], "train-1": [*STORIES[120:280], None, ""], "validation-0": STORIES[280:]}
    for name, texts in parts.items():
        written = [json.dumps({"id": i, "story": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(written))
    return folder


def opened(folder: Path, tokens: float = 1e9, **options: Any) -> TokenData:
    return Hub(name=str(folder), max_tokens=tokens, **{"tokenizer": "bytes"} | options).tokens(None)


def texts(data: TokenData) -> tuple[str, str]:
    train, valid = (bytes(part[:].tolist()).decode() for part in (data.train, data.valid))
    return train, valid


@pytest.mark.parametrize("options", [{}, {"tokenizer": "bpe", "vocab_size": 300}], ids=["bytes", "bpe"])
def test_all_of_a_dataset_has_the_tokens_that_it_has_without_streaming(options: dict[str, Any], stories: Path) -> None:
    whole, streamed = opened(stories, None, **options), opened(stories, **options)  # type: ignore[arg-type]
    assert streamed.train[:].tolist() == whole.train[:].tolist()
    assert streamed.valid[:].tolist() == whole.valid[:].tolist()
    assert streamed.text_bytes == whole.text_bytes
    assert streamed.tokenizer.identity() == whole.tokenizer.identity()
    assert streamed.train[:1].dtype == np.uint16
    assert "data.max_tokens=1B was not reached" in streamed.description


@pytest.mark.parametrize("tokens", [500, 3000, 4321])
def test_the_first_document_that_reaches_the_limit_is_the_last(tokens: int, stories: Path) -> None:
    data = opened(stories, tokens, test="validation", valid_split="train", valid_fraction=0.2)
    train, valid = texts(data)
    used = train.split(END + "Story")
    assert len(data.train) >= tokens > len(data.train) - len((END + "Story" + used[-1]).encode())
    documents = train + END + valid
    read = [story for story in STORIES[:280] if story in documents]
    assert read == STORIES[: len(read)]  # all up to some place are in one part or the other
    assert "".join(sorted(documents)) == "".join(sorted(END.join(read)))
    assert data.text_bytes["train"] == len(data.train) - len([story for story in read if story in train]) + 1
    assert data.test is not None
    assert len(data.test) >= tokens / 10


class Killed(BaseException):
    pass


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("held_out", [True, False])
def test_a_reading_that_is_killed_goes_on_to_the_same_tokens(
    form: str, held_out: bool, stories: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "parquet":
        for file in stories.glob("*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            parquet.write_table(pa.Table.from_pylist(lines), file.with_suffix(".parquet"), row_group_size=50)
            file.unlink()
    options: dict[str, Any] = {"valid_split": "train"} if held_out else {}
    options |= {"tokenizer": "bpe", "vocab_size": 300}
    expected = opened(stories, 4000, cache_dir=str(tmp_path / "other"), **options)
    append, left = stream._append, 0
    read: list[str] = []

    def dying(path: Path, done: Any, texts: list[str], *rest: Any) -> None:
        nonlocal left
        append(path, done, texts, *rest)  # what is written is not committed yet
        read.extend(texts)
        left -= 1
        if left == 0:
            raise Killed

    monkeypatch.setattr(stream, "_append", dying)
    deaths, data = 0, None
    while data is None:
        left = 3
        try:
            data = opened(stories, 4000, **options)
        except Killed:
            deaths += 1
            assert not list(cache.glob("stream/[!.]*/meta.json"))
    assert deaths > 5
    assert data.description == expected.description
    for part in ("train", "valid"):
        files = [path.read_bytes() for folder in (tmp_path / "other", cache) for path in folder.rglob(f"{part}.bin")]
        assert files[0] == files[1]
    assert len(read) < 2 * len([story for story in STORIES if story in read])  # each is read again once at most


def test_what_is_there_is_opened_without_reading_and_changed_files_are_read(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(stories, 3000)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_build", None)
        patch.setattr(Hub, "_streams", None)
        assert texts(opened(stories, 3000)) == texts(first)
    (stories / "train-0.jsonl").write_text((stories / "train-0.jsonl").read_text().replace("Story", "Fable"))
    assert texts(opened(stories, 3000))[0].startswith("Fable")
    assert len(opened(stories, 2000).train) < len(first.train)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


WRONG: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "chats": ([{"messages": [{"role": "user", "content": "a"}]}], {}, "has chats"),
    "instructions": ([{"instruction": "a", "output": "b"}], {}, "has chats"),
    "one column of chats": (
        [{"instruction": "a", "output": "b"}],
        {"text_column": "output"},
        "one column of chats",
    ),
    "lines": ([{"text": "A.\n"}, {"text": ""}] * 9, {}, "lines of one text"),
    "said lines": ([{"text": "A."}], {"rows": "lines"}, "lines of one text"),
    "two columns": ([{"a": "x" * 2000, "b": "y" * 2000}], {}, "data.text_column=a"),
    "no text": ([{"text": ""}] * 9, {"rows": "documents"}, "no text is left for the train part"),
    "a split": ([{"text": "a"}], {"train_split": "test"}, "has the splits train"),
    "characters": ([{"text": "a"}], {"tokenizer": "chars"}, "needs all of the text"),
    "a fraction": ([{"text": "a"}], {"tokens": 1.5}, "whole number"),
    "none": ([{"text": "a"}], {"tokens": 0.0}, "whole number"),
    "infinite": ([{"text": "a"}], {"tokens": float("inf")}, "whole number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_streamed_is_said(case: str, tmp_path: Path, cache: Path) -> None:
    rows, options, words = WRONG[case]
    write_rows(tmp_path / "rows", rows)
    with pytest.raises(UserError, match=words):
        opened(tmp_path / "rows", **options)
    assert not list(cache.glob("stream/*/meta.json"))


@pytest.mark.parametrize(
    ("options", "use"),
    [
        ({"max_tokens": 1e6}, "images"),
        ({"text_column": "text"}, "images"),
        ({"max_tokens": 1e6}, "labelled texts"),
        ({"packing": True}, "labelled texts"),
        ({"rows": "lines"}, "labelled texts"),
        ({"pair_column": "text"}, "text"),
        ({"label_column": ["text"]}, "text"),
        ({"max_tokens": 1e6, "packing": True}, "text"),
        ({"max_tokens": 1e6, "train_on": "all"}, "text"),
    ],
)
def test_an_option_of_another_use_is_refused(options: dict[str, Any], use: str, stories: Path) -> None:
    hub = Hub(name=str(stories), **options)
    opened = {"images": hub.images, "labelled texts": hub.labelled, "text": hub.tokens}[use]
    with pytest.raises(UserError, match=r"data\..* has no effect.*leave it out"):
        opened(None)  # type: ignore[operator]
