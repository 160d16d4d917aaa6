"""What README and docs show works: commands, examples, and the options that the text names.

Commands of training are tiny. Those of README.md take two steps; those of the other pages are accepted up to where a
run would begin. Where a command cannot run here, the reason is named.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.run as torchrun

import mantissa
import trainer
from evidence.search.space import PREFIX, check_space, parse_space
from tests.command_line.conftest import Train
from tests.command_line.mistakes import Began, begin
from tests.helpers import PROJECT
from trainer.config.compose import combinations, compose
from trainer.config.explain import known_options
from trainer.run.run import Run

TRAIN = "python scripts/train.py"

# What is not run here, by how it begins; its options are checked. Other tests run most of them.
ELSEWHERE = (
    # Installs, downloads, or needs another machine.
    "source .venv/bin/activate", "pip ", "make ", "sbatch ", f"{TRAIN} -m hydra/launcher=submitit_slurm",
    f"{TRAIN} recipe=gpt2 data=hub data.name=wikitext", f"{TRAIN} recipe=gpt2 data=hub data.name=HuggingFaceFW",
    f"{TRAIN} recipe=resnet recipe.arch=resnet18 init_from=DEFAULT", f"{TRAIN} recipe=causal_lm init_from=",
    f"{TRAIN} recipe=text_classifier",
    # Takes several processes, or minutes.
    "torchrun ", "python benchmarks/bench.py", "python scripts/advise.py",
    "python scripts/compare.py", "python scripts/layers.py", "python scripts/lr_range.py",
    "python scripts/max_batch.py", "python scripts/reproduce.py claim=", "python scripts/search.py",
    "python scripts/sync.py", "python scripts/ui.py",
    # Fails on purpose, or needs a file that the reader writes.
    "python scripts/doctor.py",
    f"{TRAIN} recipe=t5 data=synthetic", f"{TRAIN} recipe=llama recipe.size=nano",
    f"{TRAIN} recipe=gpt2 recipe.size=nano debug=overfit", f"{TRAIN} recipe=tumour",
    f"{TRAIN} recipe_path=my/folder",
    f"{TRAIN} resume=mlflow:RUN_ID", "python scripts/evaluate.py run=outputs/photos split=test",
    "python scripts/predict.py run=outputs/photos path=new_photos",
)  # fmt: skip
SMALL = {
    "gpt2": ("recipe.context=32",),
    "causal_lm": ("recipe.context=16", "data.tokenizer=bytes"),
    "resnet": ("recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "loader.workers=0"),
    "bignet": ("recipe.layers=2", "recipe.width=8", "data.samples=16"),
}
# The runs that commands use, by their folders.
BEFORE = {
    "outputs/gpt2-bf16-s0": ["recipe=gpt2", "precision=bf16"],
    "outputs/gpt2-fp32-s0": ["recipe=gpt2", "precision=fp32"],
    "outputs/photos": ["recipe=resnet", "precision=bf16", "data=imagefolder", "data.path=photos", "run_name=photos"],
}
WHOLE = ("README.md", "comparing.md")
"""Pages whose trainings run to their end; those of the others up to where a run begins."""
WORD = r"'?[a-z_]+(?:\.[a-z_0-9]+)*=[^\s<…|\\'\"]+'?"


PAGES = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"(?:#|\$|``)?\s*((?:[A-Z_]+=\S+ )*"
    r"(?:python (?:scripts/|benchmarks/[bg])|torchrun |make |sbatch |pip |docker |source )[^`]*)"
)


def commands(path: Path) -> list[str]:
    """The command lines of a page: indented, or within the text; continued lines joined."""
    text = re.sub(r"\\\n\s*#?\s*", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"#!/bin/bash(\n    .*)*", "", text)  # a script, where comments are comments
    spans = re.findall(r"`((?:python (?:scripts/|benchmarks/[bg])|torchrun )[^`\n…<]+)`", text)
    lines = [*(line for line in text.splitlines() if line.startswith("    ")), *spans]
    return [re.sub(r"  +#.*", "", found[1]).strip() for line in lines if (found := COMMAND.match(line.strip()))]


def documented() -> dict[str, str]:
    """Every command of the pages, and the page that has it first; those with a ``NAME`` to fill in are left out."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in commands(page):
            if "NAME" not in command:
                found.setdefault(command, page.name)
    return found


