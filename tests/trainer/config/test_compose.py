"""From what is typed to a config: paths of any kind, and options that only another optimizer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.config import command_line
from trainer.config.command_line import quoted, read
from trainer.config.compose import combinations, compose
from trainer.config.registration import CONF, flatten
from trainer.config.resume import check_same
from trainer.errors import UserError
from trainer.run_folder import RunFolder

NAMES = [
    "mein Ordner ü",
    "it's \\'quoted\\'",
    'say "so"',
    "ends with \\",
    "a=b",
    "(1)",
    "a{b}",
    "日本語",
    "100%",
    "a;b",
]
TEXTS = [
    "a", "null", "5", "1e3", "it's", "back\\slash", "end\\", "a\\'b", '"', "mein Ordner ü", "a=b,c", "${x}", "{a}",
    "[1]", "", "a\nb", "sqlite:///x y.db",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_arrives_as_given(name: str, tmp_path: Path) -> None:
    for key, overrides in (("output_dir", []), ("data.path", ["data=text"])):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        config = compose([*overrides, f"{key}={path}"])
        value = getattr(config.data, "path", None) if key == "data.path" else config.output_dir
        assert value == str(path)


def test_what_hydra_can_read_is_not_changed() -> None:
    typed = [
        "--cfg",
        "job",
        "recipe=gpt2",
        "data.path='a b'",
        "data.path=a,b",
        "optimizer.options.eps=1",
        "~optimizer.options.betas",
    ]
    assert read(typed).arguments == typed
    assert read(["seed=1,2", "-m"]).arguments == ["-m", "seed=1,2"]  # argparse takes flags first only
    assert read(["seed=1", "--cfg", "job", "steps=2"]).arguments == ["--cfg", "job", "seed=1", "steps=2"]
    assert read(["seed=1", "--info", "steps=2"]).arguments == ["--info=all", "seed=1", "steps=2"]
    assert list(combinations(["run_name=ü ü", "seed=1,2"])) == ["seed=1", "seed=2"]


@pytest.mark.parametrize("override", ["steps==3", "steps=1 ü", "precision=ü"])
def test_only_text_is_quoted(override: str) -> None:
    with pytest.raises(UserError, match="is not an override"):
        compose([override])


def test_an_option_of_the_yaml_that_another_class_lacks_is_removed_by_the_user() -> None:
    config = compose(["optimizer.name=Adadelta", "~optimizer.options.betas", "optimizer.options={rho:0.8}"])
    assert config.optimizer.options == {"rho": 0.8}
    with pytest.raises(
        UserError,
        match=r"betas: Adadelta has no such argument; where a YAML sets it, ~optimizer.options.betas removes it",
    ):
        compose(["optimizer.name=Adadelta"])


@pytest.mark.parametrize("name", ["1e5", "007", "true", "1_000", "nan", "lr[1e-3]", "5", "yes", "0x10"])
def test_a_name_that_looks_like_a_number_stays_as_it_is(name: str) -> None:
    config = compose([f"run_name={name}", f"tags.team={name}", f"note={name}", "optimizer.lr=1e-3"])
    assert (config.name, config.tags, config.note, config.optimizer.lr) == (name, {"team": name}, name, 0.001)
    if "[" not in name:
        assert [compose(each).name for each in combinations([f"run_name={name},b"]).values()] == [name, "b"]


def test_a_recipe_without_a_yaml_is_known_by_its_name_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is not imported when the command line is read; what no file names is refused there."""
    (tmp_path / "conf").symlink_to(CONF)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tumour.py").write_text('class Tumour(Recipe):\n    name = "tumour"\n')
    monkeypatch.setattr(command_line, "CONF", tmp_path / "conf")
    assert read(["recipe=tumour"]).value("recipe") == "tumour"
    for name in ("null", "123", "gpt2,null", "tumor"):
        with pytest.raises(UserError, match="is not a choice"):
            read(["-m", f"recipe={name}"])


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1.0E+3", "1_000", "1000"])
def test_a_whole_number_may_be_typed_like_any_other(number: str) -> None:
    assert compose([f"steps={number}", f"run_name={number}", f"seed={number}"]).name == number
    for override in (f"batch_size={number}", f"schedule.warmup_steps={number}", f"eval_samples={number}"):
        key = override.partition("=")[0]
        found = flatten(compose([override]))[key]
        assert (found, type(found)) == (1000, int)
    assert [compose(each).steps for each in combinations([f"steps={number},2e0"]).values()] == [1000, 2]


