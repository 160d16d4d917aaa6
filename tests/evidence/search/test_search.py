"""Searches: their trials, what is pruned, and how they go on after a stop."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.pruners import NopPruner
from optuna.trial import TrialState

from evidence.search.search import main as search
from evidence.search.space import parse_space
from evidence.search.study import DATABASE, Search, open_study, studies
from trainer.errors import NonFiniteError, UserError
from trainer.trainer import Trainer

BIGNET = (
    *("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64", "eval_samples=4"),
    *("steps=4", "eval_every=2", "device=cpu", "study=it", "pruner=none"),
)
LR = "space.optimizer.lr=tag(log,interval(1e-4,1e-1))"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's SQLite file without a study, to be copied: making its tables takes a second."""
    path = tmp_path_factory.mktemp("optuna") / DATABASE
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    studies(path.parent)
    return path


@pytest.fixture
def outputs(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_database, tmp_path / "outputs" / DATABASE)
    return tmp_path / "outputs"


@pytest.fixture
def searched(outputs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert search([*BIGNET, "tracking=local", *arguments]) == 0
        return capsys.readouterr().out

    return run


def opened(outputs: Path, name: str = "x", typed: str = LR, trials: int = 3, seed: int = 0) -> Search:
    space, _ = parse_space([typed])
    study = open_study(name, outputs, {}, maximise=False, pruner=NopPruner())
    (outputs / "search" / name).mkdir(parents=True, exist_ok=True)
    return Search(study, outputs / "search" / name, space, trials, seed, {"metric": "valid/loss"})


def runs(outputs: Path) -> list[str]:
    return sorted(path.parent.name for path in outputs.glob("*/config.json"))


def study(outputs: Path) -> Any:
    return optuna.load_study(study_name="it", storage=studies(outputs))


def table(out: str) -> list[list[str]]:
    rows = out[out.index("\n\ntrial ") + 2 :].split("\n\n")[0].splitlines()[1:]
    return [row.split() for row in rows]


def test_a_search_trains_its_trials_and_ends_with_what_to_paste(searched: Callable[..., str], outputs: Path) -> None:
    out = searched(LR, "space.optimizer=choice(adamw,sgd)", "trials=3")
    assert runs(outputs) == ["it-t0", "it-t1", "it-t2"]
    rows = table(out)
    assert [row[5] for row in rows] == 3 * ["complete"]
    scores = [float(row[3]) for row in rows]
    assert scores == sorted(scores)
    best = json.loads((outputs / rows[0][-1] / "summary.json").read_text())
    assert best["best"]["value"] == pytest.approx(study(outputs).best_value)
    config = json.loads((outputs / rows[0][-1] / "config.json").read_text())
    assert f"paste:\noptimizer.lr={rows[0][1]} optimizer={rows[0][2]}\n" in out
    assert (config["optimizer.lr"], config["optimizer.name"].lower()) == (float(rows[0][1]), rows[0][2])
    assert "[I " not in out  # Optuna's own log
    assert f"optuna-dashboard sqlite:///{outputs.name}/optuna.db" in out

    proposed = [trial.params for trial in study(outputs).trials]
    out = searched(LR, "space.optimizer=choice(adamw,sgd)", "trials=4")
    assert out.startswith("study it: 3 of 4 trials")
    assert (out.count("trial 0: "), out.count("trial 3: ")) == (0, 1)
    assert [trial.params for trial in study(outputs).trials][:3] == proposed
    with pytest.raises(UserError, match=r"the study it in .* is another search \(space differ\); .* study=NAME"):
        searched("space.optimizer.lr=tag(log,interval(1e-4,1))", "trials=1")
    assert len(runs(outputs)) == 4


def test_the_proposals_depend_on_the_seed_and_the_trials_number_only(outputs: Path) -> None:
    def proposals(name: str, seed: int, *counts: int) -> list[float]:
        for count in counts:
            made = opened(outputs, name, "space.x=interval(0,1)", count, seed)
            made.run(lambda trial: (trial.params["x"] - 0.3) ** 2)
        return [trial.params["x"] for trial in made.study.trials]

    whole = proposals("a", 1, 12)  # more than the ten of TPE that are random
    assert whole == proposals("b", 1, 4, 12)
    assert whole[:2] != proposals("c", 2, 2)
    assert len(set(whole)) == 12


def test_a_stopped_search_is_continued_with_the_run_that_was_stopped(
    searched: Callable[..., str], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def interrupted(trainer: Trainer, microbatches: Any) -> Any:
        if trainer.config.run_name == "it-t1" and trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step(trainer, microbatches)

    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            searched(LR, "trials=3")
    out = searched(LR, "trials=3")
    assert "resumed after step 3" in (outputs / "search" / "it" / "it-t1.log").read_text()
    assert runs(outputs) == ["it-t0", "it-t1", "it-t3"]  # Optuna's trial 2 continued the run of trial 1
    states = [trial.state for trial in study(outputs).trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    stopped, again = study(outputs).trials[1:3]
    assert stopped.params == again.params
    assert sorted(again.intermediate_values) == [2, 4]  # also what was reported before the stop
    assert sorted(row[-1] for row in table(out)) == ["it-t0", "it-t1", "it-t3"]


def test_a_pruned_trial_closes_its_run_and_the_study_is_a_tag(
    searched: Callable[..., str], outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna.trial.Trial, "should_prune", lambda trial: trial.number == 1)
    out = searched(LR, "trials=2")
    summary = json.loads((outputs / "it-t1" / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["tags"]) == ("KILLED", 2, {"group": "it"})
    assert [row[-2:] for row in table(out)] == [["complete", "it-t0"], ["pruned", "it-t1"]]
    assert study(outputs).trials[1].intermediate_values.keys() == {2}


def test_a_run_that_turns_non_finite_has_failed_and_the_search_goes_on(outputs: Path) -> None:
    made = opened(outputs)

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 0:
            raise NonFiniteError("the gradients are not finite")
        return 1.0

    made.run(objective)
    states = [trial.state for trial in made.study.trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


def test_a_metric_that_does_not_exist_is_refused_before_training(searched: Callable[..., str], outputs: Path) -> None:
    with pytest.raises(
        UserError, match=r"^metric=valid/top1 is not a metric of this recipe \(valid/loss\); set metric=valid/loss"
    ):
        searched(LR, "metric=valid/top1")
    assert runs(outputs) == []
    assert optuna.get_all_study_names(studies(outputs)) == []


def test_a_trial_whose_process_was_killed_is_taken_again_as_the_same_run(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, other = opened(outputs), opened(outputs)
    with pytest.warns(UserWarning, match="Heartbeat"):  # which a killed process does not give any more
        trial = killed.study.ask(fixed_distributions=killed.space)
    trial.set_user_attr("run", "x-t0")
    stale = [trial._trial_id]
    monkeypatch.setattr(
        type(other.study._storage), "_get_stale_trial_ids", lambda *_: [stale.pop()] if stale else [], raising=False
    )
    names: list[str] = []

    def objective(taken: optuna.Trial) -> float:
        names.append(other.run_of(taken))
        return float(taken.params["optimizer.lr"])

    other.run(objective)
    assert names == ["x-t0", "x-t2", "x-t3"]
    first, again = other.study.trials[:2]
    assert (first.state, again.params) == (TrialState.FAIL, first.params)
    assert len(other.counted()) == 3
