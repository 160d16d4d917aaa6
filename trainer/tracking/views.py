"""How MLflow's page opens on an experiment: which columns and charts, kept as tags of the experiment.

MLflow's page keeps what a user has arranged in the browser. A view that is to be shared is stored as a tag, by its
"Share" button, and opened by an address with the tag's key; the same tags are written here. The form is that of
MLflow 3.5 to 3.17; a version that does not know it shows its default view.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

VIEW = "mantissa"
COMPARISON = "mantissa-compare"
_TAG = "mlflow.sharedViewState."
_COLUMNS = (
    *("tags.`precision`", "metrics.`best/valid_loss`", "metrics.`final/throughput`"),
    *("metrics.`final/peak_memory_mib`", "attributes.`Duration`"),
)
_BARS = ("final/throughput", "final/peak_memory_mib", "best/valid_loss")
_LINES = ("valid/loss", "loss", "grad_norm", "step_time_s")


def share_views(client: MlflowClient, experiment_id: str, run_ids: list[str]) -> None:
    """Store the views of an experiment, where they are not stored as they should be.

    Args:
        client: of the store.
        experiment_id: the experiment's.
        run_ids: the runs that ``COMPARISON`` is to show.

    Raises:
        Exception: of many kinds, when the store does not take them.

    """
    runs = ", ".join(f"'{run_id}'" for run_id in run_ids)
    known = client.get_experiment(experiment_id).tags
    # In the order of time, MLflow hides the runs of a comparison below their parent, and draws nothing of them.
    chosen = {"searchFilter": f"attributes.run_id IN ({runs})", "orderByKey": "tags.`mlflow.runName`"}
    for key, state in ((VIEW, _state()), (COMPARISON, {**_state(), **chosen, "orderByAsc": True})):
        value = json.dumps(state, separators=(",", ":"))
        if known.get(_TAG + key) != value:
            client.set_experiment_tag(experiment_id, _TAG + key, value)


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
