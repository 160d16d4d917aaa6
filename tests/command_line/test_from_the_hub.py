"""Models and datasets by their ids: what the commands do with a hub that answers, or does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.helpers import PROJECT
from tests.hub import Hub, served
from tests.recipes.test_hub import STORIES, labelled
from tests.recipes.test_pretrained import WORDS, write_model
from tests.recipes.test_text_classifier import classifier, reviews

Run = Callable[..., str]
SMALL = ("steps=1", "batch_size=2", "eval_samples=4", "tracking=local", "device=cpu", "profiler=none")
TOKEN = "hf_right"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """Models and datasets; not served yet."""
    hub, root = Hub(), tmp_path_factory.mktemp("repositories")
    write_model("gpt2", root / "gpt2")
    hub.add_model("tiny/distilbert", classifier(root / "distilbert"))
    hub.add_dataset("tiny/reviews", reviews(root / "reviews"))
    hub.add_model("tiny/gpt2", root / "gpt2")
    hub.add_model("tiny/tagged", root / "gpt2", revisions=("main", "v1.0", "refs/pr/1"))
    (root / "stories").mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"id": number, "story": story}) for number, story in enumerate(STORIES)]
        (root / "stories" / f"{split}.jsonl").write_text("\n".join(rows))
    hub.add_dataset("tiny/stories", root / "stories")
    gated = {"status": 401, "code": "GatedRepo", "token": TOKEN}
    hub.add_model("tiny/gated", root / "gpt2", **gated)
    hub.add_dataset("tiny/gated", root / "stories", **gated)
    import timm

    (root / "timm").mkdir()
    save_file(timm.create_model("test_vit").state_dict(), root / "timm" / "model.safetensors")
    hub.add_model("timm/test_vit.r160_in1k", root / "timm")
    labelled(root, ["cat", "dog"], train=[0, 1] * 10, test=[0, 1] * 2)
    hub.add_dataset("tiny/animals", root / "labelled")
    return hub


SERVING = """
import json, os, sys
import datasets, huggingface_hub.constants
from tests import forks, preloaded
for line in sys.stdin:
    words, cwd, environment, log = json.loads(line)
    if not (pid := os.fork()):
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        if "HF_HUB_OFFLINE" in environment:
            huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        forks.leave(forks.become(words, cwd, environment))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs commands, each in a fork. The libraries read the hub's address and their own folder once, at their import."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries keep what they download."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def program(hub: Hub, home: Path) -> Iterator[subprocess.Popen[str]]:
    with served(hub):  # which gives it its port
        own = {"HF_HOME": str(home), "HF_ENDPOINT": hub.address, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with subprocess.Popen(
        [sys.executable, "-c", SERVING], env=kept | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def run(hub: Hub, home: Path, program: subprocess.Popen[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("recipe=gpt2", …)``: train.py on a machine that has nothing yet; ``there=False``: the hub is gone."""
    shutil.rmtree(home, ignore_errors=True)
    home.unlink(missing_ok=True)
    home.mkdir()
    (folder / "text.txt").write_text(" ".join(f"w{(index * index) % WORDS}" for index in range(3000)))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    log = folder.parent / "log.txt"

    def train(*overrides: str, code: int = 0, there: bool = True) -> str:
        hub.asked.clear()
        hub.sent.clear()
        words = [str(PROJECT / "scripts" / "train.py"), *SMALL, *overrides]
        log.unlink(missing_ok=True)
        assert program.stdin
        assert program.stdout
        with served(hub) if there else nullcontext():
            program.stdin.write(json.dumps([words, str(folder), dict(os.environ), str(log)]) + "\n")
            program.stdin.flush()
            ended = int(program.stdout.readline())
        said = log.read_text()
        assert ended == code, said
        shutil.rmtree(folder / "outputs", ignore_errors=True)
        if code:
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            assert (len(errors), "Traceback" in said) == (1, False), said
            return errors[0].removeprefix("error: ")
        return said

    return train


TEXT = ("data=text", "data.path=text.txt", "recipe.context=32")
STORY = ("recipe=gpt2", "recipe.size=nano", "data=hub", "data.tokenizer=bytes")
SOURCES = {
    "gpt2": ("recipe=gpt2", "init_from=tiny/gpt2", *TEXT),
    "pull request": ("recipe=gpt2", "init_from=tiny/tagged@refs/pr/1", *TEXT),
    "text": (*STORY, "data.name=tiny/stories"),
    "streamed text": (*STORY, "data.name=tiny/stories", "data.max_tokens=9000"),
    "labels": ("recipe=text_classifier", "init_from=tiny/distilbert", "data.name=tiny/reviews"),
    "images": ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=hub", "data.name=tiny/animals"),
    "timm": ("recipe=resnet", "recipe.arch=timm/test_vit", "init_from=DEFAULT", "data=digits", "recipe.image_size=48"),
}


@pytest.mark.parametrize("options", SOURCES.values(), ids=SOURCES)
def test_a_new_machine_downloads_it_once_and_then_needs_no_hub(
    options: tuple[str, ...], run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*options)
    assert hub.sent
    run(*options)
    assert not hub.sent
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(*options)
    assert not hub.asked


LOG_IN = "check the id; if it is gated or private, get access on its page, then run hf auth login or set HF_TOKEN$"
FAILURES = {
    "init_from=tiny/missing": LOG_IN,
    "data.name=tiny/missing": LOG_IN,
    "init_from=tiny/gated": f"gated .*{LOG_IN}",
    "data.name=tiny/gated": f"gated .*{LOG_IN}",
    "data.name=tiny/stories@v9": "v9",
    "init_from=not an id": "Repo id must use alphanumeric chars",
}


@pytest.mark.parametrize("given", FAILURES)
def test_what_cannot_be_had_ends_in_one_sentence(given: str, run: Run) -> None:
    error = run(*(("recipe=gpt2", *TEXT) if given.startswith("init_from") else STORY), given, code=2)
    assert error.startswith(f"{given} ")
    assert re.search(FAILURES[given], error), error


@pytest.mark.parametrize("options", [SOURCES["gpt2"], SOURCES["text"]])
def test_a_token_opens_what_is_gated(options: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run(*(re.sub("tiny/.*", "tiny/gated", option) for option in options))


@pytest.mark.parametrize(("options", "offline"), [(SOURCES["gpt2"], True), (SOURCES["text"], False)])
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


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_file_of_the_cache_is_named(file: str, run: Run, hub: Hub, home: Path) -> None:
    run(*SOURCES["gpt2"])
    (kept,) = home.rglob(f"snapshots/*/{file}")
    kept.resolve().write_bytes(kept.read_bytes()[:100])
    assert "hf cache rm removes a damaged copy" in run(*SOURCES["gpt2"], code=2)


def test_a_home_that_cannot_be_written_is_named(run: Run, home: Path) -> None:
    home.rmdir()
    home.touch()
    assert str(home) in run(*SOURCES["gpt2"], code=2)
