from __future__ import annotations

import csv
import io
import json
import math
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.data.hub import Hub
from recipes.data.images.augment import View
from recipes.data.images.pixels import square
from recipes.data.text.rows import are_lines
from recipes.data.text.tokens import TokenData
from tests.recipes.test_folders import write
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


SPLITS = {"train": "train", "val": "validation"}


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
    files = "\n".join(f"  - {{split: {split}, path: {file}.jsonl}}" for split, file in SPLITS.items())
    (stories / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}\n---\n")
    _, valid, description = opened()
    assert (valid, "(the dataset's split val)" in description) == ("\n".join(STORIES[280:]), True)


def test_a_test_split_is_no_validation_unless_it_is_asked_for(stories: Path) -> None:
    """Else the best weights would be those of the test."""
    (stories / "validation.jsonl").rename(stories / "test.jsonl")
    source = Hub(name=str(stories), tokenizer="bytes")
    data = source.tokens(None)
    assert data.test is None
    assert STORIES[280] not in "".join(texts(data))
    assert STORIES[280] in texts(replace(source, valid_split="test").tokens(None))[1]
    tested = replace(source, test="test").tokens(None)
    assert tested.test is not None
    assert tested.tokenizer.decode(tested.test.tolist()).startswith(STORIES[280])
    assert STORIES[280] not in "".join(texts(tested))  # it is kept for the end


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
        (tmp_path / f"rows/{part}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
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


def test_a_split_without_labels_is_named(tmp_path: Path) -> None:
    whole = labelled(tmp_path / "whole", ["a", "b"], train=[0, 1] * 5, validation=[1, 0]).images(8)
    assert whole.valid.batch([SampleId(0, None), SampleId(1, None)])["label"].tolist() == [1, 0]
    source = labelled(tmp_path, ["a", "b"], train=[0, 1] * 5, validation=[-1] * 4, test=[-1] * 4)
    with pytest.raises(UserError, match=r"data\.valid_split=validation: row 0 .*data\.valid_split=train"):
        source.images(8)
    data = replace(source, valid_split="train").images(8)
    assert (len(data.train), len(data.valid)) == (8, 2)
    assert "(0.1 of each class)" in data.description


def test_a_damaged_image_is_named_by_its_row(tmp_path: Path) -> None:
    write(tmp_path, "{cat,dog}/{20}.png")
    (tmp_path / "cat" / "0.png").write_bytes(b"\x89PNG but not")
    train = Hub(name=str(tmp_path)).images(24).train
    with pytest.raises(UserError, match="row 0"):
        train.batch([SampleId(index, None) for index in range(len(train))])


# --- tables


REVIEWS = [("a great movie; really", "1"), ("boring, bad", "0"), ('she said "so so"\nand left', "1")] * 30


@pytest.mark.parametrize(("ending", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_a_table_loses_no_row(ending: str, separator: str, tmp_path: Path) -> None:
    path = tmp_path / f"reviews{ending}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([("text", "label"), *REVIEWS])
    data = Hub(name=str(path), tokenizer="bytes").tokens(None)
    assert "column text, which begins with 'a great movie; really'" in data.description
    assert sum(data.text_bytes.values()) == sum(len(text) for text, _ in REVIEWS)


# --- user errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_split": "training"}, ("data.train_split=training", "train, validation")),
        ({"valid_split": "test"}, ("data.valid_split=test", "train, validation")),
        ({"valid_split": "validation", "test": "validation"}, ("data.test=validation", "validation split")),
        ({"test": "train"}, ("data.test=train", "training split")),
        ({"text_column": "id"}, ("id is not a column of type text", "story (string)")),
        ({"subset": "english"}, ("english",)),
    ],
)
def test_a_split_or_column_that_is_not_there(stories: Path, options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        Hub(name=str(stories), tokenizer="bytes", **options).tokens(None)
    assert all(word in str(refused.value) for word in words)


def rows(*given: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, given)) + "\n"


STANZAS = [{"title": f"T{i}", "text": f"Stanza {i}."} for i in range(100)]
TURNS = {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]}
MESSAGES = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}
LATE = "id,text\n" + "".join(f"{n},{n}\n" for n in range(12_000)) + "".join(f"{n},tale {n}\n" for n in range(9000))

