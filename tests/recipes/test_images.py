from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.data.hub import Hub
from recipes.data.images.arrays import Digits
from recipes.data.images.augment import AutomaticAugment, ImageAugment, ImageNet
from recipes.data.images.folder import ImageFolder
from recipes.data.images.pixels import held_out
from recipes.data.images.source import ImageSource
from recipes.data.synthetic import Synthetic
from tests.helpers import context, same_bits
from tests.recipes.test_folders import write
from trainer.data.contract import SampleId
from trainer.errors import UserError


def plain(count: int, start: int = 0) -> list[SampleId]:
    return [SampleId(index, None) for index in range(start, start + count)]


# --------------------------------------------------------------------------------------------- digits


def test_digits_are_32_pixels_and_split_without_overlap_by_class() -> None:
    data = Digits().images(None)
    assert len(data.train) + len(data.valid) == 1797
    assert data.classes == [str(digit) for digit in range(10)]
    assert (data.image_size, data.decodes) == (32, False)
    train, valid = (part.batch(plain(len(part))) for part in (data.train, data.valid))
    assert train["image"].shape == (len(data.train), 3, 32, 32)
    assert train["image"].dtype == torch.uint8
    assert train["label"].dtype == torch.int64
    share = torch.bincount(valid["label"]) / (torch.bincount(valid["label"]) + torch.bincount(train["label"]))
    assert ((share > 0.18) & (share <= 0.2)).all()
    grey = train["image"][:, 0].float() / 255
    assert data.mean[0] == pytest.approx(grey.mean().item(), abs=1e-4)
    assert data.std[0] == pytest.approx(grey.std().item(), abs=1e-4)


def test_a_class_of_few_images_is_on_both_sides_of_a_split() -> None:
    labels = np.repeat([0, 1, 2, 3, 4, 5], [1, 2, 4, 9, 10, 25])
    for fraction in (0.01, 0.1, 0.5, 0.99):
        valid = held_out(labels, fraction)
        counts, held = np.bincount(labels), np.bincount(labels[valid], minlength=6)
        assert held[0] == 0
        assert ((held[1:] > 0) & (held[1:] < counts[1:])).all()
        assert (held[1:] <= np.maximum(counts[1:] * fraction, 1)).all()
    rows = np.flatnonzero(held_out(np.arange(1797) % 10, 0.2))  # which are held out does not change
    assert (len(rows), rows[:5].tolist()) == (357, [40, 41, 42, 43, 44])


# ---------------------------------------------------------------------------------------- imagefolder


def test_a_damaged_image_is_named_or_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = ImageFolder(path=str(write(tmp_path, "{cat,dog}/{10}.png", height=40, width=60))).images(16).train
    row = int(whole.labels.sum()) - 1  # the last cat, as many as dogs; a dog follows
    file, samples = Path(whole.files[row].decode()), plain(len(whole))
    content, name = file.read_bytes(), rf"cat/{file.stem}\.png"
    for damaged in (content[:-200], b"not an image", content[:300] + bytes(200) + content[500:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name} .*data\.on_error=skip"):
            ImageFolder(path=str(tmp_path)).images(16).train.batch(samples)
    expected = whole.batch([*samples[:row], samples[row + 1], *samples[row + 1 :]])
    skipping = ImageFolder(path=str(tmp_path), on_error="skip").images(16).train
    with caplog.at_level(logging.WARNING, "mantissa"):
        for found in (skipping.batch(samples), skipping.batch(samples[::-1]), skipping.batch(samples)):
            assert same_bits(found, expected) or same_bits({key: x.flip(0) for key, x in found.items()}, expected)
    assert len(re.findall(f"{name} cannot be decoded", caplog.text)) == 1
    assert skipping.unreadable.nonzero().tolist() == [[row]]
    for each in tmp_path.rglob("*.png"):
        each.write_text("not an image")
    with pytest.raises(UserError, match="not one of 18 images can be decoded"):
        ImageFolder(path=str(tmp_path), on_error="skip").images(16).train.batch(samples)


# ------------------------------------------------------------------------------------------ all sources


def test_auto_augments_photos_of_64_pixels_or_more_whatever_their_source(tmp_path: Path) -> None:
    mixed = {"mixup": 0.2, "cutmix": 1.0}

    def chosen(source: ImageSource, size: int) -> ImageAugment:
        datasets = source.images(size)
        augment, [shown] = AutomaticAugment(**mixed).resolve(context(source, datasets=datasets))
        assert (shown.key, shown.value) == ("augment", augment.kind)
        return augment

    plain, cropped = ImageAugment(**mixed), ImageNet(**mixed)
    assert chosen(Digits(), 224) == chosen(Synthetic(classes=2), 64) == plain
    for name, height, width, augment in (("small", 63, 200, plain), ("large", 200, 64, cropped)):
        folder = str(write(tmp_path / name, "{cat,dog}/{4}.png", height=height, width=width))
        assert chosen(ImageFolder(path=folder), 224) == augment
        assert chosen(Hub(name=folder, cache_dir=str(tmp_path / "cache")), 32) == augment
