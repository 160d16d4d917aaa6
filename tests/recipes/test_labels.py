"""Tables of the labels of images: how they are read, or what is said instead; and training on several labels."""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch.nn import functional as F

from recipes.data.images import mixing
from recipes.data.images.folder import ImageFolder
from recipes.resnet import ResNet
from tests.helpers import CPU, compose, context
from tests.recipes.test_folders import write
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.metrics import Metrics
from trainer.parallel.world import World
from trainer.recipe import LossOutput

NAMES = [f"{number}" for number in range(10)]
IMAGES = "photos/{10}.png"
PAIRS = [*zip(NAMES, "aabbaabbab", strict=True)]
PLAIN = "name,label\n" + "".join(f"{name}.png,{label}\n" for name, label in PAIRS)
TAGS = ["x", "x y", "", "y", "x", "y x", "y", "", "x", "y"]


def rows(*columns: object, separator: str = ",") -> str:
    """A table of the ten images: each column is a heading and a function of their number."""
    pairs = [*zip(columns[::2], columns[1::2], strict=True)]
    lines: list[list[str]] = [[str(heading) for heading, _ in pairs]]
    lines += [[str(of(number)) for _, of in pairs] for number in range(10)]  # type: ignore[operator]
    return "".join(separator.join(line) + "\n" for line in lines)


def day(number: int) -> str:
    return f"1-{number}"


def kind(number: int) -> str:
    return "aabbaabbab"[number]


def objects(**of: Any) -> str:
    """The same as JSON lines."""
    return "".join(json.dumps({name: cell(number) for name, cell in of.items()}) + "\n" for number in range(10))


def opened(folder: Path, content: str, file: str = "labels.csv", **options: Any) -> Any:
    if not (folder / "photos").exists():
        write(folder, IMAGES)
    (folder / file).write_text(content, encoding="utf-8")
    return ImageFolder(**{"path": str(folder / "photos"), "labels": str(folder / file)} | options).images(8)


def labels_of(data: Any) -> dict[str, Any]:
    """The label of each image, of all parts, by the names of the files; of several labels their names."""
    found = {}
    for part in filter(None, (data.train, data.valid, data.test)):
        for file, label in zip(part.files, part.labels, strict=True):
            chosen = [int(label)] if label.ndim == 0 else label.nonzero().flatten().tolist()
            found[Path(os.fsdecode(file)).stem] = " ".join(data.classes[number] for number in chosen)
    return found


ONE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # content; the file; options
    "with endings": (PLAIN, "labels.csv", {}),
    "without endings": (rows("id", str, "class", kind), "labels.csv", {}),
    "with the folder's name": (rows("file", lambda number: f"photos/{number}.png", "x", kind), "labels.csv", {}),
    "semicolons": (rows("id", str, "label", kind, separator=";"), "labels.csv", {}),
    "tabs": (rows("id", str, "label", kind, separator="\t"), "labels.tsv", {}),
    "without a heading": (PLAIN.partition("\n")[2], "labels.csv", {}),
    "without a heading, a value twice in the first line": (
        "9.png,b,b\n" + rows("id", "{}.png".format, "x", kind, "y", kind).partition("\n")[2],
        "labels.csv",
        {"label_column": "column_2"},
    ),
    "spaces, blank lines and a mark": (
        "\ufeff" + PLAIN.replace(",", " , ").replace("\n", "\r\n\r\n"),
        "labels.csv",
        {},
    ),
    "other columns": (
        rows("", str, "file", "{}.png".format, "label", kind, "width", str),
        "labels.csv",
        {"file_column": "file"},
    ),
    "a named column": (rows("file", "{}.png".format, "kind", kind, "day", day), "labels.csv", {"label_column": "kind"}),
    "JSON lines": (
        objects(file_name="{}.png".format, label=kind, box=lambda number: {"x": number}),
        "metadata.jsonl",
        {},
    ),
}


@pytest.mark.parametrize("form", ONE)
def test_tables_of_one_label_an_image(form: str, tmp_path: Path) -> None:
    content, file, options = ONE[form]
    data = opened(tmp_path, content, file, **options)
    assert (data.classes, data.multi_label) == (["a", "b"], False)
    assert labels_of(data) == dict(PAIRS)
    assert (len(data.train), len(data.valid)) == (8, 2)
    assert data.train.batch([SampleId(0, 1), SampleId(1, 1)])["label"].dtype == torch.int64


SEVERAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "separated": (rows("id", str, "tags", TAGS.__getitem__), "labels.csv", {"label_separator": " "}),
    "columns of 0 and 1": (
        rows("id", str, *(part for tag in "xy" for part in (tag, lambda number, tag=tag: int(tag in TAGS[number])))),
        "labels.csv",
        {},
    ),
    "columns of True and False, named": (
        rows(
            "id",
            "{}.png".format,
            "day",
            day,
            *(part for tag in "xy" for part in (tag, lambda number, tag=tag: tag in TAGS[number])),
        ),
        "labels.csv",
        {"label_column": ["x", "y"]},
    ),
    "JSON lists": (
        objects(file_name="{}.png".format, tags=lambda number: TAGS[number].split()),
        "labels.jsonl",
        {},
    ),
}


@pytest.mark.parametrize("form", SEVERAL)
def test_tables_of_several_labels_an_image(form: str, tmp_path: Path) -> None:
    content, file, options = SEVERAL[form]
    data = opened(tmp_path, content, file, **options)
    assert (data.classes, data.multi_label) == (["x", "y"], True)
    assert labels_of(data) == {name: " ".join(sorted(tags.split())) for name, tags in zip(NAMES, TAGS, strict=True)}
    assert "2 images without a label" in data.description
    label = data.train.batch([SampleId(0, 1), SampleId(1, 1)])["label"]
    assert (label.dtype, tuple(label.shape)) == (torch.float32, (2, 2))


def test_numbers_are_classes_in_their_order_and_what_has_no_line_is_left_out(tmp_path: Path) -> None:
    data = opened(tmp_path, "id,label\n" + "".join(f"{number}.png,{10 - number % 2}\n" for number in range(6)))
    assert data.classes == ["9", "10"]
    assert len(data.train) + len(data.valid) == 6
    assert "4 images without a line left out" in data.description


def test_a_column_or_folders_decide_the_parts(tmp_path: Path) -> None:
    words = ["train", "train", "Val", "train", "test", "train", "train", "val", "train", "train"]
    data = opened(tmp_path, rows("file", "{}.png".format, "label", kind, "split", words.__getitem__))
    assert [len(part) for part in (data.train, data.valid, data.test)] == [7, 2, 1]
    assert "parts by column split" in data.description
    write(tmp_path / "b", "photos/{train,val}/{0,1,2,3}{a,b}.png")
    names = [f"{part}/{number}{label}" for part in ("train", "val") for number in range(4) for label in "ab"]
    table = "name,label\n" + "".join(f"{name},{name[-1]}\n" for name in names)
    data = opened(tmp_path / "b", table)
    assert {Path(os.fsdecode(file)).parent.name for file in data.train.files} == {"train"}
    assert len(data.valid) == 8


