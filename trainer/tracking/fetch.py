"""Downloads a run from MLflow to resume it here: ``resume=mlflow:RUN_ID``, from any tracking server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import schema as checkpoint
from trainer.errors import UserError, first_line, redacted
from trainer.files import (
    CHECKPOINTS,
    RUN_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    TRACKING_FILE,
    add_run_facts,
    check_output_dir,
    locked,
    read_object,
)
from trainer.tracking.checkpoints import COMPANIONS, complete_steps
from trainer.tracking.follower import FOLDER_TAG
from trainer.tracking.refusal import refusal
from trainer.tracking.store import KEY_TAG, connect, database_file, find_run, storable_uri, tracking_uri
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient


def run_id_of(key: str, address: str) -> str:
    """Return the id in ``mlflow:RUN_ID`` or ``runs:/RUN_ID``, the value of the option ``key``.

    Raises:
        UserError: there is none.
    """
    match = re.fullmatch(r"(?:mlflow:|runs:/)(\w+)/?", address)
    if not match:
        raise UserError(f"{key}={address} is not a valid run; use {key}=mlflow:RUN_ID, with the id from MLflow's page")
    return match[1]


@contextmanager
def fetched_run(given: str, run_id: str, uri: str | None, output_dir: str) -> Iterator[tuple[MlflowClient, Any]]:
    """Open the store of a run that is to be downloaded; within it, MLflow's errors become the user's.

    Args:
        given: the option of the command line, such as ``resume=mlflow:RUN_ID``, for messages.
        run_id: MLflow's.
        uri: of the store, as the user has set it.
        output_dir: where the run's folder is made.

    Raises:
        UserError: there is no such run, the server does not answer, or the folder cannot be written.
    """
    check_output_dir(output_dir)
    store = tracking_uri(uri)
    database = database_file(store)
    if database is not None and not database.exists():
        raise UserError(f"{given}: there is no {database}; name the store in MLFLOW_TRACKING_URI")
    try:
        client = connect(store)
        run = find_run(client, run_id)
        if run is None:
            raise UserError(f"{given}: MLflow at {redacted(store)} has no such run; check the run's id")
        Path(output_dir).expanduser().mkdir(parents=True, exist_ok=True)
        yield client, run
    except UserError:
        raise
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        why = refusal(error, store)
        check = "" if isinstance(why, UserError) else "; check MLFLOW_TRACKING_URI, and that the server answers"
        raise UserError(
            f"{given}: the run cannot be fetched from MLflow at {redacted(store)} to {output_dir} "
            f"({why if isinstance(why, UserError) else first_line(why)}){check}"
        ) from error


@contextmanager
def downloading(partial: Path) -> Iterator[None]:
    """Make an empty folder for a download, which no other process uses, and which does not stay.

    Every process of a job comes here, and its hosts may share the folder: so the lock is beside the download.
    """
    with locked(partial.with_suffix(".lock")):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            yield
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def fetch(key: str, address: str, uri: str | None, output_dir: str) -> Path:
    """Download a run from MLflow and return its folder; who opens a checkpoint of it verifies that.

    A run whose own folder is on this machine, with a checkpoint as new as MLflow's, is continued there.

    Args:
        key: the option that names the run, for messages.
        address: its value.
        uri: ``tracking.uri``.
        output_dir: where run folders are.

    Raises:
        UserError: there is no such run, no checkpoint of it or no server, or the folder exists and does not fit.
    """
    given, run_id = f"{key}={address}", run_id_of(key, address)
    with fetched_run(given, run_id, uri, output_dir) as (client, run):
        name = run.info.run_name
        if name != Path(name).name or name.startswith("."):
            raise UserError(
                f"{given}: the run's name {name!r} is not valid as the name of a folder; rename it on MLflow's page"
            )
        saved = complete_steps(client, run_id)
        own = Path(run.data.tags.get(FOLDER_TAG, ""))
        newest = max(checkpoint.steps(own / CHECKPOINTS), default=-1)
        if read_object(own / TRACKING_FILE).get("run_id") == run_id and newest >= max(saved, default=-1):
            path = checkpoint.path_of(own / CHECKPOINTS, newest)
            if not saved or checkpoint.damage(path, newest, checkpoint.WEIGHTS_SINCE) is None:
                return own
        if not saved:
            raise UserError(
                f"{given}: MLflow has no complete checkpoint of this run, and this machine has no {own}; choose "
                "another run (scripts/sync.py sends what is missing from where it was trained, unless "
                "tracking.checkpoints=none)"
            )
        target, step = Path(output_dir).expanduser() / name, saved[-1]
        partial = target.with_name(f".{name}.{run_id}.partial")
        with downloading(partial):
            if target.exists():  # of the same command, in a job that is started again
                here = max(checkpoint.steps(target / CHECKPOINTS), default=-1)
                if here < step or read_object(target / TRACKING_FILE).get("run_id") != run_id:
                    raise UserError(
                        f"{given}: {target} has another run, or this one at an earlier step than {step}; use "
                        f"{key}={target}, or choose another folder with output_dir=…"
                    )
                return target
            print(f"fetching {name}, step {step}, from MLflow at {redacted(str(client.tracking_uri))}", flush=True)
            sent = {item.path for item in client.list_artifacts(run_id)}  # not all, if the upload was cut
            ended = {SUMMARY_FILE} if run.info.status == "FINISHED" else set()
            for file in {*COMPANIONS, RUN_FILE, TOKENIZER, *ended} & sent:
                client.download_artifacts(run_id, file, str(partial))
            (partial / CHECKPOINTS).mkdir()
            for older in saved:
                path = checkpoint.path_of(Path(CHECKPOINTS), older)
                client.download_artifacts(run_id, path.as_posix(), str(partial / CHECKPOINTS))
            add_run_facts(partial, launch={})
            _describe(client, run).write(partial)
            partial.rename(target)
        return target


def _describe(client: MlflowClient, run: Any) -> TrackedRun:
    """Return what ``tracking.json`` has to hold, so that the same run continues there."""
    return TrackedRun(
        client.get_experiment(run.info.experiment_id).name,
        run.info.run_name,
        params={},
        tags={},
        key=run.data.tags[KEY_TAG],
        started_s=run.info.start_time / 1000,
        uri=storable_uri(str(client.tracking_uri)),
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        delivered=run.info.status == "FINISHED",  # until it is continued there is nothing to send
    )
