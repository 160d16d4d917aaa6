"""Downloads a run from MLflow to resume it here: ``resume=mlflow:RUN_ID``, from any tracking server."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME, InvalidCheckpoint, damage, read_manifest
from trainer.errors import UserError, first_line
from trainer.files import check_output_dir, flush, in_use, locked, read_object, write_json
from trainer.tracking.mlflow.checkpoints import CHECKPOINTS, COMPANIONS
from trainer.tracking.mlflow.delivery import RunInfo
from trainer.tracking.mlflow.delivery_record import (
    IMAGES_FILE,
    RECORD_FILE,
    SOURCE_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    log_size,
    read_record,
)
from trainer.tracking.mlflow.store import (
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
ORIGIN_FILE = "fetched.json"
"""In a folder that was fetched: ``run_id``, and the ``step`` that ``resume`` named, or null."""


def fetch(resume: str, uri: str | None, output_dir: str) -> Path:
    """Download a run from MLflow and return its folder, for ``resume=<folder>``.

    Everything is downloaded to a temporary folder and verified by its hashes before the folder gets its name.

    Args:
        resume: ``mlflow:RUN_ID`` or ``runs:/RUN_ID``, for an earlier checkpoint with ``/checkpoints/step-00000100``.
        uri: ``tracking.uri``.
        output_dir: where run folders are.

    Raises:
        UserError: there is no such run, no checkpoint of it or no server, or the folder exists and does not fit.
    """
    match = _ADDRESS.fullmatch(resume)
    if not match or not re.fullmatch(r"\w+", match[1]):
        raise UserError(f"resume={resume} is not a valid run; use resume=mlflow:RUN_ID, with the id from MLflow's page")
    check_output_dir(output_dir)
    store = tracking_uri(uri)
    database = database_file(store)
    if database is not None and not database.exists():
        raise UserError(f"resume={resume}: there is no {database}; name the store with tracking.uri=http://host:port")
    try:
        step = int(match[2]) if match[2] else None
        return _fetch(resume, match[1], step, store, Path(output_dir).expanduser())
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        if _is_of_the_disk(error):
            raise UserError(
                f"resume={resume}: output_dir={output_dir} cannot be written ({first_line(error)})"
            ) from error
        shown = without_password(store)
        raise UserError(
            f"resume={resume}: the run cannot be fetched from MLflow at {shown} ({first_line(error)}); "
            "check tracking.uri or MLFLOW_TRACKING_URI and that the server answers"
        ) from error


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether this machine's disk failed. MLflow reports errors of a download as text only."""
    own = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
    return (isinstance(error, OSError) and error.errno in own) or os.strerror(errno.ENOSPC) in str(error)


