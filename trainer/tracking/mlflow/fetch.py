"""Downloads a run from MLflow to resume it here: ``resume=mlflow:RUN_ID``, from any tracking server."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME, InvalidCheckpoint, damage, read_manifest
from trainer.errors import UserError, first_line, redacted
from trainer.files import (
    IMAGES_FILE,
    RECORD_FILE,
    SOURCE_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    check_output_dir,
    flush,
    in_use,
    locked,
    read_object,
    write_json,
)
from trainer.tracking.mlflow.addresses import database_file, lasting_uri, tracking_uri
from trainer.tracking.mlflow.checkpoints import CHECKPOINTS, COMPANIONS
from trainer.tracking.mlflow.delivery import SESSION_TAG
from trainer.tracking.mlflow.record import RunInfo, log_size, read_record
from trainer.tracking.mlflow.store import KEY_TAG, connect, find_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ADDRESS = re.compile(r"(?:mlflow:|runs:/)(\w+)(?:/checkpoints/step-(\d{8}))?/?")
ORIGIN_FILE = "fetched.json"
"""In a folder that was fetched: ``run_id``, and the ``step`` that ``resume`` named, or null."""


@contextmanager
def fetched_run(
    given: str, run_id: str, uri: str | None, key: str, output_dir: str
) -> Iterator[tuple[MlflowClient, Any]]:
    """Open the store of a run that is to be downloaded; within it, MLflow's errors become the user's.

    Args:
        given: the option of the command line, such as ``resume=mlflow:RUN_ID``, for messages.
        run_id: MLflow's.
        uri: of the store, as the user has set it.
        key: the option that names the store.
        output_dir: where the run's folder is made.

    Raises:
        UserError: there is no such run, the server does not answer, or the folder cannot be written.
    """
    check_output_dir(output_dir)
    store = tracking_uri(uri)
    database = database_file(store)
    if database is not None and not database.exists():
        raise UserError(f"{given}: there is no {database}; name the store with {key}=http://host:port")
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
        own = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
        # MLflow reports errors of a download as text only.
        if (isinstance(error, OSError) and error.errno in own) or os.strerror(errno.ENOSPC) in str(error):
            raise UserError(f"{given}: output_dir={output_dir} cannot be written ({first_line(error)})") from error
        raise UserError(
            f"{given}: the run cannot be fetched from MLflow at {redacted(store)} ({first_line(error)}); "
            f"check {key}= or MLFLOW_TRACKING_URI, and that the server answers"
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
    given = f"resume={resume}"
    match = _ADDRESS.fullmatch(resume)
    if not match:
        raise UserError(f"{given} is not a valid run; use resume=mlflow:RUN_ID, with the id from MLflow's page")
    with fetched_run(given, match[1], uri, "tracking.uri", output_dir) as (client, run):
        name = run.info.run_name
        if name != Path(name).name or name.startswith("."):
            raise UserError(
                f"{given}: the run's name {name!r} is not valid as the name of a folder; rename it on MLflow's page"
            )
        root = Path(output_dir).expanduser()
        partial = root / f".{name}.{match[1]}.partial"
        with downloading(partial):
            wanted = _choose(client, given, match[1], int(match[2]) if match[2] else None, partial)
            if not _is_here(root / name, wanted):
                where = redacted(str(client.tracking_uri))
                print(f"fetching {name}, step {wanted.step}, from MLflow at {where}", flush=True)
                _download(client, run, wanted, partial)
                _describe(client, run, wanted, partial)
                flush(partial)
                partial.rename(root / name)
        return root / name


class _Wanted(NamedTuple):
    """The checkpoint to continue from."""

    given: str
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


def _choose(client: MlflowClient, given: str, run_id: str, step: int | None, partial: Path) -> _Wanted:
    """Find the checkpoint, and download its manifest and that of the best one."""
    saved = []
    for item in client.list_artifacts(run_id, CHECKPOINTS):
        name = item.path.rpartition("/")[2]
        if item.is_dir and STEP_NAME.fullmatch(name):
            files = [file.path for file in client.list_artifacts(run_id, item.path)]
            saved += [int(name[5:])] if f"{item.path}/{MANIFEST_FILE}" in files else []
    wanted = _Wanted(given, run_id, step, sorted(saved))
    if not saved or wanted.step not in saved:
        missing = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        raise UserError(
            f"{given}: MLflow has no {missing} of this run (trained with tracking.checkpoints=none, or not "
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


def _is_here(target: Path, wanted: _Wanted) -> bool:
    """Return whether this folder already has the run, at this step or later; then it is resumed from there.

    Raises:
        UserError: the folder is of another run, or of another state of this one, or in use.
    """
    if not target.exists():
        return False
    given, newest = wanted.given, wanted.step
    # Fetched by the same command: a job that is started again.
    again = read_object(target / ORIGIN_FILE) == wanted.origin
    if not again and read_record(target).get("run_id") != wanted.run_id:
        raise UserError(f"{given}: {target} is another run; choose another folder with output_dir=…")
    if not again and wanted.is_new_run:
        raise UserError(
            f"{given}: {target} has the complete run, and from step {newest} on it would be a new run; "
            "choose another folder with output_dir=…"
        )
    here = max(checkpoint.steps(target / CHECKPOINTS), default=-1)
    if here == newest:
        return True
    if here > newest and (again or wanted.requested is None):
        print(f"using {target}: it has this run at step {here}, MLflow has step {newest}", flush=True)
        return True
    with in_use(target):  # refused if a process works on it
        here = max(checkpoint.steps(target / CHECKPOINTS), default=-1)
    if here > newest:
        raise UserError(
            f"{given}: {target} is this run at a later step: {here}, not {newest}; "
            f"use resume={target}, or choose another folder with output_dir=…"
        )
    raise UserError(
        f"{given}: {target} is this run at an earlier step than MLflow's {newest}; "
        "rename or remove that folder, or choose another with output_dir=…"
    )


def _download(client: MlflowClient, run: Any, wanted: _Wanted, partial: Path) -> None:
    present = {item.path for item in client.list_artifacts(wanted.run_id)}
    names = [*COMPANIONS, *({SOURCE_FILE, IMAGES_FILE} & present)]
    if run.info.status == "FINISHED" and not wanted.is_new_run:
        names.append(SUMMARY_FILE)
    for name in names:
        _get(client, wanted.run_id, name, partial)
    for item in client.list_artifacts(wanted.run_id, TOKENIZER) if TOKENIZER in present else ():
        _get(client, wanted.run_id, item.path, partial / TOKENIZER)
    root = partial / CHECKPOINTS
    for step in checkpoint.steps(root):
        folder = checkpoint.path_of(root, step)
        try:
            for name in read_manifest(folder).sha256:  # only the files of a checkpoint
                _get(client, wanted.run_id, f"{CHECKPOINTS}/{folder.name}/{name}", folder)
            found = damage(folder, step)
        except InvalidCheckpoint as refused:
            found = str(refused)
        if found:
            place = f"runs:/{wanted.run_id}/{CHECKPOINTS}/step-"
            older = [other for other in wanted.saved if other < step]
            remedy = "MLflow has no earlier one: start again without resume="
            if older:
                remedy = f"use resume={place}{older[-1]:08d}, an earlier one"
            raise UserError(f"{wanted.given}: {place}{step:08d} is damaged or incomplete: {found}; {remedy}")
    for path in partial.rglob("*"):
        flush(path)


def _get(client: MlflowClient, run_id: str, path: str, folder: Path) -> None:
    """Download one file into ``folder`` itself (MLflow would make subfolders)."""
    scratch = folder / ".download"
    scratch.mkdir(parents=True, exist_ok=True)
    got = Path(client.download_artifacts(run_id, path, str(scratch)))
    got.replace(folder / path.rpartition("/")[2])
    shutil.rmtree(scratch)


def _describe(client: MlflowClient, run: Any, wanted: _Wanted, partial: Path) -> None:
    """Write the files about MLflow of the run's own folder, so that the same run continues there."""
    uri, tags = lasting_uri(str(client.tracking_uri)), run.data.tags
    experiment = client.get_experiment(run.info.experiment_id).name
    write_json(partial / ORIGIN_FILE, wanted.origin)
    if wanted.is_new_run:
        print(f"MLflow has this run up to step {wanted.saved[-1]}; from step {wanted.step} on it is a new run there")
        RunInfo(experiment, run.info.run_name, {}, {}, uri).write(partial)
        return
    info = RunInfo(experiment, run.info.run_name, {}, {}, uri, tags[KEY_TAG], run.info.start_time / 1000)
    info.write(partial)
    record: dict[str, Any] = {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "tracking_uri": uri}
    record["sessions"] = [tags[SESSION_TAG]] if SESSION_TAG in tags else []
    if run.info.status == "FINISHED":  # until it is continued there is nothing to send
        record["delivered"] = {"metrics_bytes": log_size(partial), "status": "FINISHED"}
    write_json(partial / RECORD_FILE, record)
