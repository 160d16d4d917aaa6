"""How a CSV file is read as a table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

_SNIFFED = 1 << 16
"""Characters of a table by which its form is found."""


def table_options(path: Path) -> dict[str, Any]:
    """Return how ``datasets`` reads a CSV file: its separator, and names for columns where it has none.

    The separator cuts all rows into the same number of columns, two or more; between tabs a quote that does not end
    is a letter. The first row is data where it has a number, or a value that its column has again.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = file.read(_SNIFFED).splitlines(keepends=True)
        whole = not file.read(1)
    for separator, quoted in ((",", True), ("\t", False), ("\t", True), (";", True), ("|", True)):
        rows = list(filter(None, csv.reader(lines, delimiter=separator, quoting=0 if quoted else 3)))
        names, *rows = (rows if whole else rows[:-1]) or [[]]
        letters = any(cell[:1] == '"' and cell.count('"') == 1 for row in rows for cell in row)
        if len(names) > 1 and all(len(row) == len(names) for row in rows) and (letters or quoted):
            break
    else:
        return {"sep": "\t"} if path.suffix == ".tsv" else {}
    cells = [(name, column) for name, *column in zip(names, *rows, strict=True) if name]
    has_names = not any(_is_number(name) or name in column for name, column in cells)
    columns = {} if has_names else {"column_names": [f"column_{number + 1}" for number in range(len(names))]}
    return {"sep": separator, **columns} | ({} if quoted else {"quoting": csv.QUOTE_NONE})


def header(path: Path, separator: str) -> dict[str, None]:
    """Return the names in the first row of a CSV file."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return dict.fromkeys(next(csv.reader(file, delimiter=separator), []))


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").replace(".", "", 1).isdecimal()
