"""What each loop loses when it is killed 20 times: appends to results/<machine>/resumes.jsonl, one line a loop.

python benchmarks/resume/measure.py [LOOP …]
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import records
from mantissa.__main__ import main as mantissa
from trainer.errors import UserError
from trainer.hardware import detect

HERE = "benchmarks/resume"
STEP, SAMPLES = r"step (\d+) loss (\S+)", r"step (\d+) samples (.*)"
OURS = (
    "recipe=gpt2 recipe.size=nano recipe.context=32 recipe.dropout=0.1 data=synthetic data.vocab_size=256 batch_size=8 "
    "micro_batch_size=8 eval_every=5 eval_samples=6 checkpoint.every=2 deterministic=true tracking=local profiler=none "
    "steps=60 run_name=run output_dir={out} resume=auto"
)
LOOPS = {
    "nanoGPT's loop": (
        f"{HERE}/nanogpt_loop.py {{out}}", "ckpt.pt", r"iter (\d+): loss (\S+)", r"iter (\d+): samples (.*)"
    ),
    "transformers' Trainer": (f"{HERE}/transformers_loop.py {{out}}", "checkpoint-100/*", STEP, SAMPLES),
    "transformers' Trainer, complete checkpoints": (
        f"{HERE}/transformers_loop.py {{out}} complete", "checkpoint-100/*", STEP, SAMPLES
    ),
    "Lightning": (f"{HERE}/lightning_loop.py {{out}}", "last.ckpt", STEP, SAMPLES),
    "accelerate, skip_first_batches": (f"{HERE}/loader_loops.py {{out}} accelerate", "100/*", STEP, SAMPLES),
    "torchdata, saved at an epoch's end": (f"{HERE}/loader_loops.py {{out}} stateful", "last.pt", STEP, SAMPLES),
    "Mantissa": (
        f"scripts/train.py {OURS}", "run/checkpoints/step-00000060/*", r"step (\d+)/\d+  valid/loss (\S+)", ""
    ),
}  # fmt: skip
"""By name: the script with its arguments, the files that are compared, and the patterns of metric and samples."""
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "torchdata")


def main(names: list[str]) -> None:
    """Certify loops in turn, and append what was found."""
    for name in names or LOOPS:
        if name not in LOOPS:
            raise UserError(f"{name} is unknown; choose from {', '.join(LOOPS)}")
        script, files, metric, samples = LOOPS[name]
        with tempfile.TemporaryDirectory() as folder:
            options = ["--kills", "20", "--same", f"{{out}}/{files}", "--metric", metric]
            options += ["--data", samples] if samples else []
            print(f"{name}:", flush=True)
            report = Path(folder, "report")
            mantissa(["certify", f"{sys.executable} {script}", *options, "--report", str(report)])
            found = json.loads((report / "certificate.json").read_text())
        content = {"loop": name, "versions": {package: version(package) for package in PACKAGES}} | {
            key: found[key] for key in ("verdict", "lost", "facts", "kills", "resumes", "comparison")
        }
        command = f'python {HERE}/measure.py "{name}"'
        records.append(records.RESUMES, command, detect("cpu"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
