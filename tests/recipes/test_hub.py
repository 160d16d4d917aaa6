from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.data.hub import Hub, are_lines, table_options
from recipes.data.images.augment import View
from recipes.data.images.pixels import square
from recipes.data.text.tokens import TokenData
from trainer.data.contract import SampleId
from trainer.errors import UserError

STORIES = [f"Story {i}: once there were {i * 7} hats.\nThe end." for i in range(300)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A folder with a training and a validation split of text beside numbers."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for split, texts in (("train", STORIES[:280]), ("validation", [None, *STORIES[280:]])):
        rows = [json.dumps({"id": i, "story": text}) for i, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return folder


def picture(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """An image folder of two classes, 20 images each."""
    for i in range(40):
        place = tmp_path / "pictures" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        picture(i).save(place / f"{i:02}.png")
    return tmp_path / "pictures"


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A file with embedded images and labels that are words."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    rows = []
    for i in range(20):
        content = io.BytesIO()
        picture(i, (28, 28)).save(content, "PNG")
        rows.append({"picture": {"bytes": content.getvalue(), "path": None}, "animal": ("cat", "dog")[i % 2]})
    features = Features({"picture": ImageFeature(), "animal": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "animals.parquet")
    return tmp_path / "animals.parquet"


# --- text


def texts(data: TokenData) -> tuple[str, str]:
    train, valid = (data.tokenizer.decode(ids.tolist()) for ids in (data.train, data.valid))
    return train, valid


def test_which_split_is_validated_on(stories: Path) -> None:
    def opened(**options: str) -> tuple[str, str, str]:
        data = Hub(name=str(stories), tokenizer="bytes", **options).tokens(None)
        return *texts(data), data.description

    train, valid, description = opened()
    assert "for validation (the dataset's split validation)" in description
    assert (train, valid) == ("\n".join(STORIES[:280]), "\n".join(STORIES[280:]))
    train, valid, _ = opened(valid_split="train")  # which is divided
    assert sum(story in valid for story in STORIES[:280]) == 28
    assert sum(story in train for story in STORIES[:280]) == 252
    assert STORIES[280] not in train + valid
    (stories / "validation.jsonl").rename(stories / "test.jsonl")
    _, valid, description = opened()
    assert STORIES[280] in valid
    assert "(the dataset's split test)" in description
    data = Hub(name=str(stories), tokenizer="bytes", test="test").tokens(None)
    assert data.test is not None
    assert data.tokenizer.decode(data.test.tolist()).startswith(STORIES[280])
    assert STORIES[280] not in "".join(texts(data))  # it is kept for the end


def write_rows(path: Path, rows: Sequence[str | None]) -> Path:
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return path


def article(number: int) -> list[str]:
    """Rows as wikitext has them: a title, blank lines, paragraphs, a section; each names its article."""
    body = [f" Paragraph {line} of [{number}] . \n" for line in range(number % 9 + 3)]
    return [
        f" = Article [{number}] = \n",
        "",
        *body,
        "",
        f" = = Section of [{number}] = = \n",
        "",
        f" End [{number}] \n",
    ]


def test_the_end_of_rows_that_are_lines_is_held_out(tmp_path: Path) -> None:
    rows = [row for number in range(60) for row in article(number)]
    data = Hub(name=str(write_rows(tmp_path / "wiki.jsonl", rows)), tokenizer="bytes").tokens(None)
    assert " = Article [0] = \\n'; rows are lines: joined, without a token between them" in data.description
    text = "".join(rows)
    assert texts(data) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])


LINES = "A line.\nAnother one.\n\nA third one.\n" * 9
ROWS = LINES.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (ROWS, True),
        ([row if row.strip() else "" for row in ROWS], True),
        (["A \nB", *ROWS], True),  # one row has a line end within
        ([row.replace("\n", "\r\n") for row in ROWS], True),
        (["A tweet.", None, "Another."] * 9, False),
        (["Once upon a time.\nThe end.\n"] * 9, False),
        (["A tweet.\n"] * 99, False),
        (["", "An input.", ""] * 30, False),
        (["A line.\n", "", "Words.\n", "Others."] * 30, False),
    ],
)
def test_rows_are_lines_where_they_look_cut_out_of_a_text(rows: list[str | None], lines: bool) -> None:
    assert are_lines(rows) == lines


