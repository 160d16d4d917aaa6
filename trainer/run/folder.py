"""The run folder: where one run keeps everything, and the folder that ``resume`` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trainer.checkpoint import store as checkpoint
from trainer.errors import UserError
from trainer.files import make_folder, read_json, read_object, write_json, write_text
from trainer.parallel.world import launch_id, launched_processes
from trainer.tracking.mlflow.delivery_record import TOKENIZER

LAUNCH_FILE = "launch.json"


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
        """Note by which torchrun the run was started, so that its restart finds the run again."""
        if launched_processes():
            self.write(LAUNCH_FILE, {"launch": launch_id()})

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
        if pretrained and not Path(str(pretrained)).expanduser().is_dir() and (own / "config.json").is_file():
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