def elsewhere(command: str) -> bool:
    return command.startswith(ELSEWHERE)


def run_here(page: str) -> list[str]:
    return [command for command, first in documented().items() if first == page and not elsewhere(command)]


def small(arguments: list[str]) -> list[str]:
    """Overrides that make a training command tiny, except its number of steps."""
    given = dict(each.partition("=")[::2] for each in arguments)
    recipe = given.get("recipe", "gpt2")
    sizes = [*SMALL[recipe], "batch_size=4", "eval_samples=4", *(() if "profiler" in given else ("profiler=none",))]
    if recipe == "resnet" and {"freeze", "optimizer.groups"} & given.keys():  # which name layers of a ResNet
        sizes.append("recipe.arch=resnet18")
    if recipe == "gpt2" and "init_from" not in given:
        sizes += ["recipe.size=nano", *([] if "data.tokenizer" in given else ["data.tokenizer=bytes"])]
    return sizes


@pytest.fixture
def files(user_data: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own data, as the pages call it, and a standard library of a few modules."""
    for name, made in {"notes.txt": "texts/0.txt", "photos": "images"}.items():
        (folder / name).symlink_to(folder / made)
    rows = [[{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    images = [file.relative_to(folder / "images") for file in (folder / "images").rglob("*.png")]
    lines = [f"{image},{image.parent.name}\n" for image in images]
    (folder / "labels.csv").write_text("file_name,label\n" + "".join(lines))
    library = Path(sysconfig.get_path("stdlib"))
    (tmp_path / "library").mkdir()
    for name in ("abc", "ast", "bisect", "calendar", "cmd", "copy", "csv", "glob", "heapq", "inspect"):
        shutil.copy(library / f"{name}.py", tmp_path / "library")
    few = SimpleNamespace(get_path=lambda _: str(tmp_path / "library"))
    monkeypatch.setattr("recipes.data.text.corpus.sysconfig", few)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("page", sorted({path.name for path in PAGES if run_here(path.name)}))
def test_the_commands_of_a_page_run(
    page: str,
    train: Train,
    succeed: Train,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accepted(*overrides: str) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "begin", begin)
            try:
                return train(*overrides).code == 0
            except Began:
                return True

    steps = 2
    for command in run_here(page):
        script, *arguments = shlex.split(command)[1:]
        for run, first in BEFORE.items():
            if run in command and not (folder / run).exists():
                succeed(*first, *small(first), "steps=2", "tracking=local")
        if script != "scripts/train.py":
            given = small(arguments) if script == "scripts/memory.py" else []
            monkeypatch.setattr(sys, "argv", [script, *arguments, *given])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(PROJECT / script), run_name="__main__")
            assert ended.value.code in ((0, 1) if script == "scripts/diff.py" else (0,)), command
            assert capsys.readouterr().out
            continue
        until = any("precision.until=" in argument for argument in arguments)  # a share, which leaves a step to each
        added = [*small(arguments), "steps=5" if until else "steps=2", "tracking=local"]
        if {"--help", "--cfg"} & set(arguments):
            added = []
        elif any(argument.startswith("resume=outputs") for argument in arguments):
            steps += 2
            added = [f"steps={steps}"]
        typed = [argument for argument in arguments if not argument.startswith("epochs=")]
        if page not in WHOLE and added:
            sweep = [argument for argument in typed if argument != "-m"]
            for each in combinations(sweep).values() if "-m" in typed else [typed]:
                assert accepted(*each, *added), command
            continue
        done = train(*typed, *added)
        assert done.code == 0, f"{command}\n{done.out}{done.err}"
        assert done.out


def test_the_page_of_the_api_has_the_public_names() -> None:
    page = (PROJECT / "docs" / "api.md").read_text(encoding="utf-8")
    public = [f"{package.__name__}.{name}" for package in (mantissa, trainer) for name in package.__all__]
    assert sorted(re.findall(r"^::: ((?:mantissa|trainer)\.\w+)$", page, re.MULTILINE)) == sorted(public)


def test_every_command_is_run_here_or_elsewhere() -> None:
    found = documented()
    assert not [command for command in found if not (elsewhere(command) or command.startswith("python scripts/"))]
    assert not [start for start in ELSEWHERE if not any(command.startswith(start) for command in found)]


def own_options(script: str) -> set[str]:
    """The keys that are a script's own, as its help has them; the other keys of examples are train.py's."""
    text = ast.get_docstring(ast.parse((PROJECT / script).read_text(encoding="utf-8"))) or ""
    others = {path.name for path in (PROJECT / "conf").iterdir()} | {"micro_batch_size"}
    return set(re.findall(r"\b([a-z_]+)=", text)) - others


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", sorted(command for command in documented() if elsewhere(command)))
def test_what_is_not_run_here_has_options_that_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (PROJECT / "Makefile").read_text(encoding="utf-8")
    if words[0] == "sbatch":
        words = ["python", "scripts/train.py", *words[words.index("scripts/slurm/train.sbatch") + 1 :]]
    if words[0] == "torchrun":
        where = words.index("scripts/train.py")
        torchrun.get_args_parser().parse_args(words[words.index("torchrun") + 1 : where + 1])
        words = ["python", *words[where:]]
    if words[0] != "python" or "recipe=tumour" in words or "outputs/python" in command:  # the reader makes these
        return
    own = own_options(words[1]) if words[1] != "scripts/train.py" else set()
    # A run in MLflow would be fetched to be composed on; its address is no option to check.
    typed = [word for word in words[2:] if word != "-m" and "hydra" not in word and "mlflow:" not in word]
    others = [word for word in typed if word.partition("=")[0] not in own]
    if any(word.startswith(PREFIX) for word in others):
        space, others = parse_space(others)
        check_space(space, others)
    arms = [word.partition("=")[2].split() for word in others if word.startswith("arm.")]
    others = [word for word in others if not word.startswith("arm.")]
    modes = [f"precision={word.removeprefix('arms=')}" for word in typed if word.startswith("arms=")]
    for overrides in [*combinations([*others, *modes]).values(), *([*others, *arm] for arm in arms)]:
        compose(overrides)


@pytest.mark.parametrize(
    "page",  # the changelog names what was before
    [page for page in PAGES if page.name not in ("results.md", "CHANGELOG.md")],
    ids=lambda path: path.name,
)
def test_keys_and_choices_within_the_text_exist(page: Path) -> None:
    files = [*(PROJECT / "scripts").glob("*.py"), PROJECT / "benchmarks" / "bench.py"]
    scripts = set().union(*(own_options(str(path.relative_to(PROJECT))) for path in files))
    known = known_options()
    spans = dict.fromkeys(re.findall(rf"`({WORD}(?: {WORD})*)`", page.read_text(encoding="utf-8")))
    for word in [word for span in spans for word in shlex.split(span)]:
        key, _, value = word.partition("=")
        if (folder := PROJECT / "conf" / key).is_dir() and value[0] != "$":
            assert all((folder / f"{each}.yaml").exists() for each in value.split(",")), word
        else:
            free = any(key.startswith(f"{outer}.") for outer in ("optimizer.options", "optimizer.groups", "tags"))
            assert free or key in known.keys() | scripts | {"arms"}, word


def test_the_badges_say_what_the_project_says() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, after = re.findall(r"3\.(\d+)", project["requires-python"])
    oldest, newest = (
        re.findall(r"^torch==(\d+\.\d+)", (PROJECT / name).read_text(encoding="utf-8"), re.MULTILINE)[0]
        for name in ("constraints-oldest.txt", "constraints.txt")
    )
    said = {"license": project["license"], "python": f"3.{first}–3.{int(after) - 1}", "torch": f"{oldest}–{newest}"}
    for name, value in said.items():
        badge = (PROJECT / "docs/images/badges" / f"{name}.svg").read_text(encoding="utf-8")
        assert (badge.count(f"{name}: {value}"), badge.count(f">{value}<")) == (2, 1)


# --- docs/library.md, as it stands

LIBRARY = (PROJECT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL) if "import mantissa" in block]
SHOWN = re.findall(r"\n    (FOUND .*?)\n\n", LIBRARY, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    runpy.run_path("example.py")
    printed = capsys.readouterr().out
    if "examine" in EXAMPLES[number]:
        assert Path("report/report.html").is_file()
        wanted = ".*".join(re.escape(part) for part in re.sub("\n    ", "\n", SHOWN[0]).split("…"))
        assert re.search(wanted, printed, re.DOTALL), printed
    else:
        assert "requested: bf16" in printed
