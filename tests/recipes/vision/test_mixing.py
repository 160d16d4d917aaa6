"""Mixup and CutMix: what is drawn from the samples' seeds, what becomes of pixels and labels."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from recipes.data.images import mixing
from recipes.data.images.arrays import Digits
from recipes.data.images.augment import ImageAugment, ImageNet, Light, RandAugment, TrivialAugment
from recipes.data.images.pixels import DecodedImages, square
from recipes.vision import objective
from tests.helpers import compose, trainer_of
from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError

SIZE = 16


def samples(count: int, first: int = 0) -> list[SampleId]:
    return [SampleId(index, 1000 + index) for index in range(first, first + count)]


def drawn(count: int, **options: float) -> Batch:
    return mixing.draw(ImageAugment(**options), samples(count), SIZE)


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, SIZE, SIZE, generator=generator).contiguous(memory_format=torch.channels_last)


# ----------------------------------------------------------------------------------------------- what is drawn


def test_nothing_is_drawn_in_evaluation_and_without_the_options() -> None:
    assert mixing.draw(ImageAugment(mixup=1), [SampleId(0, None), SampleId(1, None)], SIZE) == {}
    assert drawn(4) == {}


def test_both_images_of_a_pair_have_its_draw_and_microbatches_do_not_change_it() -> None:
    augment = ImageAugment(mixup=0.4, cutmix=1.0)
    whole = mixing.draw(augment, samples(8), SIZE)
    parts = [mixing.draw(augment, samples(2, first), SIZE) for first in range(0, 8, 2)]
    for name, tensor in whole.items():
        assert torch.equal(tensor, torch.cat([part[name] for part in parts]))
    assert torch.equal(whole["share"][::2], whole["share"][1::2])
    assert torch.equal(whole["pasted"][::2], whole["pasted"][1::2])
    assert len(whole["share"].unique()) == 4


def test_shares_and_boxes_have_the_published_distributions() -> None:
    alpha = 0.2
    mixed = drawn(4000, mixup=alpha)
    shares = mixed["share"][::2].double()
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)  # of Beta(alpha, alpha)
    assert not mixed["pasted"].any()

    cut = drawn(2000, cutmix=1.0)
    left, top, right, bottom = cut["pasted"].unbind(1)
    assert ((left >= 0) & (top >= 0) & (right <= SIZE) & (bottom <= SIZE)).all()
    torch.testing.assert_close(cut["share"], 1 - ((right - left) * (bottom - top) / SIZE**2).float())
    assert 0.6 < cut["share"].mean() < 0.75  # above one half: boxes are cut off at the edge
    either = drawn(2000, mixup=0.2, cutmix=1.0)["pasted"][:, 2] > 0
    assert 0.4 < either.float().mean() < 0.55  # half of the pairs, and a few boxes are empty


# --------------------------------------------------------------------------------------- pixels and labels


def test_mixup_blends_pixels_and_labels_of_a_pair_by_one_share() -> None:
    before, batch = images(4), {"label": torch.tensor([1, 2, 3, 3])} | drawn(4, mixup=0.8)
    after, share = mixing.apply(before.clone(), batch), batch["share"]
    for image, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        torch.testing.assert_close(after[image], share[image] * before[image] + (1 - share[image]) * before[other])
    expected = torch.zeros(4, 5)
    expected[0, 1], expected[0, 2], expected[1, 2], expected[1, 1] = share[0], 1 - share[0], share[0], 1 - share[0]
    expected[2:, 3] = 1
    torch.testing.assert_close(mixing.soft_targets(batch["label"], batch, 5), expected)
    assert after.is_contiguous(memory_format=torch.channels_last)
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    own, other = (
        F.cross_entropy(logits, labels, reduction="none") for labels in (batch["label"], batch["label"][[1, 0, 3, 2]])
    )
    torch.testing.assert_close(objective.cross_entropy(logits, batch), (share * own + (1 - share) * other).sum())
    three = drawn(3, mixup=0.8)
    assert torch.equal(mixing.apply(before[:3].clone(), three)[2], before[2])  # it has no neighbour


def test_cutmix_takes_exactly_the_box_from_the_neighbour() -> None:
    before, batch = images(64), drawn(64, cutmix=1.0)
    after = mixing.apply(before.clone(), batch)
    for image, (left, top, right, bottom) in enumerate(batch["pasted"].tolist()):
        expected = before[image].clone()
        expected[:, top:bottom, left:right] = before[image ^ 1, :, top:bottom, left:right]
        assert torch.equal(after[image], expected)
    assert (batch["share"] < 1).any()


# ------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("augment", [RandAugment(), TrivialAugment(), RandAugment(operations=1, magnitude=30)])
def test_a_policy_changes_the_crop_and_depends_on_the_samples_seed_alone(augment: ImageNet) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 80, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    def cut(augment: ImageAugment, seed: int | None) -> np.ndarray:
        return square(image, 24, augment.view(80, 50, seed, 24))

    cropped, every = ImageNet(), range(20)
    first = [cut(augment, seed) for seed in every]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = [cut(augment, seed) for seed in every]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    changed = sum(not np.array_equal(one, cut(cropped, seed)) for one, seed in zip(first, every, strict=True))
    assert changed >= 10  # one of the operations is to change nothing
    assert np.array_equal(cut(augment, None), cut(cropped, None))
    assert (first[0].shape, first[0].dtype) == ((3, 24, 24), np.uint8)


class OneImage(DecodedImages):
    image_size = 16

    def image(self, index: int) -> Image.Image:
        return Image.new("RGB", (20, 20))


@pytest.mark.parametrize("augment", [ImageAugment(), Light(), ImageNet(), RandAugment(), TrivialAugment()])
def test_a_dataset_says_whether_its_batches_use_the_global_generator(
    augment: ImageAugment, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = OneImage(torch.tensor([0]), "error")
    decoded.augment = augment
    for dataset in (decoded, augment.applied(Digits().images(16)).train):
        generator = Mock(wraps=torch.default_generator)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "default_generator", generator)
            dataset.batch([SampleId(0, 1)])
        assert dataset.uses_global_generator is generator.manual_seed.called


# ------------------------------------------------------------------------------------------- in training

RUN = (
    "recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "augment=light", "augment.mixup=0.4", "augment.cutmix=1",
    "batch_size=8", "steps=3", "recipe.label_smoothing=0.1",
)  # fmt: skip


def test_training_and_evaluation_may_have_sizes_of_their_own() -> None:
    trainer = trainer_of(*RUN, "recipe.image_size=32", "recipe.train_image_size=24", "steps=1")
    (batch,) = next(trainer.batches())
    assert batch["image"].shape == (8, 3, 24, 24)
    assert batch["pasted"].max() <= 24
    assert trainer.datasets.valid.batch([SampleId(0, None)])["image"].shape == (1, 3, 32, 32)
    trainer.train_step([batch])
    with pytest.raises(UserError, match=r"recipe\.train_image_size=24"):
        trainer_of(*RUN, "recipe.arch=vit_b_32", "recipe.image_size=32", "recipe.train_image_size=24")


def test_training_sees_mixed_images_and_evaluation_does_not() -> None:
    mixed, plain = trainer_of(*RUN), trainer_of(*RUN[:3], *RUN[5:])
    assert mixed.evaluate() == plain.evaluate()
    seen: list[Tensor] = []
    mixed.model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    (batch,) = next(mixed.batches())
    mixed.recipe.loss(mixed.model, batch)
    pixels = mixed.model.normalise(batch["image"], torch.channels_last)  # type: ignore[operator]
    assert torch.equal(seen[0], mixing.apply(pixels, batch))
    assert not torch.equal(seen[0], pixels)


# --------------------------------------------------------------------------------------------- the loss


def test_bce_is_timms() -> None:
    from timm.loss import BinaryCrossEntropy

    generator = torch.Generator().manual_seed(0)
    logits, label = torch.randn(6, 5, generator=generator), torch.tensor([0, 4, 2, 2, 1, 3])
    for smoothing, threshold in ((0.0, None), (0.1, None), (0.1, 0.2)):
        ours = objective.binary_cross_entropy(logits, {"label": label}, smoothing, None, threshold)
        torch.testing.assert_close(ours / 6, BinaryCrossEntropy(smoothing, threshold)(logits, label))


def test_balanced_weights_are_scikit_learns_and_reach_the_training_loss_only() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    recipe = compose("recipe=resnet", "recipe.arch=resnet18", "recipe.class_weights=balanced").recipe
    data = Digits().images(32)
    labels = data.train.labels  # type: ignore[attr-defined]
    data.train.labels = labels = torch.where(labels == 3, 4, labels)  # type: ignore[attr-defined]
    weights = objective.class_weights("balanced", data)
    assert weights is not None
    present = np.unique(labels.numpy())
    expected = compute_class_weight("balanced", classes=present, y=labels.numpy())
    torch.testing.assert_close(weights[present].double(), torch.from_numpy(expected), rtol=1e-6, atol=0)
    assert weights[3] == 1
    assert weights[labels].mean() == pytest.approx(1)

    torch.manual_seed(0)
    model, batch = recipe.build_model(data).eval(), data.train.batch(samples(8))
    evaluated = recipe.loss(model, batch).loss_sum
    assert evaluated == replace(recipe, class_weights=None).loss(model, batch).loss_sum
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    model.train().forward = lambda images: logits  # type: ignore[method-assign]
    expected_loss = F.cross_entropy(logits, batch["label"], weights, reduction="sum")
    torch.testing.assert_close(recipe.loss(model, batch).loss_sum, expected_loss)
    bce = replace(recipe, criterion="bce")
    assert bce.loss(model, batch).loss_sum < recipe.loss(model, batch).loss_sum
