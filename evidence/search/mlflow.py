"""A search in MLflow: a parent run, and the trials' runs below it. If MLflow does not answer, the search continues."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optuna.trial import TrialState

from evidence.search.space import shown
from evidence.search.study import Search, mlflow_key
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.tracking.mlflow.store import connect, create_run, cut, tracking_uri, valid_key

if TYPE_CHECKING:
    from mlflow import MlflowClient


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
        self._client: MlflowClient | None = None
        if not config.tracking.mlflow:
            return
        uri = tracking_uri(config.tracking.uri)
        experiment = config.tracking.experiment or config.recipe.name
        try:
            client = connect(uri)
            with search.alone():  # else two processes would create two
                run = create_run(client, uri, experiment, f"search-{search.name}", *mlflow_key(search))
            for key, value in described.items():
                if valid_key(key) not in run.data.params:
                    client.log_param(run.info.run_id, valid_key(key), cut(value, 500))
            if run.info.status != "RUNNING":
                client.update_run(run.info.run_id, status="RUNNING")
        except Exception as error:  # of many kinds, by MLflow and what lies below it
            self.problem = first_line(error)
            return
        self._client, self.run_id = client, str(run.info.run_id)

    def close(self, search: Search, metric: str, status: str) -> None:
        """Record the best trial and how this process ended: FINISHED or KILLED."""
        if self._client is None or self.run_id is None:
            return
        trials = search.counted()
        try:
            done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
            if done:
                best = search.study.best_trial
                point = f"best/{metric}"
                if self._client.get_run(self.run_id).data.metrics.get(valid_key(point)) != best.value:
                    self._client.log_metric(self.run_id, valid_key(point), best.value, step=len(trials))
                for key, value in best.params.items():
                    self._client.set_tag(self.run_id, valid_key(f"best.{key}"), shown(value))
            if all(trial.state != TrialState.RUNNING for trial in trials) or status != "FINISHED":
                self._client.set_terminated(self.run_id, status, int(time.time() * 1000))
        except Exception as error:
            self.problem = first_line(error)
