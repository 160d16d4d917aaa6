"""``init_from`` of image classifiers: names, files, folders; the head, the normalisation, the learning rate."""

from __future__ import annotations

import json
import urllib.error
import urllib.response
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.data.images.pixels import IMAGENET_MEAN
from recipes.vision import architectures, pretrained
from tests.helpers import CPU, compose, fit, same_bits, start, trainer_of
from tests.recipes.test_folders import write
from trainer.config.settle import plan_of
from trainer.errors import UserError

ARCH = "shufflenet_v2_x0_5"
SMALL = ("recipe=resnet", f"recipe.arch={ARCH}", "batch_size=4", "steps=2", "eval_samples=8")


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """What stands for the published weights of 1,000 classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return torchvision.models.get_model(ARCH).state_dict()


@pytest.fixture
def hub(published: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of torch.hub, as after a download."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = torchvision.models.get_model_weights(ARCH)["IMAGENET1K_V1"].url
    file = tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(published, file)


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights in an exported folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def body(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}


def test_weights_of_torchvision_by_name_with_a_new_head_and_their_normalisation(
    hub: None, published: dict[str, Tensor]
) -> None:
    trainer = trainer_of(*SMALL, "init_from=IMAGENET1K_V1")
    state = trainer.model.state_dict()
    assert same_bits(body(state), body(published))
    assert state["fc.weight"].shape == (10, 1024)
    assert trainer.datasets.mean == IMAGENET_MEAN  # type: ignore[attr-defined]
    assert trainer.recipe.description(trainer.datasets)["mean"] == list(IMAGENET_MEAN)
    shift = torch.tensor((0.485, 0.456, 0.406)).view(1, 3, 1, 1) * 255
    torch.testing.assert_close(trainer.model.normalise.mean, shift)  # type: ignore[union-attr]
    (choice,) = (choice for choice in trainer.plan.decisions if choice.key == "init_from")
    assert "a new head for 10 classes (fc.weight, fc.bias); images are normalised with 0.485" in choice.why
    assert trainer.recipe.summary_fields(trainer.model, trainer.datasets)["pretrained"] == "IMAGENET1K_V1"


@pytest.mark.parametrize("nested", [True, False])  # of today's timm, and of its first ones on the hub
def test_a_folder_of_timm_on_the_hub_gives_its_normalisation(
    nested: bool, published: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(published, tmp_path / "model.safetensors")
    given = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    config = {"architecture": ARCH, "num_classes": 1000} | ({"pretrained_cfg": given} if nested else given)
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = trainer_of(*SMALL, f"init_from={tmp_path if nested else tmp_path / 'model.safetensors'}")
    datasets: Any = trainer.datasets
    assert (datasets.mean, datasets.std) == ((0.5,) * 3, (0.25,) * 3)
    assert same_bits(body(trainer.model.state_dict()), body(published))


def test_a_body_without_a_head_or_with_another_kind_of_head_gets_a_new_one(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    mlp = {"fc.0.weight": torch.ones(8, 1024), "fc.2.weight": torch.ones(4, 8)}
    for head in ({}, mlp):
        state = {f"module.encoder_q.{name}": tensor.half() for name, tensor in (body(published) | head).items()}
        torch.save({"epoch": 3, "state_dict": state}, tmp_path / "moco.pth.tar")
        trainer = trainer_of(*SMALL, f"init_from={tmp_path / 'moco.pth.tar'}")
        halved = {name: tensor.half().to(tensor.dtype) for name, tensor in published.items()}
        assert same_bits(body(trainer.model.state_dict()), body(halved))
        (choice,) = (choice for choice in trainer.plan.decisions if choice.key == "init_from")
        assert "its state_dict, the prefix module.encoder_q. removed; a new head for 10 classes" in choice.why


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported folder of a run on digits of 24 pixels."""
    folder = tmp_path_factory.mktemp("run") / "best"
    trainer = trainer_of(*SMALL, "recipe.image_size=24")
    fit(trainer)
    trainer.model.eval()
    trainer.recipe.export(trainer.model, trainer.datasets, folder)
    return folder


def test_the_folder_of_a_run_gives_architecture_size_head_and_normalisation(best: Path) -> None:
    trainer = trainer_of("recipe=resnet", f"init_from={best}", "batch_size=4", "steps=2")
    config, exported = opened(best)
    assert trainer.recipe.arch == ARCH  # type: ignore[attr-defined]
    assert trainer.datasets.image_size == 24  # type: ignore[attr-defined]
    assert same_bits(trainer.model.state_dict(), exported)
    assert list(trainer.datasets.mean) == config["mean"]  # type: ignore[attr-defined]


def test_other_classes_of_the_same_number_have_a_new_head(best: Path, tmp_path: Path) -> None:
    write(tmp_path / "photos", "{a,b,c,d,e,f,g,h,i,j}/{4}.png", height=30, width=30)
    photos = ("data=imagefolder", f"data.path={tmp_path / 'photos'}", "loader.workers=0")
    trainer = trainer_of(*SMALL, f"init_from={best}", "recipe.image_size=24", *photos)
    (_, exported), state = opened(best), trainer.model.state_dict()
    assert same_bits(body(state), body(exported))

    def head(*more: str) -> Tensor:
        weight: Tensor = trainer_of(*SMALL, f"init_from={best}", "recipe.image_size=24", *photos, *more).model.fc.weight
        return weight.detach().flatten()

    # The run was started with the same seed, and its head has hardly moved.
    for other in (exported["fc.weight"].flatten(), head("seed=1")):
        assert abs(torch.corrcoef(torch.stack([head(), other]))[0, 1]) < 0.1
    assert torch.equal(head(), state["fc.weight"].flatten())


