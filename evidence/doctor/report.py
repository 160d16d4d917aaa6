"""The files of a diagnosis: the page, the verdict as JSON, and the tables as CSV."""

from __future__ import annotations

import shlex
from pathlib import Path

from evidence.doctor.plots import figures
from evidence.doctor.step import TrainerStep
from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.report import files_of
from trainer.files import make_folder, remove_folder, write_text
from trainer.run.provenance import git_facts, versions


def folder_of(diagnosis: Diagnosis) -> Path:
    """Return the folder of the files: below the run's, or where there is no run below ``output_dir``."""
    replay = diagnosis.replay
    step = f"step-{replay.step.number}"
    if replay.folder is not None:
        return replay.folder / "doctor" / step
    assert isinstance(replay.step, TrainerStep)
    config = replay.step.config
    return Path(config.output_dir).expanduser() / "doctor" / f"{config.recipe.name}-{replay.precision}-{step}"


def write(diagnosis: Diagnosis, command: list[str]) -> list[Path]:
    """Write the files in the place of those of an earlier examination.

    Args:
        diagnosis: of the step.
        command: that examined it.

    Returns:
        The files, the page first.

    Raises:
        OSError: they cannot be written.
    """
    folder, step = folder_of(diagnosis), diagnosis.replay.step
    assert isinstance(step, TrainerStep)
    record = {
        "recipe": step.config.recipe.name,
        "hardware": step.hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
        "command": shlex.join(command),
    }
    texts = files_of(diagnosis, step.config.recipe.name, record, figures(diagnosis))
    remove_folder(folder)
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