READ: dict[str, tuple[str, str, dict[str, str], int]] = {
    # name of the file, what it has, options, characters of text
    "lines of JSON": ("a.jsonl", rows(*STANZAS), {"text_column": "title"}, 290),
    "a list": ("a.json", json.dumps(STANZAS), {"text_column": "title"}, 290),
    "one row": ("a.json", json.dumps({"story": "A novel. " * 9, "year": 1900}), {}, 81),
    "text above other rows": ("a.json", json.dumps({"text": "A novel. " * 9, "data": STANZAS}), {}, 81),
    "a chat beside text": ("a.jsonl", rows(*[MESSAGES | {"text": "a"}] * 100), {"text_column": "text"}, 100),
    "labels of parts": ("a.jsonl", rows(*[{"text": "a", "entities": [{"start": 1, "label": "x"}]}] * 100), {}, 100),
    "gaps": ("a.csv", "id,text\n" + "1,a tale\n2,NA\n3,\n" * 9, {}, 54),
}
REFUSED: dict[str, tuple[str, str | bytes, dict[str, str], tuple[str, ...]]] = {
    "two columns": (
        "a.jsonl",
        rows(*[{"title": "A novel.", "body": "b" * 9}] * 125),
        {},
        ("2 columns are of type text", "title (string), body (string)", "data.text_column="),
    ),
    "no text": ("a.csv", "text,label\n1,2\n3,4\n", {}, ("text (int64), label (int64)", "a string")),
    "lists": ("a.jsonl", rows({"text": ["a"]}), {}, ("text (List",)),
    "semicolons": ("a.csv", "text;label\na, b;1\n", {}, ("is one column; write commas between columns",)),
    "below a key": (
        "a.json",
        json.dumps({"version": "1", "data": STANZAS}),
        {},
        ("data (List", "in a column of its own"),
    ),
    "below two keys": ("a.json", json.dumps({"data": {"rows": STANZAS}}), {}, ("data (", "in a column of its own")),
    "a column below": ("a.json", json.dumps({"data": STANZAS}), {"text_column": "text"}, ("text is not a column",)),
    "a chat as text": (
        "a.jsonl",
        rows(*[MESSAGES] * 9),
        {"text_column": "messages"},
        ("messages is not a column of type text",),
    ),
    "turns of another name": (
        "a.jsonl",
        rows(*[{"turns": TURNS["conversations"], "id": "c"}] * 9),
        {},
        ("turns (List", "chats are in columns of these names: messages"),
    ),
    "text that comes late": ("a.csv", LATE, {}, ("data.text_column=…",)),
    "not UTF-8": ("a b.csv", b"text\ncaf\xe9\n", {}, ("a b.csv is not UTF-8",)),
    "no JSON": ("a.json", b"{not json", {}, ("cannot be opened",)),
    "no rows": ("a.csv", "text,label\n", {}, ("no rows",)),
    "nothing": ("a.csv", "", {}, ("empty",)),
    "nothing, of JSON": ("a.jsonl", "", {}, ("empty",)),
    "UTF-16": ("a.csv", "text\na tale\n".encode("utf-16"), {}, ("is not UTF-8",)),
    "no parquet": ("a.parquet", b"not parquet", {}, ("cannot be opened",)),
    "compressed": ("a.jsonl.zst", b"\x1f\x8b", {}, ("packed; unpack it",)),
}