def test_weights_of_timm_are_downloaded_under_its_name_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm
    from timm.models import _builder

    model = timm.create_model("test_vit")
    torch.nn.init.normal_(model.head.weight)
    wanted: list[str] = []

    def download(name: str, **_: object) -> dict[str, Tensor]:
        wanted.append(name)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    monkeypatch.setattr(_builder, "load_state_dict_from_hf", download)
    arch = "recipe.arch=timm/test_vit.r160_in1k"
    trainer = trainer_of(*SMALL, arch, "init_from=DEFAULT", "recipe.image_size=48")
    assert set(wanted) == {"timm/test_vit.r160_in1k"}
    state = trainer.model.state_dict()
    assert torch.equal(state["blocks.1.mlp.fc1.weight"], model.state_dict()["blocks.1.mlp.fc1.weight"])
    assert state["pos_embed"].shape[1] == 10 != model.state_dict()["pos_embed"].shape[1]  # resampled by timm
    assert state["head.weight"].shape[0] == 10
    assert trainer.datasets.mean == (0.5, 0.5, 0.5)  # type: ignore[attr-defined]


def test_pretrained_weights_lower_the_default_learning_rate_and_say_so() -> None:
    def rate(*overrides: str) -> tuple[float, list[str]]:
        plan = plan_of(compose("recipe=resnet", f"recipe.arch={ARCH}", *overrides), CPU)
        return plan.config.optimizer.lr, [choice.key for choice in plan.decisions]

    assert rate()[0] == 1e-3
    lr, keys = rate("init_from=DEFAULT")
    assert lr == 1e-4
    assert "optimizer.lr" in keys
    assert rate("init_from=DEFAULT", "optimizer=sgd")[0] == pytest.approx(0.1 * rate("optimizer=sgd")[0])


def test_the_folder_of_another_architecture_is_refused(best: Path) -> None:
    with pytest.raises(UserError, match=f"is a {ARCH}") as refused:
        plan_of(compose(*SMALL, f"init_from={best}", "recipe.arch=resnet18"), CPU)
    assert refused.value.remedies == (f"recipe.arch={ARCH}",)


@pytest.mark.parametrize("weights_of", ["squeezenet1_1", "shufflenet_v2_x1_0"])
def test_weights_of_another_model_are_refused_with_what_both_are(weights_of: str, tmp_path: Path) -> None:
    torch.save(architectures.build(weights_of, 160, 7).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"weights (do not fit this|are of another) model"):
        trainer_of(*SMALL, f"init_from={tmp_path / 'weights.pth'}")


def test_position_embeddings_are_interpolated_to_the_size_of_the_images() -> None:
    positions = torch.arange(10.0).reshape(1, 10, 1)  # of a class and 3 × 3 places
    state = {"encoder.pos_embedding": positions, "conv_proj.weight": torch.ones(1, 3, 16, 16)}
    resampled, note = pretrained.resampled(state, "vit_b_16", 32)
    assert resampled["encoder.pos_embedding"].flatten().tolist() == [0, 1, 3, 7, 9]  # the corners
    assert note == "position embeddings of 48 pixels interpolated to 32"
    assert pretrained.resampled(resampled, "vit_b_16", 32) == (resampled, "")
    assert pretrained.resampled(state, "resnet18", 32) == (state, "")


def test_the_order_in_which_classes_are_taken_is_said_of_weights_that_do_not_name_them(tmp_path: Path) -> None:
    write(tmp_path / "photos", "{0,1,2,10}/{4}.png", height=30, width=30)
    torch.save(architectures.build(ARCH, 30, 4).state_dict(), tmp_path / "weights.pth")
    photos = ("data=imagefolder", f"data.path={tmp_path / 'photos'}", "loader.workers=0")
    trainer = trainer_of(*SMALL, f"init_from={tmp_path / 'weights.pth'}", *photos)
    (choice,) = (choice for choice in trainer.plan.decisions if choice.key == "init_from")
    assert "its head is kept, whose outputs are taken for 0, 1, 10, 2;" in choice.why


def test_a_failed_download_names_a_file_as_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", offline)
    with pytest.raises(UserError, match=r"no route to host.* init_from=weights\.pth"):
        start(compose(*SMALL, "init_from=DEFAULT"))
    # A proxy's page instead of the file: nothing is kept of it.
    monkeypatch.setattr(
        "torch.hub.urlopen", lambda *_, **__: urllib.response.addinfourl(BytesIO(b"log in"), Message(), "")
    )
    with pytest.raises(UserError, match=r"invalid hash value.* init_from=weights\.pth"):
        start(compose(*SMALL, "init_from=DEFAULT"))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_what_keeps_weights_of_timm_from_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"downloaded or opened .*HF_HUB_OFFLINE"):
        start(compose(*SMALL, "recipe.arch=timm/test_resnet", "init_from=DEFAULT"))
