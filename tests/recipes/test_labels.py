"""A table of the labels of images: how it is read, or what is said instead; and training on several labels."""

from __future__ import annotations

import os
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
from tests.helpers import CPU, context
from tests.recipes.test_folders import write
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.metrics import Metrics
from trainer.parallel.world import World
from trainer.recipe import LossOutput

LABELS = "aabbaabbab"
PLAIN = "file_name,label\n" + "".join(f"{number}.png,{label}\n" for number, label in enumerate(LABELS))
TAGS = ["x", "x y", "", "y", "x", "y x", "y", "", "x", "y"]
SEVERAL = "file_name,x,y\n" + "".join(
    f"{number}.png,{int('x' in tags)},{int('y' in tags)}\n" for number, tags in enumerate(TAGS)
)


def opened(folder: Path, content: str, **options: Any) -> Any:
    if not (folder / "photos").exists():
        write(folder, "photos/{10}.png")
    (folder / "labels.csv").write_text(content, encoding="utf-8")
    return ImageFolder(path=str(folder / "photos"), labels=str(folder / "labels.csv"), **options).images(8)


def labels_of(data: Any) -> list[str]:
    """The label of each image, of all parts, by the names of the files; of several labels their names."""
    found = {}
    for part in filter(None, (data.train, data.valid, data.test)):
        for file, label in zip(part.files, part.labels, strict=True):
            chosen = [int(label)] if label.ndim == 0 else label.nonzero().flatten().tolist()
            found[Path(os.fsdecode(file)).stem] = " ".join(data.classes[number] for number in chosen)
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        "\ufeff" + PLAIN.replace(",", ", ").replace("\n", "\r\n\r\n"),
        PLAIN.replace("\n", ",9\n"),
        PLAIN.replace(",", " ,").replace("b\n", "b \n", 2),
    ],
)
def test_a_table_of_one_label_an_image(content: str, tmp_path: Path) -> None:
    data = opened(tmp_path, content.replace("label,9", "label,age"))
    assert (data.classes, data.multi_label) == (["a", "b"], False)
    assert labels_of(data) == list(LABELS)
    assert (len(data.train), len(data.valid)) == (8, 2)
    assert data.train.batch([SampleId(0, 1), SampleId(1, 1)])["label"].dtype == torch.int64


def test_columns_of_0_and_1_are_several_labels_an_image(tmp_path: Path) -> None:
    data = opened(tmp_path, SEVERAL)
    assert (data.classes, data.multi_label) == (["x", "y"], True)
    assert labels_of(data) == [" ".join(sorted(tags.split())) for tags in TAGS]
    assert "2 images without a label" in data.description
    label = data.train.batch([SampleId(0, 1), SampleId(1, 1)])["label"]
    assert (label.dtype, tuple(label.shape)) == (torch.float32, (2, 2))


def test_what_has_no_line_is_left_out(tmp_path: Path) -> None:
    data = opened(tmp_path, PLAIN[: PLAIN.index("6.png")])
    assert len(data.train) + len(data.valid) == 6
    assert "4 images without a line left out" in data.description


def test_a_column_or_folders_decide_the_parts(tmp_path: Path) -> None:
    words = ["split", "train", "train", "Val", "train", "test", "train", "train", "val", "train", "train"]
    data = opened(tmp_path, "".join(f"{line},{word}\n" for line, word in zip(PLAIN.split(), words, strict=True)))
    assert [len(part) for part in (data.train, data.valid, data.test)] == [7, 2, 1]
    assert "parts by column split" in data.description
    write(tmp_path / "b", "photos/{train,val}/{0,1,2,3}{a,b}.png")
    names = [f"{part}/{number}{label}" for part in ("train", "val") for number in range(4) for label in "ab"]
    data = opened(tmp_path / "b", "file_name,label\n" + "".join(f"{name}.png,{name[-1]}\n" for name in names))
    assert {Path(os.fsdecode(file)).parent.name for file in data.train.files} == {"train"}
    assert len(data.valid) == 8


REFUSED: dict[str, tuple[str, str]] = {
    # content; words of the message
    "nothing": ("", "has nothing in it"),
    "a heading alone": ("file_name,label\n", "0 rows"),
    "other columns": (PLAIN.replace("file_name", "id"), "the columns id, label and 10 rows; a table is"),
    "names alone": (PLAIN.replace(",label", "").replace(",", ""), "the columns file_name and 10 rows; a table is"),
    "a line with a column more": (PLAIN.replace("4.png,a", "4.png,a,b"), "line 6 has 3 columns, the first one has 2"),
    "a quote that does not end": (PLAIN.replace("4.png", '"4.png'), "cannot be read as a table"),
    "no such images": (
        PLAIN + "10.png,a\n11.png,b\n",
        "2 of 12 lines name no image in PATH/photos (which has 0.png, 1.png, 2.png, …): 10.png (line 12), 11",
    ),
    "one class": (PLAIN.replace("b", "a").replace("laael", "label"), "training images of one class only (a)"),
    "empty labels": (PLAIN.replace("4.png,a", "4.png,").replace("6.png,b", "6.png,"), "without a label (6, 8)"),
    "numbers": (
        "file_name,label\n" + "".join(f"{number}.png,{number * 1.5}\n" for number in range(10)),
        "label has 10 values in 10 rows, which are no classes",
    ),
    "one image in two lines": (PLAIN + "2.png,a\n", "lines 4 and 12 are both of 2.png"),
    "no 0 and 1": (SEVERAL.replace("1.png,1,1", "1.png,1,-1"), "line 3 has '-1' in column y"),
    "a split of another name": (
        "".join(f"{line},dev\n" for line in PLAIN.split()).replace("label,dev", "label,split"),
        "has 'dev', which is",
    ),
    "a class that is not trained": (
        "".join(f"{line},{'val' if line[-1] == 'b' else 'train'}\n" for line in PLAIN.split()).replace(
            "label,train", "label,split"
        ),
        "no training image has the label b",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_table_is_said(case: str, tmp_path: Path) -> None:
    content, words = REFUSED[case]
    with pytest.raises(UserError) as refused:
        opened(tmp_path, content)
    assert words in str(refused.value).replace(str(tmp_path), "PATH")


def test_a_table_in_another_encoding_and_a_folder_of_test_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no effect"):
        opened(tmp_path, PLAIN, test=str(tmp_path))
    (tmp_path / "labels.csv").write_text(PLAIN, encoding="utf-16")
    with pytest.raises(UserError, match="cannot be read as a table"):
        ImageFolder(path=str(tmp_path / "photos"), labels=str(tmp_path / "labels.csv")).images(8)


# --------------------------------------------------------------------------------------------- several labels: the loss


@pytest.fixture
def several(tmp_path: Path) -> Any:
    return opened(tmp_path, SEVERAL)


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
