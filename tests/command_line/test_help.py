"""What --help explains, the page of options, and tab completion."""

from __future__ import annotations

import re

import pytest

import mantissa
from tests.command_line.conftest import Train
from tests.helpers import PROJECT
from trainer.config import help
from trainer.config.explain import OTHER_NAMES, known_options


@pytest.mark.parametrize(
    ("arguments", "shown", "left_out"),
    [
        ("", "\n  muon  ", "optimizer.lr:"),
        (
            "recipe=gpt2 precision=fp8",
            "precision.fp8_scaling: str | null = tensorwise\n    Scales of fp8",
            "clip.max_value",
        ),
        ("recipe=gpt2 precision=fp8", "clip=norm: Gradient clipping.\n  none  ", "clip.max_value"),
        ("optimizer=muon", "optimizer.lr: float = 0.001\n    Peak", "seed:"),
        ("optimizer=sgd lr steps", "optimizer.lr: float = 0.1\n    Peak", "optimizer.name"),
        ("experiment", "\n  amp_mlp  ", "seed:"),
        ("experiment=amp_mlp", "steps: int | auto = 150\n", "clip.max_value"),
        ("ema=default ema.decay", "ema.decay: float = 0.999\n    Decay per step", "ema.warmup"),
        ("optimzer", "optimzer is not a key of the config; did you mean 'optimizer'?", "lr"),
        ("=optimizer.lr", "optimizer.lr: float = 0.001\n    Peak", "weight_decay"),
        (
            "data=digits data.path",
            "data.path belongs to data=imagefolder, data=text, data=tokens; add one of them",
            "lr",
        ),
    ],
)
def test_help_explains(arguments: str, shown: str, left_out: str, train: Train) -> None:
    done = train(*f"--help{' ' * (arguments[:1] != '=')}{arguments}".split())
    assert (done.code, bool(done.out)) in ((0, True), (2, False))
    assert shown in done.out + done.err
    assert left_out not in done.out + done.err
    assert "`" not in done.out


def test_the_page_of_options_is_up_to_date() -> None:
    page = help.markdown()
    assert (PROJECT / "docs" / "options.md").read_text(encoding="utf-8") == page, "run: python -m trainer.config.help"
    rows = [re.split(r" (?<!\\)\| ", line) for line in page.splitlines() if line.startswith("| `")]
    explained = {row[0].split("`")[1] for row in rows if len(row) > 2 and len(row[-1]) > 9}
    inner = {key.rpartition(".")[0] for key in known_options()}  # groups, and options within an option
    assert explained == known_options().keys() - inner
    for row in (
        r"`steps` | int \| auto | `auto` (`2` with `debug=fast`; `100` with `debug=overfit`)",
        "`optimizer.weight_decay` | float | `0.1` (`0.0` with `adafactor`, `adam`, `rmsprop`; `0.02` with `lamb`; ",
        "`recipe.dropout` | `bert`, `gpt2`, `t5` | float | `0.0` (`0.1` with `bert`, `t5`)",
        "`schedule.rise` | `onecycle` | float | `0.3`",
    ):
        assert f"\n| {row}" in page


@pytest.mark.parametrize(("group", "file"), [("recipe", "docs/recipes.md"), ("precision", "docs/precision.md")])
def test_every_recipe_and_format_has_a_row_on_its_page(group: str, file: str) -> None:
    page = (PROJECT / file).read_text(encoding="utf-8")
    names = sorted(path.stem for path in (PROJECT / "conf" / group).glob("*.yaml"))
    assert [name for name in names if f"\n| `{name}` | " not in page] == [], f"add a row to the first table of {file}"


def test_other_trainers_names_mean_options_of_this_one() -> None:
    meant = {other.partition("=")[0] for other in OTHER_NAMES.values()}
    groups = {path.name for path in (PROJECT / "conf").iterdir()}
    assert {key for key in meant - known_options().keys() - groups if not key.startswith("optimizer.options.")} == set()


def test_hydra_completes_what_is_typed(succeed: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "scripts/train.py recipe=b")
    assert {"recipe=bert", "recipe=bignet"} <= set(succeed("-sc", "query=bash").out.split())


def test_version_says_what_a_bug_report_needs(train: Train) -> None:
    done = train("--version")
    assert done.code == 0
    assert re.match(
        rf"Mantissa {re.escape(mantissa.__version__)}, commit .*\nPython 3\.\d+\.\d+, .*\ntorch \d", done.out
    )
