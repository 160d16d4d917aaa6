"""The measures of docs/design.md, of this checkout and of others beside it.

  python benchmarks/measures.py              of this checkout
  python benchmarks/measures.py ../other     and of another one

Lines are those of files that git tracks. "Precision compared as a string" counts files in which the name of a mode is
an operand of a comparison, a ``match`` pattern, or an argument of ``startswith`` or ``endswith``. "Stops of config"
counts the functions of this repository that are given a config on the way from the command line to the end of the
first step, and the calls among those that return one, in a run of two steps. Words of the docs are those outside of
what a command writes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
MODE = re.compile(r"(fp32|tf32|fp8|(bf16|fp16)(_pure|_master|_sr)?|_(pure|master|sr))")
WRITTEN_BY_A_COMMAND = re.compile(r"<!-- [^\n]*made by .*?<!-- end of [^\n]*-->", re.DOTALL)

LOADED = """
import json, sys
import trainer.trainer
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(json.dumps({"files": sorted(file for file in files if file.startswith(sys.argv[1])),
                  "foreign": [name for name in ("hydra", "omegaconf", "mlflow", "recipes") if name in sys.modules]}))
"""
FOLLOWED = """
import dataclasses, json, runpy, sys
sys.argv = [sys.path[0] + "/scripts/train.py", "recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=32",
            "batch_size=8", "steps=2", "tracking=local", "checkpoint=none", "profiler=none", "device=cpu"]
import trainer.run.command
stops, returns, root = set(), 0, sys.path[0]
def is_config(value):
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return {"precision", "micro_batch_size"} <= vars(value).keys()
def follow(frame, event, argument):
    global returns
    code = frame.f_code
    if not code.co_filename.startswith(root) or "/site-packages/" in code.co_filename:
        return
    if event == "call":
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_config(frame.f_locals.get(name)) for name in names):
            stops.add((code.co_filename[len(root) + 1 :], code.co_qualname))
    elif event == "return":
        if is_config(argument):
            returns += 1
        if code.co_qualname == "Trainer.train_step":
            sys.setprofile(None)
sys.setprofile(follow)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended
print("\\n" + json.dumps({"stops": len(stops), "files": len({file for file, _ in stops}), "returns": returns}))
"""


def main() -> int:
    """Print the measures of this checkout and of others as one table."""
    checkouts = [*(Path(path).resolve() for path in sys.argv[1:]), PROJECT]
    columns = [measures(checkout) for checkout in checkouts]
    print(f"measure | {' | '.join(_commit(checkout) for checkout in checkouts)}")
    print(" | ".join(["---"] * (len(checkouts) + 1)))
    for name in columns[0]:
        print(f"{name} | {' | '.join(column[name] for column in columns)}")
    return 0


def measures(checkout: Path) -> dict[str, str]:
    """Return each measure of a checkout as text, by its name."""
    tracked = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True)
    files = [checkout / name for name in tracked.stdout.splitlines()]

    def python(wanted: Callable[[str], bool]) -> list[Path]:
        return [path for path in files if path.suffix == ".py" and wanted(path.relative_to(checkout).parts[0])]

    product = python(lambda top: top not in ("tests", "benchmarks"))
    loaded = json.loads(_run(checkout, LOADED, str(checkout)))
    imported = [path for path in product if str(path) in loaded["files"]]
    followed = json.loads(_run(checkout, FOLLOWED).splitlines()[-1])
    compared = [path for path in product if compares_a_mode(path.read_text(encoding="utf-8"))]
    docs = [
        path
        for path in files
        if path == checkout / "README.md" or (path.suffix == ".md" and checkout / "docs" in path.parents)
    ]
    return {
        "lines of Python outside tests/ and benchmarks/": f"{_lines(product):,}",
        "lines of benchmarks/": f"{_lines(python(lambda top: top == 'benchmarks')):,}",
        "lines of tests/": f"{_lines(python(lambda top: top == 'tests')):,}",
        "lines that import trainer.trainer loads": f"{_lines(imported):,} in {len(imported)} files",
        "and of Hydra, OmegaConf, MLflow, recipes": ", ".join(loaded["foreign"]) or "nothing",
        "files that compare a precision as a string": str(len(compared)),
        "stops of config": f"{followed['stops']} in {followed['files']} files, {followed['returns']} returns",
        "hand-written words of README.md and docs/": f"{sum(map(_words, docs)):,}",
    }


def compares_a_mode(source: str) -> bool:
    """Return whether a file compares something with the name of a precision mode."""

    def names_a_mode(node: ast.AST) -> bool:
        values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return any(isinstance(each, ast.Constant) and MODE.fullmatch(str(each.value)) for each in values)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(names_a_mode, [node.left, *node.comparators])):
            return True
        if isinstance(node, ast.MatchValue) and names_a_mode(node.value):
            return True
        match node:
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=arguments):
                if any(map(names_a_mode, arguments)):
                    return True
    return False


def _run(checkout: Path, code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "measure.py"
        script.write_text(f"import sys\nsys.path[0] = {str(checkout)!r}\n{code}")
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def _lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _words(page: Path) -> int:
    """Return the number of words: what has a letter or a digit. The bars of a table do not count."""
    text = page.read_text(encoding="utf-8")
    words = WRITTEN_BY_A_COMMAND.sub("", text).split()
    return 0 if "\nGenerated by " in text[:200] else sum(bool(re.search(r"\w", word)) for word in words)


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
