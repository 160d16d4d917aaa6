"""A run fetched from MLflow to be continued here: ``resume=mlflow:RUN_ID``, from any tracking server."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import checkpoint
from trainer.delivery import RunInfo, first_line
from trainer.errors import UserError
from trainer.files import flush, write_json
from trainer.folder import RunFolder
from trainer.mlflow_checkpoints import CHECKPOINTS, COMPANIONS, MANIFEST, STEP
from trainer.mlflow_record import RECORD_FILE, SUMMARY_FILE, read_record
from trainer.mlflow_store import (
    KEY_TAG,
    SESSION_TAG,
    connect,
    database_file,
    find_run,
    lasting_uri,
    tracking_uri,
    without_password,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ADDRESS = re.compile(r"(?:mlflow:|runs:/)([^/]*)(?:/checkpoints/step-(\d{8}))?/?")
_FILE = re.compile(r"[A-Za-z0-9_][\w.-]*")


def fetch(resume: str, uri: str | None, output_dir: str) -> Path:
    """Bring a run here from MLflow and return its folder, which ``resume=<folder>`` continues.

    Everything is downloaded under another name and verified by its hashes before the folder gets its own.

    Args:
        resume: ``mlflow:RUN_ID`` or ``runs:/RUN_ID``, for an earlier checkpoint with ``/checkpoints/step-00000100``.
        uri: ``tracking.uri``.
        output_dir: where run folders are.

    Raises:
        UserError: there is no such run, no checkpoint of it, no server, or a folder in the way.

    """
    match = _ADDRESS.fullmatch(resume)
    if not match or not re.fullmatch(r"\w+", match[1]):
        raise UserError(f"resume={resume} names no run; use resume=mlflow:RUN_ID, with the run's id on MLflow's page")
    store = tracking_uri(uri)
    database = database_file(store)
    if database is not None and not database.exists():
        raise UserError(f"resume={resume}: there is no {database}; name the store with tracking.uri=http://host:port")
    try:
        return _fetch(resume, match[1], match[2], store, Path(output_dir).expanduser())
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        shown = without_password(store)
        raise UserError(
            f"resume={resume}: MLflow at {shown} does not give this run ({first_line(error)}); "
            "check tracking.uri or MLFLOW_TRACKING_URI and that the server answers"
        ) from error


def _fetch(resume: str, run_id: str, step: str | None, store: str, root: Path) -> Path:
    from filelock import FileLock

    client = connect(store)
    run = find_run(client, run_id)
    if run is None:
        raise UserError(f"resume={resume}: MLflow at {without_password(store)} has no such run; check the run's id")
    name = run.info.run_name
    if name != Path(name).name or name.startswith("."):
        raise UserError(f"resume={resume}: the run's name {name!r} is no name of a folder; rename it on MLflow's page")
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{name}.{run_id}.partial"
    with FileLock(Path(tempfile.gettempdir(), f"mantissa-{run_id}.lock")):  # each process of a job comes here
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            newest = _choose(client, resume, run_id, step, partial)
            here = _here(resume, root / name, run_id, newest)
            if here is not None:
                return here
            print(f"fetching {name}, step {newest}, from MLflow at {without_password(store)}", flush=True)
            _download(client, run, partial)
            checkpoint.find(partial / CHECKPOINTS)
            _describe(client, run, store, partial)
            flush(partial)
            partial.rename(root / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return root / name


def _choose(client: MlflowClient, resume: str, run_id: str, step: str | None, partial: Path) -> int:
    """Download the manifests of the checkpoints to bring, and return the newest step."""
    root = partial / CHECKPOINTS
    names = [item.path.rpartition("/")[2] for item in client.list_artifacts(run_id, CHECKPOINTS) if item.is_dir]
    for name in sorted(name for name in names if STEP.fullmatch(name) and (step is None or name[5:] <= step)):
        place = f"{CHECKPOINTS}/{name}"
        if f"{place}/{MANIFEST}" in [item.path for item in client.list_artifacts(run_id, place)]:
            _get(client, run_id, f"{place}/{MANIFEST}", root / name)
    steps = checkpoint.steps(root)
    if not steps or (step is not None and steps[-1] != int(step)):
        wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {int(step)}"
        raise UserError(
            f"resume={resume}: MLflow has no {wanted} of this run (trained with tracking.checkpoints=none, or not sent "
            "yet: scripts/sync.py sends it from where it was trained); choose another run"
        )
    for other in set(steps[:-1]) - {checkpoint.best_step(root)}:
        shutil.rmtree(checkpoint.path_of(root, other))
    return steps[-1]


def _here(resume: str, target: Path, run_id: str, newest: int) -> Path | None:
    """Return the folder that is here already, if it is the same; None: there is none.

    Raises:
        UserError: another run is in the way, or another state of this one, or a process works on it.

    """
    if not target.exists():
        return None
    if read_record(target).get("run_id") != run_id:
        raise UserError(f"resume={resume}: {target} is another run; choose another folder with output_dir=…")
    steps = checkpoint.steps(target / CHECKPOINTS)
    if steps[-1:] == [newest]:
        return target
    with RunFolder(target).locked():  # refuses where a process works on it
        steps = checkpoint.steps(target / CHECKPOINTS)
    if steps and steps[-1] > newest:
        raise UserError(
            f"resume={resume}: {target} is this run, and further: step {steps[-1]}, where MLflow has step {newest}; "
            f"use resume={target}"
        )
    raise UserError(
        f"resume={resume}: {target} is this run, but not as far as MLflow's step {newest}; "
        "rename or remove that folder, or choose another with output_dir=…"
    )


def _download(client: MlflowClient, run: Any, partial: Path) -> None:
    run_id = run.info.run_id
    for name in COMPANIONS:
        _get(client, run_id, name, partial)
    if run.info.status == "FINISHED":
        _get(client, run_id, SUMMARY_FILE, partial)
    root = partial / CHECKPOINTS
    for step in checkpoint.steps(root):
        folder = checkpoint.path_of(root, step)
        for name in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]:
            if not _FILE.fullmatch(name):
                raise UserError(f"the manifest of step {step} names {name!r}, which is no file of a checkpoint")
            _get(client, run_id, f"{CHECKPOINTS}/{folder.name}/{name}", folder)
        checkpoint.find(root, step)
    for path in partial.rglob("*"):
        flush(path)


def _get(client: MlflowClient, run_id: str, path: str, folder: Path) -> None:
    """Download one file into ``folder``, where MLflow would make its own folders."""
    scratch = folder / ".download"
    scratch.mkdir(parents=True, exist_ok=True)
    got = Path(client.download_artifacts(run_id, path, str(scratch)))
    got.replace(folder / path.rpartition("/")[2])
    shutil.rmtree(scratch)


def _describe(client: MlflowClient, run: Any, store: str, partial: Path) -> None:
    """Write what the run's own folder knows of MLflow, so that the same run is continued there."""
    uri = lasting_uri(store)
    experiment = client.get_experiment(run.info.experiment_id)
    facts: dict[str, Any] = {"key": run.data.tags[KEY_TAG]} if KEY_TAG in run.data.tags else {}
    started_s = run.info.start_time / 1000
    RunInfo(experiment.name, run.info.run_name, {}, {}, uri, started_s=started_s, **facts).write(partial)
    record = {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "tracking_uri": uri}
    record["sessions"] = [run.data.tags[SESSION_TAG]] if SESSION_TAG in run.data.tags else []
    write_json(partial / RECORD_FILE, record)