def test_rows_that_are_books_are_not_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.data.text.rows._BYTES_AT_ONCE", 1 << 18)
    books = [chr(ord("a") + i % 26) * (1 << 16) for i in range(100)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    train, _ = Hub(name=str(tmp_path / "books.jsonl")).splits()
    tracemalloc.start()
    read = [row for row, lines in zip(train.rows, train, strict=True) if list(lines) == [books[row]]]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == list(train.rows)
    assert peak < 1 << 21  # of 6 MB


def opened_file(folder: Path, file: str, content: str | bytes, options: dict[str, str]) -> TokenData:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return Hub(name=str(folder / file), tokenizer="bytes", **options).tokens(None)


@pytest.mark.parametrize("case", READ)
def test_a_file_of_rows_is_read(case: str, tmp_path: Path) -> None:
    *given, characters = READ[case]
    assert sum(opened_file(tmp_path, *given).text_bytes.values()) == characters


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of datasets, which opens the table
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_one_column_of_text_is_named(case: str, tmp_path: Path) -> None:
    *given, words = REFUSED[case]
    with pytest.raises(UserError) as refused:
        opened_file(tmp_path, *given)
    assert all(word in str(refused.value) for word in (given[0], *words))


def test_columns_of_images_and_labels_that_do_not_fit_are_named(stories: Path, parquet: Path) -> None:
    with pytest.raises(UserError, match="no columns are of type image"):
        Hub(name=str(stories), label_column="id").images(8)
    with pytest.raises(UserError, match=r"no columns are of type label; its columns are .*animal \(string\)"):
        Hub(name=str(parquet)).images(8)


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_of_encoded_images_is_one_of_images(nested: bool, parquet: Path) -> None:
    """Without the metadata of ``datasets``, as pandas writes it."""
    import pyarrow.parquet as pq

    table = pq.read_table(parquet).replace_schema_metadata(None)
    if not nested:
        table = table.set_column(0, "picture", table["picture"].combine_chunks().field("bytes"))
    pq.write_table(table, parquet)
    assert Hub(name=str(parquet), label_column="animal").images(8).train.image(0).size == (28, 28)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.5, math.nan] * 10, "label has fractions, as for a regression"),
        ([None, "a"] * 10, "row 0 has no label"),
        (list(range(20)), "20 values in 20 rows, which are no classes"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: list[Any], message: str, parquet: Path) -> None:
    from datasets import Dataset

    file = parquet.with_name("labelled.parquet")
    Dataset.from_parquet(str(parquet)).add_column("label", labels).to_parquet(file)
    with pytest.raises(UserError, match=message):
        Hub(name=str(file), label_column="label").images(8)


def test_images_with_lists_of_labels_have_several(parquet: Path) -> None:
    from datasets import Dataset

    file, labels = parquet.with_name("labelled.parquet"), [["a", "b"], ["c"], []] * 6 + [["a"], ["b"]]
    Dataset.from_parquet(str(parquet)).add_column("label", labels).to_parquet(file)
    opened = Hub(name=str(file), label_column="label").images(8)
    assert (opened.classes, opened.multi_label) == (["a", "b", "c"], True)
    rows = [opened.train.labels[row].tolist() for row in range(len(opened.train))]
    assert all([name for name, is_on in zip("abc", row, strict=True) if is_on] in labels for row in rows)


def test_a_table_of_files_and_labels_is_said_to_go_into_the_folder_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "photos/{9}.png")
    names = sorted(path.name for path in Path("photos").iterdir())
    Path("labels.csv").write_text(
        "".join(f"{name},{label}\n" for name, label in zip(["file_name", *names], ["label", *"ababababa"], strict=True))
    )
    with pytest.raises(UserError, match=r"a metadata\.csv that has the columns file_name and label"):
        Hub(name="labels.csv").images(8)
    Path("labels.csv").rename("photos/metadata.csv")
    assert Hub(name="photos").images(8).classes == ["a", "b"]


def test_shards_of_webdataset_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * 20, shard * 20 + 20):
                content = io.BytesIO()
                picture(number).save(content, "PNG")
                for suffix, part in (("png", content.getvalue()), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(part)
                    archive.addfile(member, io.BytesIO(part))
    with pytest.raises(UserError, match="cls"):
        Hub(name=str(folder)).images(8)
    for name, count in ((folder, 36), (folder / "0.tar", 18)):
        assert len(Hub(name=str(name), label_column="cls").images(8).train) == count
