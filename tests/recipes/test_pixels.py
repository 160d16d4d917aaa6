"""What a model gets of an image file is what a person sees of it, in training and in predict alike."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inference.predict import Photos
from recipes.data.images.folder import FolderImages
from trainer.data.contract import SampleId
from trainer.errors import UserError

SIDE = 16
RAMP = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
COLOURS = np.stack([RAMP, RAMP.T, 1 - RAMP], -1)
EIGHT = np.rint(COLOURS * 255).astype(np.uint8)
GREY = np.rint(RAMP * 255).astype(np.uint8)
ALPHA = np.where(RAMP > 0.5, 255, 0).astype(np.uint8)
ON_WHITE = np.where(ALPHA[..., None] == 255, EIGHT, 255)


def transparent_palette() -> Image.Image:
    image = Image.fromarray(np.tile(np.uint8([0, 1]), (SIDE, SIDE // 2)))
    image.putpalette([255, 0, 0, 9, 9, 9])
    return image


def turned(orientation: int, image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


def three(grey: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(grey)[..., None], 3, -1)


def cmyk() -> Image.Image:
    return Image.fromarray(EIGHT).convert("CMYK")


Seen = dict[str, tuple[str, Callable[[], "Image.Image | bytes"], Callable[[], np.ndarray], dict[str, object]]]
# The name of the file, what it holds, what a person sees (height × width × 3), options of Pillow's save.
MODES: Seen = {
    "RGB": ("x.png", lambda: Image.fromarray(EIGHT), lambda: EIGHT, {}),
    "BMP": ("x.BMP", lambda: Image.fromarray(EIGHT), lambda: EIGHT, {}),
    "lossless WebP": ("x.webp", lambda: Image.fromarray(EIGHT), lambda: EIGHT, {"lossless": True}),
    "grey": ("x.png", lambda: Image.fromarray(GREY), lambda: three(GREY), {}),
    "1 bit": ("x.png", lambda: Image.fromarray(RAMP > 0.5), lambda: three(ALPHA), {}),
    "16 bits": ("x.png", lambda: Image.fromarray((RAMP * 65535).astype(np.uint16)), lambda: three(RAMP * 255.99), {}),
    "16 bits, TIFF": (
        "x.tif",
        lambda: Image.fromarray((RAMP * 65535).astype(np.uint16)),
        lambda: three(RAMP * 256),
        {},
    ),
    "floats": ("x.tiff", lambda: Image.fromarray(RAMP.astype(np.float32)), lambda: three(GREY), {}),
    "alpha": ("x.png", lambda: Image.fromarray(np.dstack([EIGHT, ALPHA])), lambda: ON_WHITE, {}),
    "colour in alpha only": (
        "x.png",
        lambda: Image.fromarray(np.dstack([EIGHT * 0, 255 - GREY])),
        lambda: three(GREY),
        {},
    ),
    "grey and alpha": (
        "x.png",
        lambda: Image.fromarray(np.dstack([GREY, ALPHA])),
        lambda: three(np.where(ALPHA == 255, GREY, 255)),
        {},
    ),
    "palette": ("x.png", transparent_palette, lambda: EIGHT * 0 + np.uint8([[255, 0, 0], [9, 9, 9]] * (SIDE // 2)), {}),
    "transparent palette": (
        "x.png",
        transparent_palette,
        lambda: EIGHT * 0 + np.uint8([[255, 255, 255], [9, 9, 9]] * (SIDE // 2)),
        {"transparency": 0},
    ),
    "a transparent colour": (
        "x.png",
        lambda: Image.fromarray(three(ALPHA)),
        lambda: EIGHT * 0 + 255,
        {"transparency": (0, 0, 0)},
    ),
    "GIF": ("x.gif", lambda: Image.fromarray(GREY), lambda: three(GREY), {}),
    "CMYK": ("x.tif", cmyk, lambda: np.asarray(cmyk().convert("RGB")), {}),
    "upside down": ("x.png", lambda: turned(3, Image.fromarray(EIGHT[::-1, ::-1].copy())), lambda: EIGHT, {}),
    "on its side": ("x.png", lambda: turned(6, Image.fromarray(np.rot90(EIGHT).copy())), lambda: EIGHT, {}),
    "mirrored": ("x.png", lambda: turned(2, Image.fromarray(EIGHT[:, ::-1].copy())), lambda: EIGHT, {}),
    "an orientation that is none": ("x.png", lambda: turned(99, Image.fromarray(EIGHT)), lambda: EIGHT, {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_sees_what_a_person_sees(mode: str, tmp_path: Path) -> None:
    name, made, seen, options = MODES[mode]
    file, content = tmp_path / name, made()
    file.write_bytes(content) if isinstance(content, bytes) else content.save(file, **options)
    train = FolderImages([str(file)], torch.tensor([0]))
    train.image_size, train.augment = SIDE, Photos([], {"image_size": SIDE, "evaluated_part": 1.0}).augment
    trained = train.batch([SampleId(0, None)])["image"]
    predicted = Photos([file], {"image_size": SIDE, "evaluated_part": 1.0}).batch([SampleId(0, None)])["image"]
    assert torch.equal(trained, predicted)
    assert np.abs(trained[0].permute(1, 2, 0).numpy() - seen().astype(float)).max() <= 1


def test_a_photo_on_its_side_is_cut_upright(tmp_path: Path) -> None:
    """Its middle square is that of the picture a person sees; both are of its shorter side, but only one is turned."""
    wide = np.random.default_rng(0).integers(0, 256, (20, 60, 3), dtype=np.uint8)
    for number, (file, pixels) in enumerate((("a.png", wide), ("b.png", np.rot90(wide).copy()))):
        (tmp_path / file).write_bytes(turned(6 if number else 1, Image.fromarray(pixels)))
    both = Photos([tmp_path / "a.png", tmp_path / "b.png"], {"image_size": 20, "evaluated_part": 1.0})
    one, other = both.batch([SampleId(0, None), SampleId(1, None)])["image"]
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.float32([[-3, 812]]), "its values are -3 to 812, not 0 to 1"),
        (np.float32([[0, np.nan]]), "its values are nan to nan, not 0 to 1"),
        (np.int32([[-1, 70000]]), "its values are -1 to 70000, not 0 to 65535"),
    ],
)
def test_numbers_without_a_known_range_are_refused(values: np.ndarray, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.tif"
    Image.fromarray(np.repeat(np.repeat(values, 4, 0), 4, 1)).save(file)
    with pytest.raises(UserError, match=rf"x\.tif cannot be decoded \({message}\)"):
        FolderImages([str(file)], torch.tensor([0])).image(0)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp", "gif", "bmp", "avif", "jp2", "ppm"])
def test_a_damaged_file_is_named_whatever_its_decoder_raises(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"x.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
    whole, found = file.read_bytes(), 0
    for start in range(0, len(whole), max(1, len(whole) // 40)):
        file.write_bytes(whole[:start] + bytes(60) + whole[start + 60 :] if start % 2 else whole[:start])
        with suppress(UserError):  # and nothing else
            FolderImages([str(file)], torch.tensor([0])).image(0)
            continue
        found += 1
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"{file} cannot be decoded \("):
        FolderImages([str(file)], torch.tensor([0])).image(0)
    assert found
