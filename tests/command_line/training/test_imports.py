"""What a run spends time on beside training: imports of what it uses, each a third of a second or more, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers import PROJECT

WATCHED = """
import atexit, gc, sys
from trainer.run.signals import begin_program, end_program

begin_program()
from trainer.run.command import main
from trainer.run.run import Run

LIBRARIES = {"mlflow", "matplotlib", "datasets", "sklearn", "scipy", "pandas", "torchvision", "transformers", "peft"}

def tell(when):
    print("at", when, *sorted(LIBRARIES & set(sys.modules)), flush=True)

plain = Run.step

def step(self, microbatches):
    record = plain(self, microbatches)
    tell("the first step")
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
    return record

Run.step = step

class Object:
    def __del__(self):
        print("at the teardown of half a million objects, which takes seconds", flush=True)

a_global = Object()
given = sys.argv[1:]
for recipe in (["recipe=resnet", "recipe.arch=resnet18"], ["recipe=gpt2", "recipe.size=nano", "data.tokenizer=chars"]):
    sys.argv = ["scripts/train.py", *recipe, *given]
    status = main()
atexit.register(tell, "the end")
end_program(status)
"""
SIZE = ("steps=1", "batch_size=2", "eval_samples=2", "profiler=none", "tracking=local", "device=cpu")


def test_a_run_imports_what_it_uses(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, *SIZE, f"output_dir={tmp_path}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("at ")]
    assert told == [
        "at the first step torchvision",
        "at the first step matplotlib scipy torchvision transformers",  # which imports the others
        "at the end matplotlib scipy torchvision transformers",
    ]
