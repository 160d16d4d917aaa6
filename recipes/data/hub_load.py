"""Opening what ``datasets`` opens, with errors that name the option to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.text.pretrained import hub_reachable
from trainer.errors import UserError, first_line

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
EMBEDDED = "data=python_docs or data=text data.path=<file> (gpt2) and data=digits (resnet) need no network"


def local_path(name: str) -> Path | None:
    """Return the file or folder that ``data.name`` means, or None for a hub id."""
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix not in BUILDERS:
            raise UserError(
                f"data.name={name}: the name of a file must end with {', '.join(BUILDERS)}; "
                f"any file of text opens with data=text data.path={name}"
            )
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"data.name={name}: there is no such file or folder")
    return None


def load(name: str, subset: str | None, cache_dir: str) -> Mapping[str, Any]:
    """Return the splits by name. What is local is converted below ``cache_dir``, the hub's in its own cache.

    Raises:
        UserError: there is no such dataset or subset, it cannot be read, or there is no network.
    """
    import datasets

    path = local_path(name)
    arguments: dict[str, Any] = {"path": name, "name": subset}
    if path:
        arguments |= {"path": str(path), "cache_dir": str(Path(cache_dir).expanduser() / "datasets")}
        if path.is_file():
            arguments |= {"path": BUILDERS[path.suffix], "data_files": str(path)}
    elif not hub_reachable():
        datasets.config.HF_HUB_OFFLINE = True  # opens what was downloaded before, without minutes of retries
    try:
        builder = datasets.load_dataset_builder(**arguments)
        if builder.info.builder_name == "text":  # a file is a document, where the default makes every line one
            builder = datasets.load_dataset_builder(**arguments, sample_by="document")
        builder.download_and_prepare()
        splits: Mapping[str, Any] = builder.as_dataset()
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if path is None and datasets.config.HF_HUB_OFFLINE:
            raise UserError(
                f"data.name={name} is not in the local cache and the Hugging Face hub cannot be reached; " + EMBEDDED
            ) from None
        raise UserError(f"data.name={name} cannot be opened: {first_line(error.__cause__ or error)}") from None
    return splits


def chosen_split(splits: Mapping[str, Any], name: str, key: str, choice: str) -> Any:
    """Return the split that ``key`` names. Raises UserError if it is not there, or empty."""
    if choice not in splits:
        raise UserError(f"data.{key}={choice}: {name} has the splits {', '.join(splits)}")
    if not len(splits[choice]):
        raise UserError(f"data.{key}={choice}: this split of {name} has no rows")
    return splits[choice]


def column(dataset: Any, name: str, key: str, choice: str | None, fits: Callable[[Any], bool]) -> str:
    """Return the column that ``key`` names, or the only one whose feature ``fits``.

    Raises:
        UserError: no such column, none that fits, or several.
    """
    fitting = [each for each, feature in dataset.features.items() if fits(feature)]
    every = ", ".join(dataset.features)
    wanted = key.removesuffix("_column")
    if choice is not None:
        if choice not in fitting:
            why = f"is not of type {wanted}" if choice in dataset.features else "does not exist"
            raise UserError(f"data.{key}={choice}: this column {why}; use {' or '.join(fitting) or every}")
        return choice
    if not fitting:
        raise UserError(f"data.name={name} has no column of type {wanted}; its columns are {every}")
    if len(fitting) > 1:
        raise UserError(f"data.name={name} has several columns of type {wanted}; set data.{key}={'|'.join(fitting)}")
    return fitting[0]


def is_text(feature: Any) -> bool:
    """Whether the column holds strings."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def is_image(feature: Any) -> bool:
    """Whether the column holds images."""
    return type(feature).__name__ == "Image"


def is_class(feature: Any) -> bool:
    """Whether the column holds classes with names."""
    return type(feature).__name__ == "ClassLabel"


def may_be_class(feature: Any) -> bool:
    """Whether the column holds classes, strings or integers."""
    return is_class(feature) or is_text(feature) or "int" in str(getattr(feature, "dtype", ""))


def class_names(dataset: Any, label: str) -> list[str]:
    """Return the names of a column's classes: as declared, else its values in order."""
    if is_class(dataset.features[label]):
        return list(dataset.features[label].names)
    return [str(value) for value in sorted(value for value in dataset.unique(label) if value is not None)]


def class_numbers(dataset: Any, label: str, classes: list[str], where: str) -> np.ndarray:
    """Return the column as int64 indices into ``classes``. Raises UserError for a row that has none."""
    if label not in dataset.features:
        raise UserError(f"{where}: this split has no column {label}")
    values = dataset[label][:]
    if is_class(dataset.features[label]):
        numbers = [-1 if value is None else value for value in values]
    else:
        known = {name: number for number, name in enumerate(classes)}
        numbers = [known.get(str(value), -1) for value in values]
    if min(numbers) < 0 or max(numbers) >= len(classes):
        row = next(row for row, number in enumerate(numbers) if not 0 <= number < len(classes))
        raise UserError(f"{where}: row {row} has the label {values[row]!r}, none of the {len(classes)} classes")
    return np.array(numbers, dtype=np.int64)