@pytest.mark.parametrize("text", TEXTS)
def test_quoted_text_is_read_as_it_was(text: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(text)}")
    assert OmegaConf.to_container(OmegaConf.create({"key": override.value()}), resolve=True) == {"key": text}


def test_what_is_recorded_takes_the_place_of_the_defaults() -> None:
    groups = {"head": {"lr": 3.0}, "*.bias": {"lr": 1e-300}, "a,b": {"lr": 2.0}}
    recorded: dict[str, Any] = {"optimizer.name": "SGD", "optimizer.options": {}, "optimizer.groups": groups}
    recorded |= {"seed": 3, "output_dir": "${x}", "loader": "plain"}
    config = compose(["optimizer.lr=2", "optimizer.options.momentum=0.5"], recorded)
    assert list(config.optimizer.groups.items()) == list(groups.items())
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.options) == ("SGD", 2.0, {"momentum": 0.5})
    assert (config.seed, config.output_dir, config.loader.kind) == (3, "${x}", "plain")
    assert compose(["loader=pinned"], recorded).loader.kind == "pinned"
    assert compose([]).seed == 0


def recorded_run() -> list[str]:
    text = ["data=text", f"data.path={__file__}"]
    return ["recipe=gpt2", "recipe.size=nano", *text, "precision=bf16", "optimizer.lr=2"]


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, Any]:
    """The options of a run in the folder ``tmp_path``."""
    options = flatten(
        compose([*recorded_run(), "precision.modules={lm_head:fp32}", "loader.workers=3", "tracking=local"])
    )
    options |= {"resume": str(tmp_path), "output_dir": str(tmp_path.parent)}
    (tmp_path / "config.json").write_text(json.dumps(options))
    return options


@pytest.mark.parametrize("key", ["precision.modules", "optimizer.groups"])
def test_patterns_that_are_typed_take_the_place_of_those_before(key: str, tmp_path: Path, recorded: Any) -> None:
    """Merged with them, theirs would come first and last, and the order decides."""
    other = "fp32" if key == "precision.modules" else "{lr:3}"
    found = flatten(compose([*recorded_run(), f"{key}={{h.1:{other}}}"]))[key]
    recorded[key] = {"h.0": found["h.1"], "h.1": found["h.1"]}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    resumed = [f"resume={tmp_path}", f"{key}={{h.1:{other},h.0:{other}}}"]
    assert [*flatten(compose(resumed))[key]] == ["h.1", "h.0"]
    with pytest.raises(UserError, match=rf"cannot resume .*: {key} was"):
        check_same(RunFolder(tmp_path), recorded, flatten(compose(resumed)), resumed)
    assert not flatten(compose([f"resume={tmp_path}", f"{key}={{}}"]))[key]
    twice = compose([*recorded_run(), "precision.modules={h.0:bf16}", "precision.modules={h.1:fp32}"])
    assert twice.precision.modules == {"h.1": "fp32"}


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key, value in one.items() if other.get(key) != value}


def test_of_several_choices_of_a_group_the_last_counts(tmp_path: Path, recorded: dict[str, Any]) -> None:
    assert compose([f"resume={tmp_path}", "loader=plain", "loader=pinned"]).loader.kind == "pinned"
    assert compose([f"resume={tmp_path}", "loader=pinned", "loader=plain"]).loader.kind == "plain"


def test_a_choice_takes_the_place_of_all_options_of_its_group(recorded: dict[str, Any]) -> None:
    found = flatten(compose(["precision=bf16", "loader=pinned"], recorded))
    assert differing(found, recorded) == {"precision.modules", "loader.workers"}
