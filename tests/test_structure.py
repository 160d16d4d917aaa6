"""The folders are the architecture: which way imports go."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("trainer", "recipes", "evidence", "inference", "mantissa")


def sources(*folders: str) -> dict[str, Path]:
    """Every file of these folders (or files) by its dotted name; a package goes by its own."""
    found = {}
    for folder in folders:
        path = PROJECT / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            parts = file.relative_to(PROJECT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = sources(*PACKAGES)


def imported(file: Path, typed: bool) -> set[str]:
    """The modules of the project that a file imports: at its top, in functions, ``typed``: for type checkers."""
    found, content = set(), ast.parse(file.read_text(encoding="utf-8"))
    for node in list(content.body):
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            content.body.remove(node)
    for node in ast.walk(content):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{file}: imports are absolute"
            found |= {name if (name := f"{node.module}.{each.name}") in MODULES else node.module for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & MODULES.keys()


def test_commands_write_no_tracked_file() -> None:
    """Runs, reports and caches lie elsewhere; only the generator of docs/options.md writes into a clone."""
    writes = re.compile(r"(write_\w+|open)\(\s*PROJECT|PROJECT\b.*\.(write|open|touch|mkdir)")
    assert [name for name, file in MODULES.items() if writes.search(file.read_text())] == ["trainer.config.help"]


IMPORTS = {name: imported(file, True) - {name} for name, file in MODULES.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def place(module: str) -> str:
    """The folder of a module; the files at the top of a package count one by one."""
    parent = module.rpartition(".")[0]
    return module if parent in ("", *PACKAGES) and MODULES[module].name != "__init__.py" else parent or module


@pytest.mark.parametrize(
    ("package", "known_by"),
    [
        ("evidence", ("evidence",)),
        ("inference", ("inference", "evidence")),
        ("recipes", ("recipes", "inference", "evidence")),
        ("trainer", ("trainer", "recipes", "inference", "evidence")),
    ],
)
def test_imports_go_down(package: str, known_by: tuple[str, ...]) -> None:
    found = {name for name, others in IMPORTS.items() if any(other.startswith(package) for other in others)}
    assert {name for name in found if not name.startswith(known_by)} == set()


def test_the_library_needs_torch_and_numpy_only() -> None:
    """At the top of its files, but for those that belong to another package; torch itself brings jinja2."""
    found = {
        name.partition(".")[0]
        for path in sources("mantissa").values()
        if path.parent.name != "callbacks" and path.name != "plugin.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert found - sys.stdlib_module_names == {"mantissa", "torch", "numpy"}


def test_the_librarys_tests_need_torch_numpy_and_pytest_only() -> None:
    """Others by ``pytest.importorskip``, so that they run where nothing else is installed."""
    others = {}
    for path in (PROJECT / "tests" / "mantissa").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        known = {*sys.stdlib_module_names, "pytest", "torch", "numpy", "mantissa"}
        unknown = {name for name in names if name.partition(".")[0] not in known}
        others[path.name] = {name for name in unknown if not name.startswith("tests.mantissa.")}
    assert {name: unknown for name, unknown in others.items() if unknown} == {}


def test_neither_files_nor_folders_form_a_circle() -> None:
    assert "trainer.config.schema" in IMPORTS["trainer.trainer"]
    assert "trainer.config.explain" in IMPORTS["trainer.config.options"]  # within a function
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert circle(IMPORTS) == []  # nor of files, by an import for types
    running = {name: imported(file, False) - {name} for name, file in MODULES.items()}
    graph: dict[str, set[str]] = {}
    for name, others in running.items():
        graph.setdefault(place(name), set()).update(place(other) for other in others)
    assert circle({name: others - {name} for name, others in graph.items()}) == []


@pytest.mark.parametrize("path", sorted((PROJECT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_holds_no_logic(path: Path) -> None:
    """Its docstring is the help; the work is imported where it begins: help and Ctrl-C do not wait for torch."""
    content = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(content)
    defined = [node for node in ast.walk(content) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)]
    assert [node.name for node in defined if not isinstance(node, ast.Lambda)] in ([], ["main"])
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(content)) <= 12
