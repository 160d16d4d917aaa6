from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.data.images.arrays import Digits
from recipes.resnet import Normalise, ResNet
from tests.helpers import context
from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError


def ready(**options: object) -> ResNet:
    return ResNet(**{"arch": "resnet18"} | options).resolve(context(Digits()))[0]


def built(recipe: ResNet) -> Any:
    return recipe.build_model(recipe.datasets(Digits(), seed=0))


def some_digits(count: int) -> Batch:
    return Digits().images(32).train.batch([SampleId(index, 1) for index in range(count)])


class Stub(nn.Module):
    """Records its input, and returns a given output."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        data = Digits().images(32)
        self.normalise = Normalise(data.mean, data.std)

    def forward(self, images: Tensor) -> Tensor:
        self.images = images
        return self.logits


def test_the_head_has_the_classes_of_the_data() -> None:
    recipe = ready()
    assert built(recipe).fc.out_features == 10
    assert recipe.image_size == "auto"  # as typed: a resumed run is compared by it


@pytest.mark.parametrize("arch", ["alexnet", "inception_v3", "maxvit_t", "vit_h_14"])
def test_images_too_small_for_an_architecture_are_refused(arch: str) -> None:
    with pytest.raises(UserError, match=r"set recipe\.image_size=…"):
        built(ready(arch=arch))


@pytest.mark.parametrize(
    ("arch", "size"),
    [("googlenet", 32), ("regnet_y_400mf", 32)],
)
def test_architectures_with_constructors_of_their_own_train(arch: str, size: int) -> None:
    recipe = ready(arch=arch, image_size=size)
    model = built(recipe)
    batch = Digits().images(size).train.batch([SampleId(index, 1) for index in range(2)])
    output = recipe.loss(model, batch)
    output.loss_sum.backward()
    assert output.loss_sum.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_and_images_have_the_requested_layout() -> None:
    for channels_last, layout in ((True, torch.channels_last), (False, torch.contiguous_format)):
        recipe = ready(channels_last=channels_last)
        assert built(recipe).conv1.weight.is_contiguous(memory_format=layout)
        stub = Stub(torch.zeros(4, 10))
        recipe.loss(stub, some_digits(4))
        assert stub.images.is_contiguous(memory_format=layout)


def test_images_reach_the_model_normalised_and_the_batch_stays_as_it_was() -> None:
    recipe = ready()
    stub, batch = Stub(torch.zeros(1000, 10)), some_digits(1000)
    before = batch["image"].clone()
    recipe.loss(stub, batch)
    assert torch.equal(batch["image"], before)
    data = Digits().images(32)
    expected = (before / 255 - data.mean[0]) / data.std[0]
    torch.testing.assert_close(stub.images, expected.contiguous(memory_format=torch.channels_last))
    assert stub.images.mean().abs() < 0.05
    assert stub.images.std() == pytest.approx(1, abs=0.05)


def test_loss_and_metrics_are_sums_that_metrics_turns_into_shares() -> None:
    recipe = ready()
    batch = some_digits(4)
    logits = torch.zeros(4, 10, dtype=torch.bfloat16)
    for row, rank in enumerate((0, 1, 4, 5)):  # the right answer comes first, second, fifth, sixth
        better = [digit for digit in range(10) if digit != batch["label"][row]][:rank]
        logits[row, better], logits[row, batch["label"][row]] = 2.0, 1.0
    output = recipe.loss(Stub(logits), batch)
    assert output.loss_sum.dtype == torch.float32
    torch.testing.assert_close(output.loss_sum, 4 * F.cross_entropy(logits.float(), batch["label"]))
    sums = {key: value.item() for key, value in output.metric_sums.items()}
    assert sums == {"top1": 1.0, "top5": 3.0}
    assert recipe.count_targets(batch) == recipe.count_units(batch) == 4
    assert recipe.report(2.5, sums, 4) == {"loss": 2.5, "top1": 0.25, "top5": 0.75}
    few = {"image": batch["image"], "label": batch["label"] % 4}
    assert set(recipe.loss(Stub(torch.zeros(4, 4)), few).metric_sums) == {"top1"}


def test_label_smoothing_is_for_training_only_and_predictions_for_evaluation() -> None:
    recipe, plain, batch = ready(label_smoothing=0.1), ready(), some_digits(4)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    stub = Stub(logits)
    trained = recipe.loss(stub.train(), batch)
    assert trained.loss_sum != plain.loss(stub, batch).loss_sum
    assert trained.predictions is None  # no reference to the graph
    assert recipe.loss(stub.eval(), batch).loss_sum == plain.loss(stub, batch).loss_sum
    shares = recipe.loss(stub, batch).predictions
    assert not shares.requires_grad
    assert torch.equal(shares, logits.softmax(1))
