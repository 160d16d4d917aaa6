"""The advice as an experiment: it composes to what was measured, whatever the user has set."""

from __future__ import annotations

import shlex
from pathlib import Path

from evidence.advice.experiment import PREFIX, comparison, write
from evidence.comparison.command import planned
from tests.evidence.advice.made import TINY, advice, measured
from trainer.config.compose import CONF, compose
from trainer.config.registration import flatten

SENTENCE = "bf16 + compile: 2.9x [2.85, 2.95] as fast as fp32, 38 % less memory, numerics healthy"


def composed(command: str, conf: Path) -> dict[str, object]:
    """The config of a printed command line, with ``conf`` in the place of the project's."""
    script, *arguments = shlex.split(command)[1:]
    assert script == "scripts/train.py"
    return flatten(compose([f"hydra.searchpath=['file://{conf}']", *arguments]))


def test_the_file_is_the_winners_command_line_and_says_where_it_is_from(tmp_path: Path) -> None:
    made = advice(measured("x", 3.5, 400, "precision=bf16", "micro_batch_size=2", "threads=1"), winner="x")
    command, path = write(made, SENTENCE, tmp_path)
    assert path == tmp_path / "experiment" / "advised_gpt2_a_cpu_2_cores.yaml"
    assert f"conf/experiment/{PREFIX}*" in (CONF.parent / ".gitignore").read_text().splitlines()
    text = path.read_text()
    head = " ".join(text.partition("defaults:")[0].replace("\n# ", " ").split())
    assert text.startswith("# @package _global_\n")
    for words in (command, SENTENCE, "2026-11-22", "torch 2.15.0", "A CPU", "0123456789"):
        assert words in head
    found = composed(command, tmp_path)
    assert found == flatten(compose([*TINY, "precision=bf16", "micro_batch_size=2", "threads=1"]))


def test_a_users_own_experiment_weights_and_odd_values_stay(tmp_path: Path) -> None:
    text = tmp_path / "it's a text.txt"
    text.write_text("a b c " * 100)
    given = ["experiment=shakespeare_cpu", f"data.path={text}", "precision.fp32_modules=[lm_head]", "compile=default"]
    made = advice(overrides=[*given, "tracking=local", "output_dir=elsewhere"])
    command, path = write(made, SENTENCE, tmp_path)
    assert path is not None
    assert "elsewhere" not in path.read_text()
    found = composed(command, tmp_path)
    assert found == flatten(compose([*given, "precision=bf16"]))
    assert (found["recipe.context"], found["data.path"], found["compile.mode"]) == (64, str(text), "default")


def test_what_the_command_line_decides_by_itself_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    given = [*TINY, f"recipe.pretrained={tmp_path / 'best'}"]
    command, _ = write(advice(overrides=given), SENTENCE, tmp_path)
    wanted = flatten(compose([*given, "precision=bf16", "compile=default"]))
    assert wanted["optimizer.lr"] != flatten(compose([*TINY]))["optimizer.lr"]  # lower, for weights that are given
    assert composed(command, tmp_path) == wanted


def test_the_comparison_is_of_the_winner_and_the_baseline() -> None:
    made = advice(overrides=[*TINY, "seed=3", "output_dir=elsewhere"])
    script, *arguments = shlex.split(comparison(made))[1:]
    assert script == "scripts/compare.py"
    plan = planned(arguments)
    assert plan.common == [*TINY]
    arms = {arm.label: arm.overrides for arm in plan.arms}
    assert (plan.baseline, arms["baseline"]) == ("baseline", ())
    assert arms["advised"] == ("precision=bf16", "compile=default")


def test_where_no_file_can_be_written_or_none_can_say_it_there_is_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, conf in ((TINY, tmp_path / "file"), ([*TINY, "~optimizer.options.betas"], tmp_path)):
        command, path = write(advice(overrides=given), SENTENCE, conf)
        assert (path, list(tmp_path.rglob("*.yaml"))) == (None, [])
        assert command == shlex.join(["python", "scripts/train.py", *given, "precision=bf16", "compile=default"])
