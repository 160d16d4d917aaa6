"""A search in MLflow: a parent run, and the trials' runs below it. If MLflow does not answer, the search continues."""

from __future__ import annotations

from typing import Any

from optuna.trial import TrialState

from evidence.search.space import shown
from evidence.search.study import Search, mlflow_key
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.mlflow.store import connect, publish


class Parent:
    """The run of the whole search. Several processes share it."""

    def __init__(self, config: Config, search: Search, described: dict[str, str]) -> None:
        """Create the run, or find it.

        Args:
            config: of a run of the search: where it is tracked.
            search: the study.
            described: the run's params.
        """
        self.run_id: str | None = None
        """MLflow's; None: MLflow is not used, or does not answer."""
        self.problem = ""
        """Why MLflow could not take the search."""
        self._config = config
        if config.tracking.mlflow:
            self._publish(search, params=described, status="RUNNING")

    def close(self, search: Search, metric: str, status: str) -> None:
        """Record the best trial and how this process ended: FINISHED or KILLED."""
        if self.run_id is None:
            return
        trials = search.counted()
        found: dict[str, Any] = {}
        if any(trial.state == TrialState.COMPLETE for trial in trials):
            best = search.study.best_trial
            found["metrics"] = {f"best/{metric}": best.value}
            found["tags"] = {f"best.{key}": shown(value) for key, value in best.params.items()}
        others_work = any(trial.state == TrialState.RUNNING for trial in trials) and status == "FINISHED"
        self._publish(search, **found, step=len(trials), status="RUNNING" if others_work else status)

    def _publish(self, search: Search, **what: Any) -> None:
        tracking = self._config.tracking
        uri, experiment = tracking_uri(tracking.uri), tracking.experiment or self._config.recipe.name
        key, began_s = mlflow_key(search)
        try:
            client = connect(uri)
            with search.alone():  # else two processes would create two
                run = publish(client, uri, experiment, f"search-{search.name}", key, started_s=began_s, **what)
            self.run_id = str(run.info.run_id)
        except Exception as error:  # of many kinds, by MLflow and what lies below it
            self.problem = first_line(error)
