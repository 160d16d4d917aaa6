"""What training changes about images: which part of them is cropped, by which seed, and when nothing may change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data.images.arrays import Digits
from recipes.data.images.augment import AutomaticAugment, ImageAugment, ImageNet, Light, View
from recipes.data.images.folder import ImageFolder
from recipes.data.images.pixels import square
from recipes.data.images.source import ImageDatasets, ImageSource
from tests.helpers import context
from trainer.data.contract import SampleId


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def cut(image: Image.Image, size: int, augment: ImageAugment, seed: int | None) -> np.ndarray:
    return square(image, size, augment.view(*image.size, seed, size))


def opened(source: ImageSource, augment: ImageAugment, size: int | None = None) -> ImageDatasets:
    datasets = source.images(size)
    return augment.resolve(context(source, datasets=datasets))[0].applied(datasets)


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scikit-learn's digits, 8 × 8, as an image folder with the split of data=digits."""
    root = tmp_path_factory.mktemp("digits")
    data = Digits().images(8)
    for part, dataset in (("train", data.train), ("val", data.valid)):
        batch = dataset.batch([SampleId(index, None) for index in range(len(dataset))])
        for index, (image, label) in enumerate(zip(batch["image"], batch["label"], strict=True)):
            file = root / part / str(int(label)) / f"{index:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(file)
    return root


# -------------------------------------------------------------------------- the same images, however stored


def test_training_and_evaluation_see_the_same_pixels_from_a_folder_as_from_memory(digits_folder: Path) -> None:
    for augment in (AutomaticAugment(), Light(), ImageNet()):
        memory, folder = (opened(source, augment, 8) for source in (Digits(), ImageFolder(path=str(digits_folder))))
        for here, there in ((memory.train, folder.train), (memory.valid, folder.valid)):
            row = {int(Path(file.decode()).stem): index for index, file in enumerate(there.files)}
            for seed in (None, 5):
                one = here.batch([SampleId(index, seed) for index in range(50)])
                other = there.batch([SampleId(row[index], seed) for index in range(50)])
                assert torch.equal(one["image"], other["image"])
                assert torch.equal(one["label"], other["label"])


# ------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("augment", [ImageAugment(), Light(), ImageNet(), ImageNet(eval_crop=1.0)])
def test_evaluation_of_a_square_image_at_its_own_size_returns_it_unchanged(augment: ImageAugment) -> None:
    image = noise(97, 97)
    assert np.array_equal(cut(image, 97, augment, None).transpose(1, 2, 0), np.asarray(image))


def test_only_imagenet_evaluates_the_middle_of_a_square_image() -> None:
    # A white square on black, of 7/8 of the shorter side: exactly what evaluation keeps.
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[4:60, 36:92] = 255
    assert cut(Image.fromarray(pixels), 56, ImageNet(), None).min() == 255
    pixels[4] = 0
    assert cut(Image.fromarray(pixels), 56, ImageNet(), None)[:, 0].max() == 0
    assert cut(Image.fromarray(pixels), 56, Light(), None)[:, :3].max() == 0


# -------------------------------------------------------------------------------------------------- training


def test_light_shifts_by_whole_pixels_up_to_its_limit_and_repeats_the_edge() -> None:
    image = noise(32, 32)
    padded = np.pad(np.asarray(image), ((4, 4), (4, 4), (0, 0)), mode="edge").transpose(2, 0, 1)
    found = set()
    for seed in range(300):
        shifted = cut(image, 32, Light(), seed)
        places = [
            (down, right)
            for down in range(9)
            for right in range(9)
            if np.array_equal(shifted, padded[:, down : down + 32, right : right + 32])
        ]
        assert len(places) == 1  # a shift and nothing else: never mirrored
        found.add(places[0])
    assert {down for down, _ in found} == {right for _, right in found} == set(range(9))


def test_light_shifts_in_the_drawn_direction_and_mirrors_if_requested() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[2, 3] = 255
    moved = square(Image.fromarray(pixels), 8, View(shift=(0.25, 0.125)))
    assert moved[0].argmax() == 3 * 8 + 5
    assert square(Image.fromarray(pixels), 8, View(flip=True))[0].argmax() == 2 * 8 + 4
    assert 160 < sum(Light(flip=True).view(8, 8, seed, 8).flip for seed in range(400)) < 240


def test_imagenet_flips_half_of_the_time_and_crops_stay_within_the_stated_shapes() -> None:
    # Red grows to the right and green downwards, so a crop tells its own box.
    ramp = np.zeros((128, 128, 3), np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = 2 * np.arange(128)[None], 2 * np.arange(128)[:, None]
    image = Image.fromarray(ramp)
    flips, areas = 0, []
    for seed in range(400):
        red, green, _ = cut(image, 64, ImageNet(), seed).astype(float)
        across, down = red[:, -1].mean() - red[:, 0].mean(), green[-1].mean() - green[0].mean()
        flips += across < 0
        width, height = abs(across) * 64 / 63 / 2, down * 64 / 63 / 2
        areas.append(width * height / 128**2)
        assert 3 / 4 - 0.06 < width / height < 4 / 3 + 0.06
    assert 160 < flips < 240
    assert 0.07 < min(areas) < 0.12
    assert 0.85 < max(areas) < 1.02
    assert 0.4 < np.mean(areas) < 0.6


def test_imagenets_options_limit_the_crops() -> None:
    for seed in range(20):
        left, top, right, bottom = ImageNet(min_area=0.9, flip=False).view(100, 100, seed, 64).box or (0, 0, 0, 0)
        assert (right - left) * (bottom - top) >= 0.9 * 100 * 100 - 1e-6
        assert not ImageNet(flip=False).view(100, 100, seed, 64).flip
    assert ImageNet(eval_crop=0.5).view(100, 60, None, 60).box == (35, 15, 65, 45)


def test_odd_shapes_can_be_cut() -> None:
    for shape in ((1, 1), (1, 700), (700, 1), (2, 3)):
        for augment in (ImageAugment(), Light(), ImageNet()):
            for seed in (None, *range(20)):
                assert cut(noise(*shape), 16, augment, seed).shape == (3, 16, 16)
