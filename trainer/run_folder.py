"""The run folder: where one run keeps everything, and how an earlier one is found."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mantissa
from trainer import files
from trainer.checkpoint.schema import steps
from trainer.errors import UserError
from trainer.files import (
    BEST,
    CHECKPOINTS,
    CONFIG_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    add_run_facts,
    read_config,
    read_object,
    run_facts,
    write_json,
)
from trainer.parallel.world import launch_id, launched_processes, restarted

PATHS = ("data.path", "data.valid", "data.test", "data.name", "data.tokenizer", "recipe.pretrained", "init_from")
"""Options that are files or folders, or may be."""
_LOCAL = (*PATHS, "recipe_path", "resume", "run", "path")
"""Those of all scripts that are read on this machine, or from the hub or MLflow by an id."""


def check_path(key: str, value: str) -> None:
    """Raise UserError where an option that is a file or folder has an address of the web, or a path of Windows."""
    if key in _LOCAL and "://" in value:
        hub = ", or the id on the hub alone" if "huggingface.co/" in value else ""
        raise UserError(f"{key}={value}: an address is not opened; download what is there, and give its path{hub}")
    there = value.replace("\\", "/")
    if key in _LOCAL and there != value and os.path.exists(there) and not os.path.exists(value):
        problem = f"{key}={value}: there is no such file or folder"
        raise UserError(problem, shlex.quote(f"{key}={there}"), mistake=shlex.quote(value))


class RunFolder:
    """One run's folder: config.json, precision.json, metrics.jsonl, checkpoints/, summary.json."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / CHECKPOINTS

    @classmethod
    def create(cls, output_dir: str, run_name: str) -> RunFolder:
        """Make a new folder: ``run_name``, or ``run_name-2`` and so on where that exists."""
        root, number = Path(output_dir).expanduser(), 1
        root.mkdir(parents=True, exist_ok=True)
        files.flush(root.parent)  # a power cut could take the names of new folders
        while True:
            path = root / (run_name if number == 1 else f"{run_name}-{number}")
            try:
                path.mkdir()
                files.flush(root)
                return cls(path)
            except FileExistsError:
                number += 1

    @classmethod
    def open(
        cls, key: str, given: str, output_dir: str, uri: str | None = None, recipes: Collection[str] = ()
    ) -> RunFolder:
        """Return the run folder that the option ``key`` names, or that its ``mlflow:RUN_ID`` brings to ``output_dir``.

        Every process of a job may call it, also before they know each other. ``uri`` is ``tracking.uri``, if it is set.
        ``recipes`` are those whose runs are wanted; none: of any.

        Raises:
            UserError: the folder does not exist, it is one of a run's, or MLflow cannot provide the run.
        """
        if is_in_mlflow(given):
            from trainer.tracking.fetch import fetch

            return cls(fetch(key, given, uri, output_dir))
        path = Path(given).expanduser()
        if not path.is_dir():
            why = "this is a file" if path.exists() else f"there is no such {'file or ' * (key == 'init_from')}folder"
            which = "a file of weights, or a run" if key == "init_from" else "a run"
            around = next((str(run.path) for folder in path.parents if (run := run_of(folder))), "")
            there = Path(output_dir).expanduser() / path
            if there != path and there.is_dir() and run_of(there):
                raise UserError(f"{key}={given}: {why}", shlex.quote(f"{key}={there}"), mistake=shlex.quote(given))
            near = f", such as {around}" if around else such_as(path.parent, output_dir, key, recipes)
            raise UserError(f"{key}={given}: {why}; give {which} folder{near}")
        if (run := run_around(path)) and (key == "resume" or CHECKPOINTS in (path.name, path.parent.name)):
            raise UserError(f"{key}={given} is inside of a run", shlex.quote(f"{key}={run.path}"))
        return cls(path)

    def options(self) -> dict[str, Any]:
        """Return ``config`` as the options of a run in the same place.

        Without ``tracking.uri``, which tracking.json has as a whole.

        Raises:
            UserError: config.json cannot be read.
        """
        kept = {key: value for key, value in self.config().items() if key not in ("resume", "tracking.uri")}
        return kept | {"output_dir": str(self.path.absolute().parent)}

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; empty if it cannot be read."""
        return read_object(self.path / SUMMARY_FILE)

    def write_config(self, flat: dict[str, Any]) -> None:
        """Record the config with a value for every ``auto``.

        Before that, how the run is started: in which folder, and by which torchrun, whose restart finds it by that.
        """
        launch: dict[str, Any] = {"launch": launch_id()} if launched_processes() else {}
        facts = {"launch": launch | {"folder": str(Path.cwd())}, "written_by": {"mantissa": mantissa.__version__}}
        add_run_facts(self.path, **facts)
        write_json(self.path / CONFIG_FILE, flat)

    def config(self) -> dict[str, Any]:
        """Return what ``write_config`` recorded, with paths that are valid in the present folder.

        A relative path leads from the folder that the run was started in. Where it does not exist there (the run was
        trained on another machine, or in a container), it stays as it is. A tokenizer that was in another run's folder
        is in this one, as is the config of a pretrained model whose folder is no longer there.

        Raises:
            UserError: the file cannot be read.
        """
        remedy = "restore it"
        if (self.path / BEST / "config.json").is_file():  # which needs none of the run
            remedy += f", or start a new run from the weights in {BEST}/, by init_from"
        recorded = read_config(self.path / CONFIG_FILE, remedy)
        if "precision.mode" not in recorded:
            why = f"its {CONFIG_FILE} is of something else" if recorded else f"it has no {CONFIG_FILE}"
            raise UserError(f"{self.path} is not the folder of a run ({why}); give one{such_as(self.path, 'outputs')}")
        # The tokenizer that was in another run's folder is in this one.
        kept = self.path / TOKENIZER
        if recorded.get("init_from") is not None and Path(str(recorded.get("data.tokenizer"))).name == TOKENIZER:
            recorded["data.tokenizer"] = str(kept)
        # Relative paths lead from where the run was started.
        for key in PATHS if self.place("") not in (Path(), Path.cwd()) else ():
            value = recorded.get(key)
            is_split = key == "data.test" and recorded.get("data") == "hub"
            if value and value != str(kept) and not is_split and self.has(value):
                recorded[key] = str(self.place(value))
        # A pretrained model whose folder is gone: its config is beside the tokenizer.
        pretrained = recorded.get("recipe.pretrained", "init_from")
        if pretrained and not Path(pretrained).expanduser().is_dir() and (kept / "config.json").is_file():
            recorded["recipe.pretrained"] = str(kept)
        return recorded

    @property
    def version(self) -> str:
        """The version that wrote the record, in words."""
        number = run_facts(self.path, "written_by").get("mantissa")
        return f"version {number}" if number else "an earlier version"

    def is_gone(self, key: str, recorded: Any) -> bool:
        """Return whether an option is the path of data that are no longer where they were when the run was started."""
        return key == "data.path" and not self.has(recorded)

    def has(self, path: Any) -> bool:
        """Return whether something is where a path of the record leads, which may be a glob pattern."""
        place = self.place(path)
        return place.exists() or any(glob.iglob(str(place), recursive=True))

    def place(self, path: Any) -> Path:
        """Return where a path of the record leads from the folder that the run was last started in.

        That is in run.json; from the present one where it is not known.
        """
        return Path(str(run_facts(self.path, "launch").get("folder", ""))) / Path(str(path)).expanduser()


def such_as(folder: Path, output_dir: str, key: str = "resume", recipes: Collection[str] = ()) -> str:
    """Return the words that name a run in a folder, or in ``output_dir``, that the option ``key`` takes: the newest.

    Where there is none, they say so. ``recipes``: see ``open``.
    """
    for place in (folder, Path(output_dir).expanduser()):
        found = {path.parent: read_object(path) for path in place.glob(f"*/{CONFIG_FILE}")}
        runs = [run for run, config in found.items() if "precision.mode" in config]
        runs = [run for run in runs if not recipes or found[run].get("recipe") in recipes]
        runs = [run for run in runs if ((run / BEST).is_dir() if key == "run" else steps(run / CHECKPOINTS))]
        if runs:
            return f", such as {max(runs, key=lambda path: path.stat().st_mtime)}"
    if not Path(output_dir).expanduser().is_dir():
        return f" (there is no folder {output_dir} here)"
    of = f" of {', '.join(recipes)}" if recipes else ""
    return f" ({output_dir} has none{of} with {BEST if key == 'run' else CHECKPOINTS}/)"


def is_in_mlflow(given: str) -> bool:
    """Return whether this is the address of a run in MLflow, ``mlflow:RUN_ID`` or ``runs:/RUN_ID``; else a path."""
    return given.startswith(("mlflow:", "runs:/"))


def run_of(path: Path) -> RunFolder | None:
    """Return the run that a folder is, or whose ``best/`` it is."""
    above = path.parent if path.name == BEST else path.resolve().parent
    for folder in (path, above) if path.resolve().name == BEST else (path,):
        if "precision.mode" in read_object(folder / "config.json"):
            return RunFolder(folder)
    return None


def run_around(path: Path) -> RunFolder | None:
    """Return the run in whose folder another one is: that of its checkpoints, one of these, or ``best/``."""
    if run_of(path) is not None and path.resolve().name != BEST:
        return None
    found = filter(None, map(run_of, path.absolute().parents[:2]))
    run = next(found, None)
    return run and RunFolder(Path(min(os.path.relpath(run.path), str(run.path), key=len)))


def same_place(key: str, before: Any, now: Any) -> bool:
    """Return whether an option is a path to the same file or folder as before, however it is written."""
    if key not in PATHS or not isinstance(before, str) or not isinstance(now, str):
        return False
    return os.path.realpath(os.path.expanduser(before)) == os.path.realpath(os.path.expanduser(now))


def named(output_dir: str, name: str) -> list[RunFolder]:
    """Return the folders of a run name, with a number where the name was taken; the one that was last changed first.

    A run that was itself given a name with a number is another run.
    """
    root = Path(output_dir).expanduser()
    numbered = re.compile(rf"{re.escape(name)}-\d+")
    others = [path for path in root.iterdir() if numbered.fullmatch(path.name)] if root.is_dir() else []
    others = [path for path in others if read_object(path / CONFIG_FILE).get("run_name", name) == name]
    folders = [path for path in (root / name, *others) if path.is_dir()]  # no dangling link
    return [RunFolder(path) for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]


def to_continue(output_dir: str, name: str, resume: str | None) -> RunFolder | None:
    """Return the run of this name that torchrun's restart, or ``resume=auto``, continues.

    It has a checkpoint, or is complete: then nothing is left to do, whatever it has kept.
    """
    runs = named(output_dir, name)
    saved = [run for run in runs if steps(run.checkpoints) or files.final_status(run.path) == "FINISHED"]
    if restarted():
        launches = {folder: run_facts(folder.path, "launch").get("launch") for folder in saved}
        if ours := [folder for folder, launch in launches.items() if launch == launch_id()]:
            return ours[0]
    return saved[0] if saved and resume == "auto" else None