REFUSED: dict[str, tuple[str, str]] = {
    # content; words of the message
    "nothing": ("", "is empty"),
    "a heading alone": ("id,label\n", "no rows"),
    "one column": ("id\n1.png\n", "one column: its first line, 'id', has no comma, semicolon or tab"),
    "a line with a column more": (PLAIN.replace("4.png,a", "4.png,a,b"), "line 6 has 3 columns, the first one has 2"),
    "a quote that does not end": (PLAIN.replace("4.png", '"4.png'), "as where a quote does not end"),
    "no such images": (
        PLAIN + "10.png,a\n11.png,b\n",
        "2 of 12 lines name images not in PATH/photos (which has 0.png, 1.png, 2.png, …): 10.png (line 12), 11",
    ),
    "no names": (
        rows("label", kind, "age", lambda number: number + 0.5),
        "in data.path (which has 0.png, 1.png, 2.png, …)",
    ),
    "one class": (
        rows("id", "{}.png".format, "label", lambda _: "a"),
        "PATH/labels.csv has training images of one class only (a)",
    ),
    "empty labels": (
        PLAIN.replace("4.png,a", "4.png,").replace("6.png,b", "6.png,"),
        "2 of 10 lines without a label in column label (6, 8)",
    ),
    "numbers": (
        rows("id", "{}.png".format, "age", lambda number: number * 1.5),
        "column age has 10 values in 10 rows, which are no classes; the columns are id, age; a table has",
    ),
    "one image in two lines": (PLAIN + "2.png,a\n", "lines 4 and 12 give PATH/photos/2.png different labels"),
    "two labels of one name": (
        rows("id", "{}.png".format, "label", kind, "label", kind),
        "its other columns are column_2, column_3",
    ),
    "a split of another name": (
        rows("id", "{}.png".format, "label", kind, "split", lambda _: "dev"),
        "has 'dev', which is",
    ),
    "a class that is not trained": (
        rows("id", "{}.png".format, "label", kind, "split", lambda number: "val" if kind(number) == "b" else "train"),
        "no training image has the label b",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_table_is_said(case: str, tmp_path: Path) -> None:
    content, words = REFUSED[case]
    with pytest.raises(UserError) as refused:
        opened(tmp_path, content)
    assert words in str(refused.value).replace(str(tmp_path), "PATH")


REMEDIED: dict[str, tuple[str, tuple[str, ...]]] = {
    "two columns of names": (
        rows("a", str, "b", "{}.png".format, "label", kind),
        ("data.file_column=a", "data.file_column=b"),
    ),
    "several columns": (
        rows("id", "{}.png".format, "kind", kind, "day", day, "sex", lambda number: "mf"[number % 2]),
        ("data.label_column=kind", "data.label_column=sex"),
    ),
    "several labels, not separated": (
        rows("id", "{}.png".format, "tags", lambda number: f"{'xyz'[number % 3]} {'uvw'[number // 4]}"),
        ("\"data.label_separator=' '\"",),
    ),
}


@pytest.mark.parametrize("case", REMEDIED)
def test_what_is_not_known_can_be_typed_as_it_is_said(case: str, tmp_path: Path) -> None:
    content, remedies = REMEDIED[case]
    with pytest.raises(UserError) as refused:
        opened(tmp_path, content)
    assert refused.value.remedies == remedies
    given = (f"data.path={tmp_path}/photos", f"data.labels={tmp_path}/labels.csv")
    for remedy in remedies:
        config: Any = compose("recipe=resnet", "data=imagefolder", *given, *shlex.split(remedy))
        assert len(config.data.images(8).train) >= 8


def test_other_mistakes_name_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, IMAGES, "photos/sub/1.png")
    with pytest.raises(UserError, match=r"1\.png names 2 images") as several:
        opened(tmp_path, "id,label\n" + "".join(f"{name}.png,{label}\n" for name, label in PAIRS), path=str(tmp_path))
    assert "photos/1.png" in str(several.value)
    with pytest.raises(UserError, match=r"data\.label_column=lable is not one of its columns; did you mean 'label'"):
        opened(tmp_path, PLAIN, label_column="lable")
    with pytest.raises(UserError, match=r"line 1 is .*, and is to be an object"):
        opened(tmp_path, "[\n]", "labels.jsonl")
    with pytest.raises(UserError, match=r"'id,label', has no tab"):
        opened(tmp_path, PLAIN.replace("name", "id"), "labels.tsv")
    for separator in (";", ""):
        with pytest.raises(UserError, match=r"no cell of column label has the data\.label_separator") as absent:
            opened(tmp_path, PLAIN, label_separator=separator)
        assert absent.value.remedies == ("",)
    with pytest.raises(UserError, match="has no effect on columns of 0 and 1"):
        opened(tmp_path, SEVERAL["columns of 0 and 1"][0], label_separator=";")
    with pytest.raises(UserError, match="line 3 has '-1' in column y"):
        opened(tmp_path, "id,x,y\n1.png,1,0\n2.png,1,-1\n3.png,1,0\n", label_column=["x", "y"])
    with pytest.raises(UserError, match=r"must end with \.csv"):
        opened(tmp_path, PLAIN, "labels.txt")
    (tmp_path / "wide.csv").write_text(PLAIN, encoding="utf-16")
    with pytest.raises(UserError, match="is utf-16; write it anew in UTF-8"):
        ImageFolder(path=str(tmp_path / "photos"), labels=str(tmp_path / "wide.csv")).images(8)
    without: list[dict[str, Any]] = [{"label_separator": " "}]
    without += [{"labels": str(tmp_path / "labels.csv"), "test": str(tmp_path)}]
    for options in without:
        with pytest.raises(UserError, match="has no effect"):
            ImageFolder(path=str(tmp_path / "photos"), **options)


def test_labels_that_look_like_several_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tags = [f"{first} {second}" for first in "xyz" for second in "uv"] * 5
    write(tmp_path, "photos/{30}.png")
    table = "id,label\n" + "".join(f"{number}.png,{tag}\n" for number, tag in enumerate(tags))
    with caplog.at_level(logging.WARNING, "mantissa"):
        assert len(opened(tmp_path, table).classes) == 6
    assert "has 6 labels" in caplog.text
    assert "there would be 5" in caplog.text


# --------------------------------------------------------------------------------------------- several labels: the loss


@pytest.fixture
def several(tmp_path: Path) -> Any:
    return opened(tmp_path, *SEVERAL["separated"][:2], **SEVERAL["separated"][2])


def ready(datasets: Any, **options: Any) -> ResNet:
    recipe = ResNet(arch="resnet18", image_size=8, **options)
    return recipe.resolve(context(ImageFolder(path="."), CPU, datasets=datasets))[0]


def test_the_criterion_follows_the_data(several: Any) -> None:
    recipe, (decision,) = ResNet(arch="resnet18").resolve(context(ImageFolder(path="."), CPU, datasets=several))
    assert (recipe.criterion, decision.key, decision.value) == ("bce", "recipe.criterion", "bce")
    with pytest.raises(UserError, match="is for one label to an image") as refused:
        ready(several, criterion="cross_entropy")
    assert refused.value.remedies == ("recipe.criterion=bce", "")
    with pytest.raises(UserError, match=r"class_weights=balanced is for one label"):
        ResNet(arch="resnet18", image_size=32, class_weights="balanced").datasets(Several(several), 0)


class Several(ImageFolder):
    """A source that has these data."""

    def __init__(self, datasets: Any) -> None:
        self.datasets = datasets

    def images(self, image_size: int | None) -> Any:
        return self.datasets


def test_the_loss_is_the_mean_over_labels_summed_over_images(several: Any) -> None:
    recipe = ready(several)
    model: Any = ready(several).build_model(several)
    batch = several.train.batch([SampleId(index, 1) for index in range(6)])
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    model.forward = lambda images: logits
    expected = F.binary_cross_entropy_with_logits(logits, batch["label"]) * 6
    for mode in (model.train(), model.eval()):
        torch.testing.assert_close(recipe.loss(mode, batch).loss_sum, expected)
    output = recipe.loss(model.eval(), batch)
    assert torch.equal(output.predictions, logits.sigmoid())
    assert torch.equal(output.targets, batch["label"].long())
    exact = sum(torch.equal(row > 0, label == 1) for row, label in zip(logits, batch["label"], strict=True))
    assert output.metric_sums == {"exact_match": torch.tensor(float(exact))}
    assert not recipe.lower_is_better("valid/exact_match")
    weighted = replace(recipe, class_weights=[1.0, 3.0])
    model.class_weights = torch.tensor([1.0, 3.0])
    terms = F.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none")
    torch.testing.assert_close(weighted.loss(model.train(), batch).loss_sum, (terms * torch.tensor([0.5, 1.5])).sum())


def test_mixed_images_have_the_labels_of_both() -> None:
    label = torch.tensor([[1.0, 1, 0], [0, 1, 0]])
    share = torch.tensor([0.25, 0.25])
    mixed = mixing.soft_targets(label, {mixing.SHARE: share}, 3)
    assert mixed.tolist() == [[0.25, 1, 0], [0.75, 1, 0]]


def test_metrics_are_scikit_learns_over_the_labels_that_occur() -> None:
    random = np.random.default_rng(0)
    shares = random.random((40, 5)).astype(np.float32)
    labels = (random.random((40, 5)) < shares).astype(int)
    labels[:, 3], shares[:, 4], labels[:, 4] = 0, 0.1, 0  # one is only given, one neither occurs nor is given

    class Data:
        multi_label, classes = True, list("abcde")

    metrics = Metrics(ResNet(), Data(), ["auroc", "f1_weighted"], torch.device("cpu"))
    for rows_of in (slice(0, 7), slice(7, 40)):
        output = LossOutput(torch.tensor(0.0), {}, torch.from_numpy(shares[rows_of]), torch.from_numpy(labels[rows_of]))
        metrics.update(output)
    found = metrics.values(World())
    given = shares > 0.5
    assert found["mAP"] == pytest.approx(average_precision_score(labels[:, :3], shares[:, :3]))
    assert found["f1_macro"] == pytest.approx(f1_score(labels[:, :4], given[:, :4], average="macro", zero_division=0))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels[:, :3], shares[:, :3]))
    assert found["f1_weighted"] == pytest.approx(f1_score(labels, given, average="weighted", zero_division=0))
    with pytest.raises(UserError, match=r"metrics=\[kappa\] is for one label"):
        Metrics(ResNet(), Data(), ["kappa"], torch.device("cpu")).update(output)
