"""Four runs at once into an MLflow server over PostgreSQL, stopped, and continued from it in an emptied folder.

    python -m tests.command_line.tracking.mlflow_postgres [folder]

needs Debian's postgresql and psycopg2. Each run is compared with one that was never stopped: every tensor of the last
checkpoint, the best weights, and the points in MLflow. Not part of ``make test``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import PROJECT, same_bits
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import steps
from trainer.tracking.mlflow.store import connect

SEEDS = range(4)
STEPS, STOP_AFTER = 400, 100
JOB = (
    *("recipe=bignet", "recipe.width=64", "recipe.layers=4", "data.samples=512", "batch_size=32", "eval_samples=64"),
    *("deterministic=true", f"steps={STEPS}", "eval_every=50", "log_every=10", "profiler=none", "device=cpu"),
    *("tracking.checkpoints=all", "tracking.flush_every_s=0.5", "tracking.patience_s=120"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres(root: Path) -> Iterator[str]:
    """A cluster of its own, as the user postgres where this is root; gives the address of an empty database."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    port, data = free_port(), root / "cluster"
    data.mkdir()
    own = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if own:
        shutil.chown(data, "postgres")

    def run(name: str, *arguments: str) -> None:
        subprocess.run([*own, str(binaries / name), *arguments], check=True, cwd="/", stdout=subprocess.DEVNULL)

    run("initdb", "-D", str(data), "-U", "postgres", "-A", "trust")
    options = f"-p {port} -k {data} -h 127.0.0.1"
    run("pg_ctl", "-D", str(data), "-w", "-l", str(data / "log"), "-o", options, "start")
    try:
        run("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "mlflow")
        yield f"postgresql+psycopg2://postgres@127.0.0.1:{port}/mlflow"
    finally:
        run("pg_ctl", "-D", str(data), "-w", "-m", "fast", "stop")


@contextmanager
def server(root: Path, database: str) -> Iterator[str]:
    """``mlflow server`` with its artifacts."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(root / "artifacts")]
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT)
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None, (root / "server.log").read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def begin(folder: Path, seed: int, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROJECT / "scripts" / "train.py"), *JOB, f"seed={seed}", *overrides]
    log = (folder / f"log-{seed}").open("a")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def check(problems: list[str], what: str, good: bool) -> None:
    print(f"  {'ok  ' if good else 'BAD '} {what}", flush=True)
    if not good:
        problems.append(what)


def stop_all(folder: Path, uri: str) -> None:
    """Start the four at once, and stop each when it has saved a checkpoint after ``STOP_AFTER`` steps."""
    running = {seed: begin(folder, seed, f"tracking.uri={uri}") for seed in SEEDS}
    stopped: set[int] = set()
    while len(stopped) < len(running):
        for seed in running.keys() - stopped:
            saved = steps(folder / f"outputs/bignet-fp32-s{seed}/checkpoints")
            assert running[seed].poll() is None, (folder / f"log-{seed}").read_text()
            if saved and saved[-1] >= STOP_AFTER:
                running[seed].send_signal(signal.SIGTERM)
                stopped.add(seed)
        time.sleep(0.01)
    for seed, process in running.items():
        assert process.wait() == 128 + signal.SIGTERM, (folder / f"log-{seed}").read_text()


def compare(problems: list[str], root: Path, client: Any, seed: int, run: Any, stopped: int) -> None:
    name = f"bignet-fp32-s{seed}"
    one, other = root / "whole/outputs" / name, root / "stopped/outputs" / name
    print(f"{name}, run {run.info.run_id}, stopped after step {stopped}")
    check(problems, "status FINISHED", run.info.status == "FINISHED")
    tensors = [load(path / "checkpoints").tensors() for path in (one, other)]
    check(problems, f"{len(tensors[0])} tensors of the last checkpoint, bit for bit", same_bits(*tensors))
    best = [(path / "best/model.safetensors").read_bytes() for path in (one, other)]
    check(problems, "the best weights, byte for byte", best[0] == best[1])
    history = {
        key: Counter(point.step for point in client.get_metric_history(run.info.run_id, key))
        for key in ("loss", "valid/loss")
    }
    check(problems, "each loss once", history["loss"] == Counter([1, *range(10, STEPS + 1, 10)]))
    check(problems, "each validation loss once", history["valid/loss"] == Counter(range(50, STEPS + 1, 50)))
    there = {item.path.rpartition("/")[2] for item in client.list_artifacts(run.info.run_id, "checkpoints")}
    here = {path.name for path in (other / "checkpoints").iterdir()}
    check(problems, f"MLflow's checkpoints are the folder's: {', '.join(sorted(here))}", there == here)
    models = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id = '{run.info.run_id}'")
    check(problems, "one model, ready", [str(model.status) for model in models] == ["READY"])


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="mantissa-postgres-")).resolve()
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    whole, stopped = root / "whole", root / "stopped"
    whole.mkdir()
    stopped.mkdir()
    began = time.monotonic()
    for process in [begin(whole, seed, "tracking=local") for seed in SEEDS]:
        assert process.wait() == 0
    print(f"four runs undisturbed: {time.monotonic() - began:.0f} s", flush=True)
    problems: list[str] = []
    with postgres(root) as database, server(root, database) as uri:
        client = connect(uri)
        began = time.monotonic()
        stop_all(stopped, uri)
        print(f"four runs at once, stopped: {time.monotonic() - began:.0f} s", flush=True)
        at = {seed: steps(stopped / f"outputs/bignet-fp32-s{seed}/checkpoints")[-1] for seed in SEEDS}
        experiment = client.get_experiment_by_name("bignet")
        runs = {run.info.run_name: run.info.run_id for run in client.search_runs([experiment.experiment_id])}
        shutil.rmtree(stopped / "outputs")
        began = time.monotonic()
        continued = {
            seed: begin(stopped, seed, f"tracking.uri={uri}", f"resume=mlflow:{runs[f'bignet-fp32-s{seed}']}")
            for seed in SEEDS
        }
        for seed, process in continued.items():
            assert process.wait() == 0, (stopped / f"log-{seed}").read_text()
        print(f"four runs at once, fetched from the server and continued: {time.monotonic() - began:.0f} s", flush=True)
        check(problems, "four runs in MLflow, no more", len(client.search_runs([experiment.experiment_id])) == 4)
        for seed in SEEDS:
            compare(problems, root, client, seed, client.get_run(runs[f"bignet-fp32-s{seed}"]), at[seed])
    print(f"{len(problems)} differences" if problems else "no difference")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
