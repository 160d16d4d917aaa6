"""Does another checkout of this repository train the same bits?

  python benchmarks/same_bits.py ../other            run every case in both checkouts, and compare what they left
  python benchmarks/same_bits.py ../other only=ddp   the cases whose name has this
  python benchmarks/same_bits.py ../other keep=DIR   keep the runs in this folder; those of a clean ../other that are
                                                     in it already are not repeated

A case is one or more commands with deterministic=true. Compared, by run: the lines of metrics.jsonl without times,
every tensor of best/ and of the checkpoints, the names of all files, and what MLflow holds: metrics, params, tags, and
the names of artifacts.
Exit status: 1 where anything differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mantissa.verdict import shell

PROJECT = Path(__file__).resolve().parents[1]
SAME = "device=cpu deterministic=true eval_samples=8 log_every=1 tracking.system_metrics=false"
TRAIN, SWEEP = f"scripts/train.py {SAME}", f"scripts/train.py -m {SAME}"
STOP_S = 120.0
"""Seconds that a run may take to save and end when it is told to."""
RANKS = "-m torch.distributed.run --standalone --nproc-per-node=2"

GPT2 = "recipe=gpt2 recipe.size=nano recipe.context=16 data=text data.path=text.txt data.tokenizer=chars batch_size=4"
LLAMA = "recipe=llama recipe.size=nano recipe.context=16 data=synthetic data.vocab_size=64 batch_size=4"
BERT = "recipe=bert recipe.size=nano recipe.context=16 data=synthetic data.vocab_size=64 batch_size=4"
T5 = "recipe=t5 recipe.size=nano recipe.context=16 data=synthetic data.vocab_size=64 batch_size=4"
RESNET = "recipe=resnet recipe.arch=resnet18 batch_size=4"
BIGNET = "recipe=bignet recipe.width=16 recipe.layers=4 data.samples=64 batch_size=8"
FORMATS = "precision=fp32,bf16,fp16,bf16_master,bf16_pure,bf16_sr,fp16_master,fp16_pure"

CASES: dict[str, list[str]] = {
    **{
        f"{line.split()[0][7:]} in 8 formats": [f"{SWEEP} {line} steps=3 {FORMATS}"]
        for line in (GPT2, LLAMA, BERT, T5, RESNET, BIGNET)
    },
    "scaled formats": [f"{SWEEP} {GPT2} steps=3 precision=fp8,mxfp8,nvfp4"],
    "16-bit optimizer state": [f"{TRAIN} {GPT2} steps=4 optimizer.state=bf16 precision=bf16"],
    "accumulation, norm clipped": [f"{TRAIN} {GPT2} steps=6 micro_batch_size=1 precision=bf16 clip=norm"],
    "value clipped": [f"{TRAIN} {GPT2} steps=6 clip=value optimizer=sgd"],
    "fp16, skipped steps": [
        f"{TRAIN} {T5} steps=16 precision=fp16 scaler=dynamic scaler.init=4194304 scaler.interval=3"
    ],
    "average of weights": [f"{TRAIN} {RESNET} steps=6 ema=default ema.decay=0.9 precision=bf16"],
    "Muon": [f"{TRAIN} {GPT2} steps=6 optimizer=muon precision=bf16"],
    "LAMB, Lion, Adafactor": [f"{SWEEP} {LLAMA} steps=4 optimizer=lamb,lion,adafactor precision=bf16_pure"],
    "schedules": [f"{SWEEP} {BIGNET} steps=8 schedule=linear,onecycle,wsd,constant optimizer=rmsprop,adam"],
    "frozen, layer decay": [f"{TRAIN} {GPT2} steps=6 freeze=[wte,wpe] optimizer.layer_decay=0.7"],
    "mixup, class weights": [
        f"{TRAIN} {RESNET} steps=6 augment=light augment.mixup=0.2 augment.cutmix=1.0 recipe.class_weights=balanced"
    ],
    "augmented photos": [
        f"{SWEEP} {RESNET} steps=3 data=imagefolder data.path=photos recipe.image_size=32 "
        "augment=imagenet,randaugment,trivialaugment"
    ],
    "epochs, early stopping": [
        f"{TRAIN} {BIGNET} epochs=12 data.samples=256 optimizer.lr=1e-6 "
        "early_stopping.patience=2 early_stopping.min_delta=1"
    ],
    "recomputed blocks": [f"{SWEEP} {GPT2} steps=4 activation_checkpointing=blocks,selective precision=bf16"],
    "compiled": [f"{TRAIN} {GPT2} steps=4 compile=default"],
    "two ranks, DDP": [f"{RANKS} {TRAIN} {RESNET} steps=4 parallel=ddp precision=bf16"],
    "two ranks, FSDP2": [f"{RANKS} {TRAIN} {GPT2} steps=4 parallel=fsdp precision=fp16 ema=default"],
    "stopped and resumed": [
        f"stop {TRAIN} {GPT2} steps=400 eval_every=20 precision=fp16 ema=default run_name=stopped",
        "scripts/train.py resume=outputs/stopped",
    ],
    "from earlier weights": [
        f"{TRAIN} {GPT2} steps=4 run_name=first",
        f"{TRAIN} {GPT2} steps=4 init_from=outputs/first run_name=tuned",
        f"{TRAIN} {GPT2} steps=4 init_from=outputs/first recipe.lora.rank=2 run_name=adapted",
        "scripts/evaluate.py run=outputs/tuned device=cpu",
        "scripts/generate.py run=outputs/tuned device=cpu max_new_tokens=12 prompt=the",
    ],
    "seeds": [f"{SWEEP} {BIGNET} steps=4 seed=0,1,2 precision=bf16"],
    "rounding, profile": [
        f"{TRAIN} {GPT2} steps=6 precision=bf16_pure diagnostics=numerics diagnostics.every=2 profiler=memory"
    ],
    "rows of a data set": [
        f"{TRAIN} {GPT2.replace('data=text data.path=text.txt', 'data=hub data.name=rows.jsonl')} steps=4"
    ],
}

OWN = re.compile(
    r"(mlflow )?metric (time|.*(_per_s|_time_s|_time_ms|_stall_s|memory_bytes|memory_mib|throughput|mfu))( at \d+)?$"
    r"|param data\.cache_dir$|tag init_from\.mlflow_run_id$"
    r"|tag (git|hardware|versions|mantissa\.|mlflow\.(source\.git|user|note|log-model))"
)
"""What differs between two runs of the same code: times, memory, folders, identities; and copies of the source."""
Facts = dict[str, str]
"""What is compared, by name: "metric loss", "tensor best/model.safetensors wte.weight"."""


def main() -> int:
    """Run the cases in both checkouts, and print a line for each."""
    other, *rest = sys.argv[1:]
    options = dict(argument.split("=", 1) for argument in rest)
    root = Path(options.get("keep") or tempfile.mkdtemp())
    sides = {"other": Path(other).resolve(), "this": PROJECT}
    failed = 0
    print(f"this {_commit(PROJECT)} beside {_commit(sides['other'])}", flush=True)
    print("case | runs | compared | differ\n--- | --- | --- | ---")
    with ThreadPoolExecutor(2) as pool:
        for name in (case for case in CASES if options.get("only", "") in case):
            folders = {side: root / side / name.replace(" ", "-") for side in sides}
            for _ in pool.map(lambda side: run(sides[side], folders[side], CASES[name]), sides):  # noqa: B023
                pass
            theirs, ours = (facts(folders[side]) for side in sides)
            wrong = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
            failed += bool(wrong)
            runs = len({key.split("|")[0] for key in ours})
            print(f"{name} | {runs} | {len(theirs)} | {len(wrong)}", flush=True)
            for key in wrong[:12]:
                print(f"    {key}: {theirs.get(key, 'absent')[:200]} | {ours.get(key, 'absent')[:200]}", flush=True)
    if "keep" not in options:
        shutil.rmtree(root)
    return int(failed > 0)


def run(checkout: Path, folder: Path, commands: Iterable[str]) -> None:
    """Run a case's commands in an empty folder with the data that cases use; not where they were run before."""
    commit, ended = _commit(checkout), folder / "ended.txt"
    if ended.exists() and ended.read_text() == f"{commit} {commands}" and not commit.endswith("-dirty"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_data(folder)
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"MANTISSA_CACHE": str(folder.parent / "cache")}

    for number, line in enumerate(commands):
        words = shlex.split(line)
        stops = words[0] == "stop"
        words = [str(checkout / word) if word.startswith("scripts/") else word for word in words[stops:]]
        command, output = [sys.executable, *words], folder / f"output-{number}.txt"
        if stops:
            _run_until_saved(command, output, folder, environment)
            continue
        done = shell.run(command, output, cwd=folder, env=environment)
        if done.code:
            raise SystemExit(f"exit status {done.code}: {line}\n{done.output[-3000:]}")
    ended.write_text(f"{commit} {commands}")


