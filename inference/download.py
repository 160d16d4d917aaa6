"""Downloads the best weights of a run from MLflow: ``run=mlflow:RUN_ID``, from any tracking server."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import UserError, redacted
from trainer.files import BEST, PRECISION_FILE, SUMMARY_FILE, TOKENIZER, read_config
from trainer.tracking.fetch import downloading, fetched_run, run_id_of

_FILES = {"config.json", PRECISION_FILE, SUMMARY_FILE, TOKENIZER, BEST}


def fetch(given: str) -> Path:
    """Return a folder with the config and the best weights of ``mlflow:RUN_ID`` or ``runs:/RUN_ID``, downloaded once.

    It is ``outputs/mlflow-RUN_ID``, a folder of its own, because no run can be resumed without checkpoints.

    Raises:
        UserError: there is no such run, it has no weights there, or the server does not answer.
    """
    run_id = run_id_of("run", given)
    target = Path("outputs", f"mlflow-{run_id}")
    if read_config(target / "config.json"):
        return target
    partial = target.with_name(f".{target.name}.partial")
    with fetched_run(f"run={given}", run_id, None, "outputs") as (client, run), downloading(partial):
        print(f"fetching the best weights of {run.info.run_name} from MLflow at {redacted(str(client.tracking_uri))}")
        for name in _FILES.intersection(item.path for item in client.list_artifacts(run_id)):
            client.download_artifacts(run_id, name, str(partial))
        if not (partial / BEST).is_dir():
            raise UserError(
                f"run={given}: MLflow has no weights of this run: it has not ended, or is not sent completely "
                "(scripts/sync.py sends it from where it was trained); choose another run"
            )
        partial.rename(target)
    return target
