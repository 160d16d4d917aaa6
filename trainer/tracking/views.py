"""Shared views: the columns and charts with which MLflow's page opens, stored as tags of the experiment.

MLflow's page keeps what a user has arranged in the browser. A view that is to be shared is stored as a tag, by its
"Share" button, and opened by an address with the tag's key; the same tags are written here. The form is that of
MLflow 3.5 to 3.17; a version that does not know it shows its default view.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from trainer.errors import first_line

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

VIEW = "mantissa"
"""The key of the view of all runs."""
COMPARISON = "mantissa-compare"
"""The key of the view of the newest runs."""
_TAG = "mlflow.sharedViewState."
_COLUMNS = (
    *("tags.`precision`", "metrics.`best/valid_loss`", "metrics.`final/throughput`"),
    *("metrics.`final/peak_memory_mib`", "attributes.`Duration`"),
)
_BARS = ("final/throughput", "final/peak_memory_mib", "best/valid_loss")
_LINES = ("valid/loss", "loss", "grad_norm", "step_time_s")


def share_views(client: MlflowClient, experiment_id: str, run_ids: list[str], comparison: str = COMPARISON) -> bool:
    """Store the views of an experiment, unless they are there.

    Args:
        client: of the store.
        experiment_id: the experiment's.
        run_ids: the runs that the view ``comparison`` is to show.
        comparison: the key of that view.

    Returns:
        Whether the store has the views; if it cannot be written, there is a warning.
    """
    runs = ", ".join(f"'{run_id}'" for run_id in run_ids)
    # In the order of time, MLflow hides the runs of a comparison below their parent, and draws nothing of them.
    chosen = {"searchFilter": f"attributes.run_id IN ({runs})", "orderByKey": "tags.`mlflow.runName`"}
    try:
        known = client.get_experiment(experiment_id).tags
        for key, state in ((VIEW, _state()), (comparison, {**_state(), **chosen, "orderByAsc": True})):
            value = json.dumps(state, separators=(",", ":"))
            if known.get(_TAG + key) != value:
                client.set_experiment_tag(experiment_id, _TAG + key, value)
    except Exception as error:  # of many kinds: a store that may only be read is shown as it is
        log.warning("The columns and charts of this project cannot be stored in MLflow (%s).", first_line(error))
        return False
    return True


def _state() -> dict[str, Any]:
    sections = {"comparison": "Comparison", "curves": "Curves"}
    charts = [_chart("BAR", metric, "comparison") for metric in _BARS]
    parallel = {"selectedParams": ["precision.mode"], "selectedMetrics": list(_BARS), "showAllRuns": False}
    charts.append(_chart("PARALLEL", "", "comparison") | parallel)
    charts += [_chart("LINE", metric, "curves") for metric in _LINES]
    return {
        "selectedColumns": list(_COLUMNS),
        "compareRunCharts": charts,
        "compareRunSections": [
            {"uuid": key, "name": name, "display": True, "isReordered": False, "deleted": False, "isGenerated": False}
            for key, name in sections.items()
        ],
        "isAccordionReordered": True,
    }


def _chart(kind: str, metric: str, section: str) -> dict[str, Any]:
    chart: dict[str, Any] = {"type": kind, "uuid": f"{kind}-{metric}", "metricSectionId": section, "metricKey": metric}
    chart |= {"displayName": metric, "deleted": False, "isGenerated": False, "runsCountToCompare": 10}
    if kind == "LINE":
        chart |= {"selectedMetricKeys": [metric], "scaleType": "linear", "xAxisScaleType": "linear", "range": {}}
        chart |= {"xAxisKey": "step", "yAxisKey": "metric", "yAxisExpressions": [], "lineSmoothness": 0}
        chart |= {"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "selectedXAxisMetricKey": ""}
    return chart