def _run_until_saved(command: list[str], output: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run a training until it has a checkpoint, and tell it to end."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None and not any(folder.glob("outputs/*/checkpoints/step-*/manifest.json")):
            time.sleep(0.01)
        process.terminate()
        if process.wait(STOP_S) == 0:
            raise SystemExit(f"it ended before it was told to: {' '.join(command)}")


def write_data(folder: Path) -> None:
    """Write a text, rows of a data set, and photos in two folders."""
    from PIL import Image

    lines = [f"{number}: the quick brown fox jumps over {number * 7919 % 1009} lazy dogs." for number in range(600)]
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for number in range(16):
        path = folder / "photos" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = b"".join(hashlib.sha256(bytes([number, block % 256])).digest() for block in range(48 * 40 * 3 // 32))
        Image.frombytes("RGB", (48, 40), pixels).save(path)


def facts(folder: Path) -> Facts:
    """Return what is compared of all runs in a folder."""
    found: Facts = {}
    for path in sorted((folder / "outputs").iterdir()):
        if (path / "metrics.jsonl").exists():
            found |= {f"{path.name}|{key}": value for key, value in _local(path).items()}
    found |= _tracked(folder / "mlflow.db")
    return {key: value for key, value in found.items() if not OWN.match(key.split("|", 1)[1])}


def _local(run: Path) -> Facts:
    found: Facts = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found |= {f"metric {name} at {values['step']}": repr(value) for name, value in sorted(values.items())}
    for path in sorted(run.rglob("*")):
        place = path.relative_to(run)
        if path.suffix == ".safetensors":
            found |= {f"tensor {place} {name}": value for name, value in _tensors(path).items()}
        elif path.is_file():
            found[f"file {place}"] = "is there"
    return found


def _tensors(path: Path) -> dict[str, str]:
    """Return type, shape and hash of each tensor of a safetensors file."""
    from safetensors import deserialize

    return {
        name: f"{about['dtype']} {about['shape']} {hashlib.sha256(about['data']).hexdigest()}"
        for name, about in deserialize(path.read_bytes())
    }


def _tracked(database: Path) -> Facts:
    """Return what MLflow holds of each run, by the run's name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    found: Facts = {}
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in client.search_runs(experiments):
        facts: Facts = {f"param {name}": value for name, value in run.data.params.items()}
        facts |= {f"tag {name}": value for name, value in run.data.tags.items()}
        for name in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, name)
            kept = points[-1:] if "/" not in name else points  # of a run that was stopped, where it was
            facts[f"mlflow metric {name}"] = repr([(point.step, point.value) for point in kept])
        facts |= {f"artifact {name}": "is there" for name in _artifacts(client, run.info.run_id, None)}
        found |= {f"{run.info.run_name}|{key}": value for key, value in facts.items()}
    return found


def _artifacts(client: Any, run: str, folder: str | None) -> Iterable[str]:
    for file in client.list_artifacts(run, folder):
        if file.is_dir:
            yield from _artifacts(client, run, file.path)
        else:
            yield file.path


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
