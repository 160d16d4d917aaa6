"""The run folder: where one run keeps everything, and the folder that ``resume`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from trainer.checkpoint import store as checkpoint
from trainer.errors import UserError
from trainer.files import TOKENIZER, make_folder, read_json, read_object, write_json, write_text
from trainer.parallel.world import launch_id, launched_processes

LAUNCH_FILE = "launch.json"
"""From which folder the run was last started, and by which torchrun."""
_PATHS = ("data.path", "data.test", "data.name", "data.tokenizer", "recipe.pretrained")
"""Options that are files or folders, or may be."""
_NO_PATHS = ("bpe", "chars", "bytes")
"""What ``data.tokenizer`` may be instead."""


class RunFolder:
    """One run's folder: config.json, config.yaml, precision.json, metrics.jsonl, checkpoints/, summary.json."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @classmethod
    def create(cls, output_dir: str, run_name: str) -> RunFolder:
        """Make a new folder: ``run_name``, or ``run_name-2`` and so on where that exists.

        Raises:
            UserError: the folder cannot be written.
        """
        root = Path(output_dir).expanduser()
        try:
            make_folder(root)
            number = 1
            while True:
                path = root / (run_name if number == 1 else f"{run_name}-{number}")
                try:
                    make_folder(path, exist_ok=False)
                    return cls(path)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise UserError(
                f"output_dir={output_dir} cannot be written ({error.strerror}); choose another with output_dir=…"
            ) from error

    def mark_launch(self) -> None:
        """Note from which folder the run was started, and by which torchrun, whose restart finds it again by that."""
        launch = {"launch": launch_id()} if launched_processes() else {}
        self.write(LAUNCH_FILE, {"folder": str(Path.cwd())} | launch)

    def located(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return recorded options with paths that are valid in the present folder.

        A relative path leads from the folder that the run was started in. Where it does not exist there (the run was
        trained on another machine, or in a container), it stays as it is.
        """
        started = self._started
        if started in (Path(), Path.cwd()):
            return recorded
        found = {}
        for key in _PATHS:
            if not isinstance(recorded.get(key), str) or recorded[key] in ("", *_NO_PATHS):
                continue
            path = Path(recorded[key]).expanduser()
            split = key == "data.test" and recorded.get("data") == "hub"
            own = path.is_relative_to(self.path)  # already found, see ``config``
            if not (path.is_absolute() or split or own) and (started / path).exists():
                found[key] = str(started / path)
        return recorded | found

    def is_place(self, key: str, recorded: dict[str, Any], now: Any) -> bool:
        """Return whether an option is a path to the same file or folder as the recorded one, however it is written."""
        before = self.located(recorded).get(key)
        if key not in _PATHS or not isinstance(before, str) or not isinstance(now, str):
            return False
        return os.path.realpath(os.path.expanduser(before)) == os.path.realpath(os.path.expanduser(now))

    def is_gone(self, key: str, recorded: dict[str, Any]) -> bool:
        """Return whether an option is the path of data that are no longer where they were when the run was started."""
        path = recorded.get(key)
        return key == "data.path" and isinstance(path, str) and not (self._started / Path(path).expanduser()).exists()

    @property
    def _started(self) -> Path:
        """The folder that the run was last started in; the present one where that is not known."""
        return Path(str(read_object(self.path / LAUNCH_FILE).get("folder", "")))

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        write_json(self.path / name, content)

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; empty if it cannot be read."""
        return read_object(self.path / "summary.json")

    def write_config(self, flat: dict[str, Any]) -> None:
        """Record the resolved config, as JSON and, for people, as YAML."""
        self.write("config.json", flat)
        write_text(self.path / "config.yaml", yaml.safe_dump(flat, sort_keys=False, allow_unicode=True))

    def config(self) -> dict[str, Any]:
        """Return what ``write_config`` recorded; a tokenizer that was in another run's folder is in this one.

        So is the config of a pretrained model whose folder is no longer there.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            recorded = read_json(self.path / "config.json")
            if not isinstance(recorded, dict):
                raise ValueError("it has no keys")
        except (OSError, ValueError) as error:
            raise UserError(f"resume: {self.path}/config.json cannot be read ({error}); choose another run") from error
        own = self.path / TOKENIZER
        if recorded.get("init_from") is not None and Path(str(recorded.get("data.tokenizer"))).name == TOKENIZER:
            recorded["data.tokenizer"] = str(own)
        pretrained = recorded.get("recipe.pretrained")
        there = Path(str(self.located(recorded).get("recipe.pretrained"))).expanduser()
        if pretrained and not there.is_dir() and (own / "config.json").is_file():
            recorded["recipe.pretrained"] = str(own)
        return recorded


def local_folder(resume: str, output_dir: str, uri: str | None = None) -> RunFolder:
    """Return the run folder that ``resume=FOLDER`` names, or that ``resume=mlflow:RUN_ID`` brings here.

    Every process of a job may call it, also before they know each other. ``uri`` is ``tracking.uri``, if it is set.

    Raises:
        UserError: the folder does not exist or holds no checkpoint; or MLflow cannot provide the run.
    """
    if resume.startswith(("mlflow:", "runs:/")):
        from trainer.tracking.mlflow.fetch import fetch

        return RunFolder(fetch(resume, uri, output_dir))
    folder = RunFolder(Path(resume).expanduser())
    if not folder.path.is_dir():
        raise UserError(f"resume={resume}: no such folder; give a run folder, such as {output_dir}/gpt2-bf16-s0")
    if not checkpoint.steps(folder.checkpoints):
        raise UserError(
            f"resume={resume}: the folder holds no complete checkpoint (looked in {folder.checkpoints}); "
            "give another run folder, or start without resume="
        )
    return folder
