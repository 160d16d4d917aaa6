"""The config classes as outlines read from their source: importing them for real takes torch, and seconds.

An outline has the fields of a dataclass, with their types and defaults, ``kind`` or ``name``, and of its checks those
that need nothing else: all that composing and checking a command line needs. Its definition, and what that refers to,
is evaluated; the module is not.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from enum import EnumType
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from trainer.errors import UserError
from trainer.files import roots

_PREFIX = "outline of "
_CHOICE = ("kind", "name")
"""Class attributes of which one names the choice of a config group."""
_IMPORTED = ("trainer.errors",)
"""Modules of the project that are imported: they take no torch, and their exceptions are caught."""


class _Unreadable(Exception):
    """A definition that only the module itself can evaluate."""


def outline(module: str, name: str) -> Any:
    """Return the outline of a class of the project, or whatever else the name stands for in the module's source."""
    file = _file(module)
    assert file is not None, f"{module} is not a module of the project"
    return _source(module, file).get(name)


def choices(module: str, file: Path) -> Iterator[type]:
    """Yield the outlines of the classes in a module that have a ``kind`` or ``name`` of their own."""
    source = _source(module, file)
    for node in _chosen(source.tree):
        try:
            yield source.get(node.name)
        except _Unreadable:
            yield source.from_real(node)


def has_choices(file: Path) -> bool:
    """Return whether ``choices`` yields any of a file; of one that is not valid Python, whether it mentions Recipe."""
    code = file.read_bytes()
    try:
        return bool(_chosen(ast.parse(code)))
    except (SyntaxError, ValueError):  # a ValueError: with null bytes
        return b"Recipe" in code


def real(cls: Any) -> Any:
    """Return the class that an outline was read from; imports its module."""
    if cls in _real:
        return _real[cls]
    return getattr(_load(origin(cls)), cls.__name__)


def origin(cls: type) -> str:
    """Return the module that an outline was read from."""
    return cls.__module__.removeprefix(_PREFIX).replace("/", ".")


