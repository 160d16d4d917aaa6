"""Models and datasets by their ids: what the commands do with a hub that answers, or does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import forks
from tests.helpers import PROJECT
from tests.hub import Hub, served
from tests.recipes.test_hub import STORIES, labelled
from tests.recipes.test_pretrained import WORDS, words, write_model

Run = Callable[..., str]
SMALL = ("steps=1", "batch_size=2", "eval_samples=4", "tracking=local", "device=cpu", "profiler=none")
TOKEN = "hf_right"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """Models and datasets; not served yet."""
    hub, root = Hub(), tmp_path_factory.mktemp("repositories")
    for kind in ("gpt2", "llama", "bert", "t5"):
        write_model(kind, root / kind)
        hub.add_model(f"tiny/{kind}", root / kind)
    hub.add_model("gpt2", root / "gpt2")  # without the name of an owner
    hub.add_model("tiny/tagged", root / "gpt2", revisions=("main", "v1.0", "refs/pr/1"))
    for name, answer in {
        "gated": {"status": 401, "code": "GatedRepo", "token": TOKEN},
        "asked": {"status": 403, "code": "GatedRepo"},
    }.items():
        hub.add_model(f"tiny/{name}", root / "gpt2", **answer)
        (root / "stories").mkdir(exist_ok=True)
        for split in ("train", "validation"):
            rows = [json.dumps({"id": number, "story": story}) for number, story in enumerate(STORIES)]
            (root / "stories" / f"{split}.jsonl").write_text("\n".join(rows))
        hub.add_dataset(f"tiny/{name}", root / "stories", **answer)
    hub.add_dataset("tiny/stories", root / "stories")
    shutil.copytree(root / "gpt2", root / "binary")
    torch.save(load_file(root / "gpt2" / "model.safetensors"), root / "binary" / "pytorch_model.bin")
    (root / "binary" / "model.safetensors").unlink()
    hub.add_model("tiny/binary", root / "binary")
    from transformers import GPT2LMHeadModel

    words(root / "sharded", {"eos_token": "<|end|>"})
    GPT2LMHeadModel.from_pretrained(root / "gpt2").save_pretrained(root / "sharded", max_shard_size="20KB")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    hub.add_model("tiny/sharded", root / "sharded")
    import timm

    (root / "timm").mkdir()
    save_file(timm.create_model("test_vit").state_dict(), root / "timm" / "model.safetensors")
    hub.add_model("timm/test_vit.r160_in1k", root / "timm")
    labelled(root, ["cat", "dog"], train=[0, 1] * 10, test=[0, 1] * 2)
    hub.add_dataset("tiny/animals", root / "labelled")
    return hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries keep what they download. It is the same for all tests: they read its name only once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(hub: Hub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("recipe=gpt2", …)``: train.py on a machine that has nothing yet; ``served=False``: the hub is gone."""
    shutil.rmtree(home, ignore_errors=True)
    home.unlink(missing_ok=True)
    home.mkdir()
    (folder / "text.txt").write_text(" ".join(f"w{(index * index) % WORDS}" for index in range(3000)))
    monkeypatch.setenv("HF_HOME", str(home))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def train(*overrides: str, code: int = 0, there: bool = True) -> str:
        with ExitStack() as stack:
            hub.asked.clear()
            if there or not hub.port:
                stack.enter_context(served(hub))
            if not there:
                stack.close()
            monkeypatch.setenv("HF_ENDPOINT", hub.address)
            command = [sys.executable, str(PROJECT / "scripts" / "train.py"), *SMALL, *overrides]
            environment = os.environ | {"PYTHONPATH": str(PROJECT)}
            done = forks.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        shutil.rmtree(folder / "outputs", ignore_errors=True)
        if code:
            errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, done.stdout + done.stderr
            assert "Traceback" not in done.stdout + done.stderr
            return errors[0].removeprefix("error: ")
        return done.stdout + done.stderr

    return train