@pytest.mark.parametrize(
    ("reading", "rows", "expected"),
    [
        ("auto", ROWS, LINES),
        ("documents", ROWS, "<|endoftext|>".join(ROWS)),
        ("lines", ["No end", "", "no mark"] * 9, "No end\n\nno mark\n" * 9),
        ("lines", ["An end\n", "", "no end", "", "an end\n"] * 9, "An end\nno end\nan end\n" * 9),
    ],
)
def test_lines_are_joined_and_documents_end(reading: str, rows: list[str], expected: str, tmp_path: Path) -> None:
    """A model of lines must never see an end-of-text token."""
    (tmp_path / "rows").mkdir()
    for part in ("train", "validation"):
        write_rows(tmp_path / "rows" / f"{part}.jsonl", rows)
    data = Hub(name=str(tmp_path / "rows"), vocab_size=300, rows=reading).tokens(None)
    assert texts(data) == (expected, expected)
    assert ("each row a document" in data.description) == (reading == "documents")
    assert f"(data.rows={reading})" in data.description
    assert data.text_bytes["train"] == len(expected.replace("<|endoftext|>", "").encode())


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    text = "a line\n\nanother\n" * 100
    (tmp_path / "a.txt").write_text(text)
    data = Hub(name=str(tmp_path / "a.txt"), tokenizer="bytes").tokens(None)
    assert bytes(data.train.tolist() + data.valid.tolist()).decode() == text


def test_changed_files_are_not_opened_from_the_cache(stories: Path) -> None:
    Hub(name=str(stories), tokenizer="bytes").tokens(None)
    rows = (stories / "train.jsonl").read_text()
    (stories / "train.jsonl").write_text(rows.replace("Story", "Fable"))
    changed = Hub(name=str(stories), tokenizer="bytes").tokens(None)
    assert bytes(changed.train[:7].tolist()) == b"Fable 0"


# --- images


def test_train_and_valid_share_nothing_and_miss_nothing(parquet: Path) -> None:
    data = Hub(name=str(parquet), label_column="animal", valid_fraction=0.3).images(None)
    assert data.image_size == 28
    images, labels = {}, []
    for part in (data.train, data.valid):
        for index in range(len(part)):
            batch = part.batch([SampleId(index, None)])
            images[batch["image"].numpy().tobytes()] = True
            labels.append(int(batch["label"]))
    assert len(images) == 20
    assert sorted(labels) == [0] * 10 + [1] * 10
    assert data.classes == ["cat", "dog"]
    cats = {square(picture(i, (28, 28)), 28, View()).tobytes() for i in range(0, 20, 2)}
    assert [image in cats for image in images] == [label == 0 for label in labels]