def objects(config: Any) -> Any:
    """Return the real object that an outline's object describes, with all that is below it."""
    values = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    made = {name: objects(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}
    return real(type(config))(**made)


def summary(cls: type) -> str:
    """Return the first line of an outline's docstring."""
    node = _nodes.get(cls)
    return ((node and ast.get_docstring(node)) or "").partition("\n")[0]


def documented(cls: type) -> dict[str, str]:
    """Return what the docstrings below the fields of an outline say, by field."""
    found = {}
    for node in filter(None, (_nodes.get(base) for base in reversed(cls.__mro__))):
        for entry, following in zip(node.body, node.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(following, ast.Expr):
                found[ast.unparse(entry.target)] = inspect.cleandoc(ast.literal_eval(following.value))
    return found


_nodes: dict[type, ast.ClassDef] = {}
_real: dict[type, type] = {}
"""The classes whose outlines could not be read from their source."""


@cache
def _source(module: str, file: Path) -> _Source:
    return _Source(module, file)


class _Source:
    """A module's source, whose definitions are evaluated when they are needed."""

    def __init__(self, module: str, file: Path) -> None:
        self.name = module
        try:
            self.tree = ast.parse(file.read_bytes())
        except SyntaxError as error:
            raise UserError(f"{file}, line {error.lineno}: {error.msg}") from error
        alias = _PREFIX + module.replace(".", "/")  # without dots: it has no parent to be imported
        self.module = sys.modules[alias] = ModuleType(alias)  # where typing.get_type_hints looks
        self.definitions: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [(each.asname or each.name).partition(".")[0] for each in node.names]
            else:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
                names = [name for each in targets if (name := getattr(each, "name", getattr(each, "id", None)))]
            self.definitions |= dict.fromkeys(names, node)

    def get(self, name: str) -> Any:
        """Return what a name stands for at the end of the module."""
        space = self.module.__dict__
        if name not in space:
            node = self.definitions.get(name)
            if isinstance(node, ast.Import | ast.ImportFrom):
                space[name] = self._imported(node, name)
            elif isinstance(node, ast.ClassDef):
                self._run(_reduced(node))
                _nodes[space[name]] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef):
                self._run(node)
            else:
                raise _Unreadable(name)
            if isinstance(space[name], EnumType) and not isinstance(node, ast.Import | ast.ImportFrom):
                del space[name]
                raise _Unreadable(name)  # a member is equal only to the module's own
        return space[name]

    def from_real(self, node: ast.ClassDef) -> type:
        """Return the outline of a class that cannot be read from its source, below the outline of its base."""
        cls = getattr(_load(self.name), node.name)
        types = get_type_hints(cls)
        fields = [
            (each.name, types[each.name], dataclasses.field(default=each.default, default_factory=each.default_factory))
            for each in dataclasses.fields(cls)
            if "omegaconf_ignore" not in each.metadata
        ]
        base, found = next((base, file) for base in cls.__mro__[1:] if (file := _file(base.__module__)))
        named = {name: vars(cls)[name] for name in _CHOICE if name in vars(cls)} | {"__module__": self.module.__name__}
        try:
            above = outline(base.__module__, base.__name__)
        except _Unreadable:
            below = _source(base.__module__, found)
            definition = below.definitions[base.__name__]
            assert isinstance(definition, ast.ClassDef)
            above = below.from_real(definition)
        made = dataclasses.make_dataclass(node.name, fields, bases=(above,), namespace=named)
        setattr(self.module, node.name, made)
        _nodes[made], _real[made] = node, cls
        return made

    def _run(self, node: ast.stmt) -> None:
        functions = (each for each in ast.walk(node) if isinstance(each, ast.FunctionDef))
        inside = {each for function in functions for each in ast.walk(function)}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and not hasattr(builtins, each.id):
                with suppress(_Unreadable) if each in inside else nullcontext():
                    self.get(each.id)
        code = ast.fix_missing_locations(ast.Module([node], type_ignores=[]))
        flags = __future__.annotations.compiler_flag
        try:
            exec(compile(code, self.name, "exec", flags, dont_inherit=True), self.module.__dict__)
        except Exception as error:  # such as an attribute of a class that its outline lacks
            raise _Unreadable(self.name) from error

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str) -> Any:
        alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
        if isinstance(node, ast.Import):
            module, inside = alias.name, None
        else:
            package = self.name.rpartition(".")[0]
            module, inside = importlib.util.resolve_name("." * node.level + (node.module or ""), package), alias.name
        if module.partition(".")[0] in sys.stdlib_module_names or module in _IMPORTED:
            imported = importlib.import_module(module)
            return getattr(imported, inside) if inside else imported
        file = _file(module)
        if file is None or inside is None:
            raise _Unreadable(name)
        return _source(module, file).get(inside)


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{_file(module)} cannot be imported ({error}); install what is missing, or mend it") from error


def _file(module: str) -> Path | None:
    """Return the source of a module below one of the ``roots``."""
    for root in roots:
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def module_of(file: Path, root: Path) -> str:
    """Return the dotted name of the module in a file below ``root``."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _reduced(node: ast.ClassDef) -> ast.ClassDef:
    """Return the class with its options, what names it as a choice, and its checks."""
    body = [entry for entry in node.body if _names_choice(entry) or _is_option(entry)]
    functions = (entry for entry in node.body if isinstance(entry, ast.FunctionDef))
    body += [_tried(function) for function in functions if function.name == "__post_init__"]
    return ast.ClassDef(node.name, node.bases, node.keywords, body or [ast.Pass()], node.decorator_list)


def _tried(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function that ends without a word at the first statement that needs more than an outline has."""
    ended = ast.parse("try: pass\nexcept Exception as error:\n  if type(error).__name__ == 'UserError': raise").body[0]
    assert isinstance(ended, ast.Try)
    ended.body = function.body
    return ast.FunctionDef(function.name, function.args, [ended], [], function.returns)


def _is_option(entry: ast.stmt) -> bool:
    if not isinstance(entry, ast.AnnAssign) or "ClassVar" in ast.unparse(entry.annotation):
        return False
    return entry.value is None or "NO_OPTION" not in ast.unparse(entry.value)


def _chosen(tree: ast.Module) -> list[ast.ClassDef]:
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return [node for node in classes if any(map(_names_choice, node.body))]


def _names_choice(entry: ast.stmt) -> bool:
    """Return whether a statement in a class's body gives it a ``kind`` or ``name``, and not an option of that name."""
    if _is_option(entry) or not isinstance(entry, ast.AnnAssign | ast.Assign):
        return False
    target = entry.targets[0] if isinstance(entry, ast.Assign) else entry.target
    return getattr(target, "id", None) in _CHOICE and isinstance(entry.value, ast.Constant | ast.Name)
