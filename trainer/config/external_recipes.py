"""Recipes that are not in ``recipes/``: those of the folder ``recipe_path``, and of installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from trainer.errors import UserError
from trainer.files import roots

ENTRY_POINTS = "mantissa.recipes"
"""The group of entry points in which an installed package names its modules or packages of recipes."""

_folder: list[Path] = []
"""The folder that ``use_folder`` was last called with, if any."""


def use_folder(recipe_path: str | None) -> None:
    """Let recipes be found in a folder from now on: its Python files, and its ``conf/`` if it has one.

    Raises:
        UserError: there is no such folder.
    """
    folder = Path(recipe_path).expanduser().absolute() if recipe_path else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"recipe_path={recipe_path} is not a folder; give the folder with your recipe's Python file")
    _folder[:] = [folder] if folder else []
    if folder and str(folder) not in sys.path:
        sys.path.append(str(folder))  # also for the processes that load data
        roots.append(folder)


def find_modules() -> dict[str, Path]:
    """Return the files of recipes from elsewhere, by module.

    Raises:
        UserError: a file cannot be imported, because another module has its name.
    """
    found = dict(_installed()[0])
    for file in sorted(path for folder in _folder for path in folder.glob("*.py")):
        if not file.stem.isidentifier() or b"Recipe" not in file.read_bytes():  # no recipe
            continue
        spec = importlib.util.find_spec(file.stem)
        if spec is None or spec.origin != str(file):
            raise UserError(f"{file} has the name of another module, {file.stem}; rename it")
        found[file.stem] = file
    return found


def import_modules() -> list[str]:
    """Import the modules of recipes from elsewhere, and return their names.

    Raises:
        UserError: one cannot be imported.
    """
    found = find_modules()
    for module, file in found.items():
        try:
            importlib.import_module(module)
        except SyntaxError as error:
            raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        except ImportError as error:
            raise UserError(f"{file} cannot be imported ({error}); install what is missing, or mend it") from error
    return list(found)


def config_folders() -> list[Path]:
    """Return the folders of YAML, each like ``conf/``, beside those recipes."""
    return [path for folder in (*_folder, *_installed()[1]) if (path := folder / "conf").is_dir()]


@cache
def _installed() -> tuple[dict[str, Path], list[Path]]:
    """Return the modules of installed packages, with their files, and the folders of these packages."""
    found: dict[str, Path] = {}
    folders = []
    for entry in entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(entry.value)
        if spec is None or spec.origin is None:
            raise UserError(f"the package that names {entry.value} as its recipes has no such module; install it again")
        file, parts = Path(spec.origin), entry.value.split(".")
        root = file.parents[len(parts) - (file.name != "__init__.py")]
        roots.append(root)
        folders.append(file.parent)
        below = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
        found |= {module_of(path, root): path for path in below}
    return found, folders


def module_of(file: Path, root: Path) -> str:
    """Return the dotted name of the module in a file below ``root``."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