TEXT = ("data=text", "data.path=text.txt", "recipe.context=32")
STORY = ("recipe=gpt2", "recipe.size=nano", "data=hub", "data.tokenizer=bytes")
SOURCES = {
    **{kind: (f"recipe={kind}", f"init_from=tiny/{kind}", *TEXT) for kind in ("gpt2", "llama", "bert", "t5")},
    "no owner": ("recipe=gpt2", "init_from=gpt2", *TEXT),
    "binary": ("recipe=gpt2", "init_from=tiny/binary", *TEXT),
    "sharded": ("recipe=gpt2", "init_from=tiny/sharded", *TEXT),
    "revision": ("recipe=gpt2", "init_from=tiny/tagged@v1.0", *TEXT),
    "pull request": ("recipe=gpt2", "init_from=tiny/tagged@refs/pr/1", *TEXT),
    "tokenizer": ("recipe=gpt2", "recipe.size=nano", "data.tokenizer=tiny/gpt2", *TEXT),
    "text": (*STORY, "data.name=tiny/stories"),
    "images": ("recipe=resnet", "recipe.arch=resnet18", "data=hub", "data.name=tiny/animals"),
    "timm": ("recipe=resnet", "recipe.arch=timm/test_vit", "init_from=DEFAULT", "data=digits", "recipe.image_size=48"),
}


@pytest.mark.parametrize("options", SOURCES.values(), ids=SOURCES)
def test_a_new_machine_downloads_it_and_then_needs_no_hub(options: tuple[str, ...], run: Run, hub: Hub) -> None:
    run(*options)
    assert any("/storage/" in line for line in hub.asked)
    run(*options, there=False)


@pytest.mark.parametrize("options", [SOURCES["gpt2"], SOURCES["text"]])
def test_what_is_kept_is_not_downloaded_again(
    options: tuple[str, ...], run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*options)
    run(*options)
    assert not any("/storage/" in line for line in hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(*options)
    assert not hub.asked


LOG_IN = "check the id; if it is gated or private, get access on its page, then run hf auth login or set HF_TOKEN$"
FAILURES = {
    "missing": ("tiny/missing", LOG_IN),
    "gated": ("tiny/gated", f"gated .*{LOG_IN}"),
    "asked": ("tiny/asked", f"gated .*{LOG_IN}"),
    "revision": ("tiny/stories@v9", "v9"),
    "no id": ("not an id", "Repo id must use alphanumeric chars"),
}


@pytest.mark.parametrize("model", [True, False], ids=["model", "dataset"])
@pytest.mark.parametrize(("name", "message"), FAILURES.values(), ids=FAILURES)
def test_what_cannot_be_had_ends_in_one_sentence(model: bool, name: str, message: str, run: Run) -> None:
    options = ("recipe=gpt2", f"init_from={name}", *TEXT) if model else (*STORY, f"data.name={name}")
    error = run(*options, code=2)
    assert error.startswith(f"init_from={name} " if model else f"data.name={name} ")
    assert re.search(message, error), error


@pytest.mark.parametrize("options", [SOURCES["gpt2"], SOURCES["tokenizer"], SOURCES["text"]])
def test_a_token_opens_what_is_gated(options: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run(*(re.sub("tiny/.*", "tiny/gated", option) for option in options))


@pytest.mark.parametrize("options", [SOURCES["gpt2"], SOURCES["tokenizer"], SOURCES["text"]])
@pytest.mark.parametrize("offline", [True, False])
def test_without_the_hub_what_is_not_kept_is_not_asked_for(
    options: tuple[str, ...], offline: bool, run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries would try again and again, for half a minute."""
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    why = rf"{hub.address} does not answer \(.*{'HF_HUB_OFFLINE' if offline else 'refused'}.*\)"
    assert re.search(f"=tiny/.* is not complete in the local cache, and {why}; ", run(*options, there=offline, code=2))
    assert not hub.asked


def test_the_hub_goes_away_half_way_through_a_file(run: Run, hub: Hub) -> None:
    hub.dies = True
    message = run(*SOURCES["gpt2"], code=2)
    assert re.search(r"^init_from=tiny/gpt2 could not be downloaded \(.*\); try again$", message)
    run(*SOURCES["gpt2"])  # and it goes on


def test_a_connection_that_breaks_is_made_again(run: Run, hub: Hub) -> None:
    hub.breaks = 1
    run(*SOURCES["gpt2"])
    assert not hub.breaks


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_of_the_cache_is_named(file: str, run: Run, hub: Hub, home: Path) -> None:
    run(*SOURCES["gpt2"])
    (kept,) = home.rglob(f"snapshots/*/{file}")
    kept.resolve().write_bytes(kept.read_bytes()[:100])
    assert "hf cache rm removes a damaged copy" in run(*SOURCES["gpt2"], code=2)


@pytest.mark.parametrize("options", [SOURCES["gpt2"], SOURCES["text"]])
def test_a_home_that_cannot_be_written_is_named(options: tuple[str, ...], run: Run, home: Path) -> None:
    home.rmdir()
    home.touch()
    assert str(home) in run(*options, code=2)