def labelled(folder: Path, names: list[str], **splits: list[int]) -> Hub:
    """Splits of images with these labels, -1 for none."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
    for split, labels in splits.items():
        rows = {"image": [picture(i) for i in range(len(labels))], "label": labels}
        Dataset.from_dict(rows, features=features).to_parquet(folder / "labelled" / f"{split}.parquet")
    return Hub(name=str(folder / "labelled"))


def test_a_test_split_is_validated_on_where_it_has_labels(tmp_path: Path) -> None:
    whole = labelled(tmp_path / "whole", ["a", "b"], train=[0, 1] * 5, test=[1, 0]).images(8)
    assert whole.valid.batch([SampleId(0, None), SampleId(1, None)])["label"].tolist() == [1, 0]
    assert "(the dataset's split test)" in whole.description
    source = labelled(tmp_path, ["a", "b"], train=[0, 1] * 5, test=[-1] * 4)
    with pytest.raises(UserError, match=r"data\.valid_split=test: row 0 has the label -1.*data\.valid_split=train"):
        source.images(8)
    data = replace(source, valid_split="train").images(8)
    assert (len(data.train), len(data.valid)) == (8, 2)
    assert "(0.1 of each class)" in data.description


def test_a_damaged_image_is_named_by_its_row(pictures: Path) -> None:
    (pictures / "cat" / "00.png").write_bytes(b"\x89PNG but not")
    train = Hub(name=str(pictures)).images(24).train
    with pytest.raises(UserError, match=r"data.name=.*pictures: the image of row 0 cannot be decoded"):
        train.batch([SampleId(index, None) for index in range(len(train))])


# --- user errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "training"}, "data.train_split=training: .* has the splits train, validation"),
        ({"valid_split": "test"}, "data.valid_split=test: .* has the splits train, validation"),
        ({"valid_split": "validation", "test": "validation"}, "data.test=validation is the validation split; set it"),
        ({"test": "train"}, "data.test=train is the training split; set it"),
        ({"text_column": "id"}, "id is not a column of type text; set data.text_column=story"),
        ({"subset": "english"}, "english"),
    ],
)
def test_a_split_or_column_that_is_not_there(stories: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Hub(name=str(stories), tokenizer="bytes", **options).tokens(None)


REVIEWS = [("a great movie; really", "1"), ("boring, bad", "0"), ('she said "so so"\nand left', "1")] * 30


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_a_table_is_read_by_its_own_separator_and_loses_no_row(
    ending: str, separator: str, named: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"reviews{ending}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([("text", "label")] * named + REVIEWS)
    data = Hub(name=str(path), tokenizer="bytes").tokens(None)
    assert f"column {'text' if named else 'column_1'}, which begins with 'a great movie; really'" in data.description
    assert sum(data.text_bytes.values()) == sum(len(text) for text, _ in REVIEWS)


LATE = "id,text\n" + "".join(f"{n},{n}\n" for n in range(12_000)) + "".join(f"{n},tale {n}\n" for n in range(9000))
GAPS = "id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(["a tale", "NA", "", "None", "another"] * 20))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of datasets, which opens the table
def test_text_that_a_table_has_later_or_not_at_all_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(LATE)
    with pytest.raises(UserError, match=r"text after thousands of rows without any .*; name .* data\.text_column=…"):
        Hub(name=str(path), tokenizer="bytes").tokens(None)
    data = Hub(name=str(path), tokenizer="bytes", text_column="text").tokens(None)
    assert sum(data.text_bytes.values()) == len(LATE) - len("id,text\n") - 2 * 21_000 - _digits(12_000) - _digits(9000)
    path.write_text(GAPS)
    said = Hub(name=str(path), tokenizer="bytes").tokens(None).description
    assert "begins with 'a tale', 60 of 100 rows are empty or a word for it, such as NA, and left out; each row" in said


def _digits(count: int) -> int:
    return sum(len(str(number)) for number in range(count))


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("text\na, b\nc\nd, e", {}),  # no table but text
        ("text\n" + "one\n" * 9, {}),
        ("id,text\n1,a\n2,b\n", {"sep": ","}),
        ("1,a\n2,b\n", {"sep": ",", "column_names": ["column_1", "column_2"]}),
        ("good film,pos\nbad film,neg\nso so,pos\n", {"sep": ",", "column_names": ["column_1", "column_2"]}),
        (",text\n0,a\n1,b\n", {"sep": ","}),  # as pandas writes it
        ("text;label\n" + "a, b;1\n" * 40_000, {"sep": ";"}),  # cut within a row
        ("", {}),
        ("id\ttext\n" + '1\t5" pipes\n2\t"no end\n' * 9, {"sep": "\t", "quoting": csv.QUOTE_NONE}),
    ],
)
def test_how_a_table_is_read(content: str, read: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert table_options(tmp_path / "a.csv") == read


def test_a_quote_in_a_table_of_tabs_is_a_letter_where_it_has_no_end(tmp_path: Path) -> None:
    rows = [f"{'' if n % 5 else chr(34)}tweet {n} of the day" for n in range(60)]
    path = tmp_path / "tweets.tsv"
    path.write_text("id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(rows)))
    data = Hub(name=str(path), tokenizer="bytes").tokens(None)
    assert sum(data.text_bytes.values()) == sum(map(len, rows))
    path.write_text("id\ttext\n" + "1\ta, b\n2\tc\tmore\n" * 9)  # ragged
    assert table_options(path) == {"sep": "\t"}


STANZAS = [{"title": f"T{i}", "text": f"Stanza {i} of the poem."} for i in range(100)]


@pytest.mark.parametrize("lines", [True, False])
def test_rows_of_json_are_a_list_or_lines(lines: bool, tmp_path: Path) -> None:
    path = tmp_path / "poems.json"
    path.write_text("\n".join(map(json.dumps, STANZAS)) if lines else json.dumps(STANZAS))
    data = Hub(name=str(path), tokenizer="bytes", text_column="text").tokens(None)
    assert sum(data.text_bytes.values()) == sum(len(row["text"]) for row in STANZAS)


@pytest.mark.parametrize(
    ("whole", "options", "message"),
    [
        (
            {"version": "1.0", "data": STANZAS},
            {},
            r'its columns are version \(string\), data \(List.*\); give a file with {"text": …} in rows, or set '
            r"data\.text_column=version$",
        ),
        (
            {"version": "1.0", "data": {"rows": STANZAS}},
            {},
            "its columns are version .*, data .*; give a file",
        ),
        ({"rows": STANZAS, "count": 100}, {}, r"no columns are of type text; its columns are rows \(List.*, count \("),
        ({"train": STANZAS, "test": STANZAS}, {}, r"its columns are train \(.*, test \(.*; give a file with"),
        ({"data": STANZAS}, {"text_column": "text"}, r"text is not a column of type text; its columns are data \("),
        ({"title": "A novel. " * 9, "data": STANZAS}, {"text_column": "title"}, None),
        ({"text": "A novel. " * 9, "data": STANZAS}, {}, None),
        ({"story": "A novel. " * 9, "year": 1900}, {}, None),
    ],
)
def test_text_is_not_searched_for_below_the_keys_of_json(
    whole: Any, options: dict, message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "poems.json"
    path.write_text(json.dumps(whole))
    hub = Hub(name=str(path), tokenizer="bytes", **options)
    if message is None:
        assert sum(hub.tokens(None).text_bytes.values()) == len("A novel. " * 9)
    else:
        with pytest.raises(UserError, match=message):
            hub.tokens(None)


def test_a_column_of_a_hundred_parts_is_named_in_short(tmp_path: Path) -> None:
    path = tmp_path / "columns.json"  # as pandas writes it without orient
    path.write_text(json.dumps({"text": {str(i): f"row {i}" for i in range(100)}}))
    with pytest.raises(UserError, match=r"its columns are text \(.{60}\); give a file"):
        Hub(name=str(path)).tokens(None)


TURNS = {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]}
MESSAGES = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}

PARAGRAPHS = {"paragraphs": [{"context": "Once.", "qas": []}]}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (TURNS | {"id": "c"}, {}, "1 column is of type text; set data.text_column=id; conversations has texts"),
        (PARAGRAPHS | {"title": "T"}, {}, "1 column is of type text; set data.text_column=title; paragraphs has texts"),
        (PARAGRAPHS | {"title": "T"}, {"text_column": "title"}, None),
        (MESSAGES, {}, r"its columns are messages \(.*; messages has texts in lists: write them as one"),
        (
            MESSAGES | {"text": "a"},
            {"text_column": "messages"},
            "messages is not a column of .*; messages has texts in",
        ),
        ({"text": "a", "entities": [{"start": 1, "label": "x"}]}, {}, None),
        ({"sentence": "a", "entities": [{"start": 1, "text": "x"}]}, {}, None),
        (MESSAGES | {"text": "a"}, {"text_column": "text"}, None),
    ],
)
def test_texts_in_lists_are_not_passed_over(row: dict, options: dict, message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 100))
    hub = Hub(name=str(path), tokenizer="bytes", **options)
    if message is None:
        assert sum(hub.tokens(None).text_bytes.values()) == 100
    else:
        with pytest.raises(UserError, match=message):
            hub.tokens(None)


@pytest.mark.parametrize("name", ["a.txt.gz", "b.jsonl.zst", "archive.zip"])
def test_a_compressed_file_is_to_be_unpacked(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match="unpack what is compressed; any other file of text opens with data=text"):
        Hub(name=str(tmp_path / name))


def test_columns_that_do_not_fit_are_named(stories: Path, pictures: Path, parquet: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.jsonl"
    two.write_text("\n".join(json.dumps({"title": "t", "body": f"body {i}"}) for i in range(100)))
    with pytest.raises(UserError, match=r"2 columns are of type text; set data.text_column=title\|body"):
        Hub(name=str(two)).tokens(None)
    with pytest.raises(
        UserError,
        match=r'no columns are of type text; .*; give a file with {"text": …} in rows',
    ):
        Hub(name=str(pictures)).tokens(None)
    with pytest.raises(
        UserError, match="no columns are of type image; its columns are id \\(int64\\), story \\(string\\)"
    ):
        Hub(name=str(stories), label_column="id").images(8)
    with pytest.raises(UserError, match="no columns are of type label; its columns are picture"):
        Hub(name=str(parquet)).images(8)


def test_the_remedy_for_a_table_that_is_not_utf8_can_be_run_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b.csv").write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(UserError, match=f"iconv -f cp1252 -t utf-8 '{tmp_path}/a b.csv' -o 'utf8-a b.csv'"):
        Hub(name="~/a b.csv").tokens(None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.json", b"{not json", "cannot be opened"),
        (
            "a.csv",
            b"text\ncaf\xe9\n",
            "is not UTF-8; write it anew, if it is cp1252, with: iconv -f cp1252 -t utf-8 .*",
        ),
        ("a.csv", b"text,label\n1,2\n3,4\n", "text; its columns are text .int64., label .int64.; give a file with "),
        ("a.jsonl", b'{"text": ["a"]}\n', "its columns are text .List"),
        ("a.parquet", b"not parquet", "cannot be opened"),
        ("", b"", "cannot be opened .*; data=text opens text, "),  # an empty folder
    ],
)
def test_files_that_do_not_open(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / "data").mkdir()
    if file:
        (tmp_path / "data" / file).write_bytes(content)
    with pytest.raises(UserError, match=f"data.name=.*data.*{file}.* {message}"):
        Hub(name=str(tmp_path / "data" / file)).tokens(None)
