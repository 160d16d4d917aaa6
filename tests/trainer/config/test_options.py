"""Options of the scripts that are not Hydra's, as they are typed; help, errors and exit codes."""

from __future__ import annotations

import runpy
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import PROJECT
from trainer.config.options import parse, run
from trainer.errors import RunError, UserError

SCRIPTS = sorted(path.stem for path in (PROJECT / "scripts").glob("*.py") if path.stem != "train")


@dataclass
class Options:
    output_dir: Path = Path("outputs")
    uri: str = ""
    runs: int = 6
    seed: int = 0
    ratio: float = 0.5
    all: bool = False
    only: list[str] = field(default_factory=list)


def test_options_and_other_arguments_are_separated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    options, paths = parse(["uri=sqlite:///x.db?a=b", "outputs/run", "a=b", "runs=3"], Options, "paths")
    assert options == Options(uri="sqlite:///x.db?a=b", runs=3)
    assert paths == ["outputs/run", "a=b"]
    typed = ["precision=bf16", "optimizer.lr=", "lr=1", "arm.rnus=x", "space.steps=range(1,2)"]
    assert parse([*typed, "all=true"], Options, "overrides") == (Options(all=True), typed)


def test_values_have_the_types_of_their_fields() -> None:
    typed = ["output_dir='my runs'", "seed=0", "ratio=1e-3", "all=False", "only=[a, b]"]
    assert parse(["~optimizer.options.betas"], Options, "overrides")[1] == ["~optimizer.options.betas"]
    assert parse(typed, Options)[0] == Options(Path("my runs"), ratio=0.001, only=["a", "b"])
    assert parse(["only=a,b", "output_dir=~"], Options)[0] == Options(Path.home(), only=["a", "b"])


@pytest.mark.parametrize("typed", ["--list", "--strat=1"])
def test_a_script_with_options_of_its_own_points_to_its_help(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/reproduce.py"])
    with pytest.raises(UserError, match=r"; reproduce\.py --help, and of training train\.py --cfg job, shows all"):
        parse([typed], Options, "overrides")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--output-dir=here", "--output-dir=here: options have no dashes; set output_dir=here"),
        ("--runs", "--runs: options have no dashes"),
        ("rusn=3", "; set runs=3"),
        ("uri=", "uri= has no value"),
        ("runs", "'runs' is not an option (output_dir, uri, runs, seed, ratio, all, only); write key=value"),
        ("runs=0", "runs=0 must be a whole number of at least 1"),
        ("runs=1.5", "runs=1.5 must be a whole number"),
        ("seed=-1", "seed=-1 must be a whole number of at least 0"),
        ("ratio=half", "ratio=half must be a number, such as 0.001"),
        ("all=maybe", "all=maybe must be true or false"),
    ],
)
def test_mistakes_are_one_sentence(argument: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse([argument], Options)
    assert message in str(caught.value)


def test_an_option_that_is_typed_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"^runs is typed twice, and takes one value; set runs=2 or runs=3$"):
        parse(["runs=2", "runs=3", "x=1", "x=2"], Options, "overrides")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("x=1 is wrong"), 2, "error: x=1 is wrong\n"),
        (RunError("it failed"), 1, "error: it failed\n"),
        (
            PermissionError(13, "Permission denied", "a/b"),
            2,
            "error: a/b: Permission denied; correct that, or give another path\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_an_error_is_a_line_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str]) -> int:
        raise error

    handler = signal.getsignal(signal.SIGTERM)
    assert run(main, "help", ["x=1"]) == code
    assert capsys.readouterr() == ("", message)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_only_train_py_takes_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert run(lambda arguments: 0, "help", ["x=1"]) == 2
    assert "leave out torchrun" in capsys.readouterr().err


def test_sigterm_ends_a_script_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: list[str]) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    assert run(main, "help", ["x=1"], continues=True) == 130
    assert capsys.readouterr().err == "\ninterrupted; run the same command again to continue\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_help_and_refuses_a_mistake(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(PROJECT / "scripts" / f"{name}.py")
    for mistake, arguments in enumerate((["x=1", "--help"], ["--mistake"])):
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        assert ended.value.code == 2 * mistake
        out, err = capsys.readouterr()
        assert (f"python scripts/{name}.py" in out, "Exit code: 0" in out) == 2 * (not mistake,)
        assert "`" not in out
        assert err.startswith("error: --mistake") == bool(mistake)
