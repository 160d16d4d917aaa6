"""Recipes that are not in ``recipes/``: those of the folder ``recipe_path``.

State of the process: that folder, ``_folder``, which ``use_folder`` sets.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

from trainer.errors import UserError

_folder: list[Path] = []
"""The folder that ``use_folder`` was last called with, if any."""


def use_folder(recipe_path: str | None) -> None:
    """Let recipes be found in a folder from now on: its Python files, and its ``conf/`` if it has one.

    Raises:
        UserError: there is no such folder.
    """
    folder = Path(recipe_path).expanduser().absolute() if recipe_path else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"recipe_path={recipe_path} is not a folder; give that of your recipe's Python file or conf/")
    if folder is not None and not any(folder.glob("*.py")) and not (folder / "conf").is_dir():
        raise UserError(f"recipe_path={recipe_path} has no Python file and no conf/; give the folder that has")
    _folder[:] = [folder] if folder else []
    if folder and str(folder) not in sys.path:
        sys.path.append(str(folder))  # also for the processes that load data


def find_modules() -> dict[str, Path]:
    """Return the files of recipes in the folder, by module.

    Raises:
        UserError: a file cannot be imported by its name, which no module can have, or which another has.
    """
    found = {}
    for file in sorted(path for folder in _folder for path in folder.glob("*.py")):
        if b"Recipe" not in (code := file.read_bytes()):  # no recipe
            continue
        if not file.stem.isidentifier():
            if not re.search(rb"class \w+\([^)]*Recipe", code):  # a script that only uses one
                continue
            raise UserError(f"{file} cannot be imported: a module's name has only letters, digits and _; rename it")
        spec = importlib.util.find_spec(file.stem)
        if spec is None or spec.origin != str(file):
            raise UserError(f"{file} has the name of another module, {file.stem}; rename it")
        found[file.stem] = file
    return found


def import_modules() -> list[str]:
    """Import the modules of recipes in the folder, and return their names.

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
    """Return the folder of YAML, like ``conf/``, beside those recipes."""
    return [path for folder in _folder if (path := folder / "conf").is_dir()]
