from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.data.synthetic import TEACHER_RANK, Synthetic
from trainer.data.contract import SampleId


def ids(*indices: int) -> list[SampleId]:
    return [SampleId(index, 1) for index in indices]


def test_tokens_fill_the_vocabulary_and_half_of_them_can_be_foretold() -> None:
    data = Synthetic(vocab_size=1000).tokens(None)
    for part in (data.train, data.valid):
        assert part.dtype == np.uint16
        assert part.max() < 1000
        assert np.array_equal(part[1::2], (7 * part[::2].astype(int) + 3) % 1000)
    assert len(np.unique(data.train)) > 900
    assert not np.array_equal(data.train[: len(data.valid)], data.valid)
    assert np.array_equal(Synthetic(vocab_size=1000).tokens("any").train, data.train)


def test_an_image_is_a_function_of_its_index_and_validation_has_other_noise() -> None:
    first, second = (Synthetic(classes=10).images(16) for _ in range(2))
    one = first.train.batch(ids(4, 300, 4))
    other = second.train.batch([SampleId(300, 9), SampleId(4, None)])
    assert one["image"].shape == (3, 3, 16, 16)
    assert one["label"].tolist() == [4, 4, 4]  # 300 is the 44th image of the pool, and so of class 4
    assert torch.equal(one["image"][0], one["image"][2])
    assert not torch.equal(one["image"][0], one["image"][1])
    assert torch.equal(one["image"][:2].flip(0), other["image"])
    assert not torch.equal(one["image"][0], first.valid.batch(ids(4))["image"][0])


def test_images_follow_the_options() -> None:
    data = Synthetic(samples=800).images(None)
    assert (len(data.train), len(data.valid), data.image_size, len(data.classes)) == (800, 100, 224, 1000)
    pixels = data.train.batch(ids(*range(64)))["image"] / 255
    assert pixels.mean().item() == pytest.approx(data.mean[0], abs=0.02)
    assert pixels.std().item() == pytest.approx(data.std[0], abs=0.02)


def test_vectors_are_the_same_every_time_and_their_targets_a_function_of_them() -> None:
    data = Synthetic(samples=1024).vectors(32)
    assert (len(data.train), len(data.valid)) == (1024, 128)
    valid = data.valid.batch(ids(*range(128)))
    assert valid["x"].shape == valid["y"].shape == (128, 32)
    assert valid["x"].dtype == valid["y"].dtype == torch.float32
    assert torch.linalg.matrix_rank(valid["y"] - valid["y"].mean(0), tol=1e-3) == TEACHER_RANK
    again = Synthetic(samples=1024).vectors(32).train.batch(ids(5))
    assert torch.equal(again["y"], data.train.batch(ids(5))["y"])