def _fetch(resume: str, run_id: str, step: int | None, store: str, root: Path) -> Path:
    client = connect(store)
    run = find_run(client, run_id)
    if run is None:
        raise UserError(f"resume={resume}: MLflow at {without_password(store)} has no such run; check the run's id")
    name = run.info.run_name
    if name != Path(name).name or name.startswith("."):
        raise UserError(
            f"resume={resume}: the run's name {name!r} is not valid as the name of a folder; rename it on MLflow's page"
        )
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{name}.{run_id}.partial"
    # Every process of a job comes here, and its hosts may share the folder: so the lock is beside the download.
    with locked(partial.with_suffix(".lock")):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            wanted = _choose(client, resume, run_id, step, partial)
            if _here(root / name, wanted):
                return root / name
            print(f"fetching {name}, step {wanted.step}, from MLflow at {without_password(store)}", flush=True)
            _download(client, run, wanted, partial)
            _describe(client, run, store, wanted, partial)
            flush(partial)
            partial.rename(root / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return root / name


class _Wanted(NamedTuple):
    """The checkpoint to continue from."""

    resume: str
    run_id: str
    requested: int | None
    """The step that ``resume`` names, if any."""
    saved: list[int]
    """The steps of the complete checkpoints in MLflow, oldest first."""

    @property
    def step(self) -> int:
        return self.saved[-1] if self.requested is None else self.requested

    @property
    def is_new_run(self) -> bool:
        """Whether it must be another run in MLflow, because MLflow's points of later steps cannot be removed."""
        return self.step != self.saved[-1]

    @property
    def origin(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "step": self.requested}


def _choose(client: MlflowClient, resume: str, run_id: str, step: int | None, partial: Path) -> _Wanted:
    """Download the manifests of the checkpoints that are needed."""
    saved = []
    for item in client.list_artifacts(run_id, CHECKPOINTS):
        name = item.path.rpartition("/")[2]
        if item.is_dir and STEP_NAME.fullmatch(name):
            files = [file.path for file in client.list_artifacts(run_id, item.path)]
            saved += [int(name[5:])] if f"{item.path}/{MANIFEST_FILE}" in files else []
    wanted = _Wanted(resume, run_id, step, sorted(saved))
    if not saved or wanted.step not in saved:
        missing = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        raise UserError(
            f"resume={resume}: MLflow has no {missing} of this run (trained with tracking.checkpoints=none, or not "
            "sent yet: scripts/sync.py sends it from where it was trained); choose another run"
        )
    root = partial / CHECKPOINTS
    for each in wanted.saved:
        if each <= wanted.step:
            folder = checkpoint.path_of(root, each)
            _get(client, run_id, f"{CHECKPOINTS}/{folder.name}/{MANIFEST_FILE}", folder)
    for other in set(checkpoint.steps(root)) - {wanted.step, checkpoint.best_step(root)}:
        shutil.rmtree(checkpoint.path_of(root, other))
    return wanted


def _here(target: Path, wanted: _Wanted) -> bool:
    """Return whether this folder already has the run, at this step or later; then it is resumed from there.

    Raises:
        UserError: the folder is of another run, or of another state of this one, or in use.
    """
    if not target.exists():
        return False
    resume, newest = wanted.resume, wanted.step
    # Fetched by the same command: a job that is started again.
    again = read_object(target / ORIGIN_FILE) == wanted.origin
    if not again:
        if read_record(target).get("run_id") != wanted.run_id:
            raise UserError(f"resume={resume}: {target} is another run; choose another folder with output_dir=…")
        if wanted.is_new_run:
            raise UserError(
                f"resume={resume}: {target} has the complete run, and from step {newest} on it would be a new run; "
                "choose another folder with output_dir=…"
            )
    steps = checkpoint.steps(target / CHECKPOINTS)
    if steps[-1:] == [newest]:
        return True
    if steps and steps[-1] > newest and (again or wanted.requested is None):
        print(f"using {target}: it has this run at step {steps[-1]}, MLflow has step {newest}", flush=True)
        return True
    with in_use(target):  # refused if a process works on it
        steps = checkpoint.steps(target / CHECKPOINTS)
    if steps and steps[-1] > newest:
        raise UserError(
            f"resume={resume}: {target} is this run at a later step: {steps[-1]}, not {newest}; "
            f"use resume={target}, or choose another folder with output_dir=…"
        )
    raise UserError(
        f"resume={resume}: {target} is this run at an earlier step than MLflow's {newest}; "
        "rename or remove that folder, or choose another with output_dir=…"
    )


def _download(client: MlflowClient, run: Any, wanted: _Wanted, partial: Path) -> None:
    for name in COMPANIONS:
        _get(client, wanted.run_id, name, partial)
    present = {item.path for item in client.list_artifacts(wanted.run_id)}
    for name in {SOURCE_FILE, IMAGES_FILE} & present:
        _get(client, wanted.run_id, name, partial)
    for item in client.list_artifacts(wanted.run_id, TOKENIZER) if TOKENIZER in present else ():
        _get(client, wanted.run_id, item.path, partial / TOKENIZER)
    if run.info.status == "FINISHED" and not wanted.is_new_run:
        _get(client, wanted.run_id, SUMMARY_FILE, partial)
    root = partial / CHECKPOINTS
    for step in checkpoint.steps(root):
        folder = checkpoint.path_of(root, step)
        place = f"{CHECKPOINTS}/{folder.name}"
        try:
            for name in read_manifest(folder).sha256:  # only the files of a checkpoint
                _get(client, wanted.run_id, f"{place}/{name}", folder)
        except InvalidCheckpoint as refused:
            raise _damaged(wanted, step, str(refused)) from None
        if found := damage(folder, step):
            raise _damaged(wanted, step, found)
    for path in partial.rglob("*"):
        flush(path)


def _damaged(wanted: _Wanted, step: int, found: str) -> UserError:
    place = f"runs:/{wanted.run_id}/{CHECKPOINTS}/step-"
    older = [other for other in wanted.saved if other < step]
    remedy = (
        f"use resume={place}{older[-1]:08d}, an earlier one"
        if older
        else "MLflow has no earlier one: start again without resume="
    )
    return UserError(f"resume={wanted.resume}: {place}{step:08d} is damaged or incomplete: {found}; {remedy}")


def _get(client: MlflowClient, run_id: str, path: str, folder: Path) -> None:
    """Download one file into ``folder`` itself (MLflow would make subfolders)."""
    scratch = folder / ".download"
    scratch.mkdir(parents=True, exist_ok=True)
    got = Path(client.download_artifacts(run_id, path, str(scratch)))
    got.replace(folder / path.rpartition("/")[2])
    shutil.rmtree(scratch)


def _describe(client: MlflowClient, run: Any, store: str, wanted: _Wanted, partial: Path) -> None:
    """Write the files about MLflow of the run's own folder, so that the same run continues there."""
    uri = lasting_uri(store)
    experiment = client.get_experiment(run.info.experiment_id)
    write_json(partial / ORIGIN_FILE, wanted.origin)
    if wanted.is_new_run:
        print(f"MLflow has this run up to step {wanted.saved[-1]}; from step {wanted.step} on it is a new run there")
        RunInfo(experiment.name, run.info.run_name, {}, {}, uri).write(partial)
        return
    facts: dict[str, Any] = {"key": run.data.tags[KEY_TAG]} if KEY_TAG in run.data.tags else {}
    started_s = run.info.start_time / 1000
    RunInfo(experiment.name, run.info.run_name, {}, {}, uri, started_s=started_s, **facts).write(partial)
    record: dict[str, Any] = {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "tracking_uri": uri}
    record["sessions"] = [run.data.tags[SESSION_TAG]] if SESSION_TAG in run.data.tags else []
    if run.info.status == "FINISHED":  # until it is continued there is nothing to send
        record["delivered"] = {"metrics_bytes": log_size(partial), "status": "FINISHED"}
    write_json(partial / RECORD_FILE, record)
