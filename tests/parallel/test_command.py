"""torchrun and the real command line: several processes, lost ranks, restarts, two hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from tests import forks
from tests.parallel.conftest import FORKED_TORCHRUN, PROJECT, TORCHRUN, environment, forked_environment
from trainer.checkpoint.reader import load
from trainer.files import read_json_lines

SCRIPT = str(PROJECT / "scripts" / "train.py")
GPT2 = (
    "recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "batch_size=8",
    "micro_batch_size=2", "eval_every=3", "eval_samples=6", "log_every=1", "schedule=constant", "tracking=local",
    "schedule.warmup_steps=0", "device=cpu", "run_name=run",
)  # fmt: skip
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(2, "parallel=ddp", launcher=[…])``: scripts/train.py under torchrun; 0 processes: under python alone.

    All are forks of one process that has imported everything, save where they are to be ``fresh``.
    """
    begun: list[subprocess.Popen[str]] = []

    def begin(
        processes: int, *overrides: str, launcher: tuple[str, ...] = (), script: str = SCRIPT, fresh: bool = False
    ) -> Any:
        if not any(option.startswith("--rdzv") for option in launcher):
            launcher = ("--standalone", *launcher)  # a port of its own: torch 2.11's default is the same for all
        torchrun = TORCHRUN if fresh else FORKED_TORCHRUN
        command = [*torchrun, f"--nproc-per-node={processes}", *launcher] if processes else [sys.executable]
        process = (subprocess.Popen if fresh else forks.Popen)(
            [*command, script, *GPT2, *overrides],
            cwd=tmp_path,
            env=environment() if fresh else forked_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def done(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out, err


def lines(run: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run / "metrics.jsonl"))


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run) if "loss" in line}


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not any(line["step"] >= step for line in lines(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rank_process(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Find it by its environment, or its name: a fork keeps the environment that /proc shows."""
    children = psutil.Process(launcher.pid).children()
    (found,) = [child for child in children if f"rank {rank}" in (f"rank {child.environ().get('RANK')}", child.name())]
    return found


MEAN = """
import sys
from recipes.causal_lm import CausalLM
from trainer.run.command import main

summed = CausalLM.loss
def mean(self, model, batch):
    output = summed(self, model, batch)
    return output._replace(loss_sum=output.loss_sum / self.count_targets(batch))
CausalLM.loss, CausalLM.known_sum = mean, False
sys.exit(main())
"""


def test_a_loss_that_is_a_mean_ends_all_ranks_before_anything_is_written(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mean.py").write_text(MEAN)
    process = start(2, "parallel=fsdp", "precision=bf16", script=str(tmp_path / "mean.py"))
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert err.count("error: recipe=gpt2: the loss of ") == 1
    assert not (tmp_path / "outputs").exists()


def test_a_run_goes_from_two_processes_to_one_and_back(start: Start, tmp_path: Path) -> None:
    """Saved by FSDP in two parts, resumed on one device, then by DDP, then by FSDP: the same losses as never moved."""
    run = tmp_path / "outputs" / "run"
    out, err = done(start(2, "parallel=fsdp", "precision=bf16", "steps=3"))
    assert "2 processes (fsdp)" in out
    assert out.count("Done in ") == 1  # one process prints
    assert "rank" not in out + err.replace("nproc", "")
    assert (run / "checkpoints/step-00000003/optimizer-00002-of-00002.safetensors").exists()
    done(start(0, "precision=bf16", "steps=6", "resume=auto"))
    assert (run / "checkpoints/step-00000006/model.safetensors").exists()
    done(start(2, "parallel=ddp", "precision=bf16", "steps=9", "resume=auto"))
    out, _ = done(start(2, "parallel=fsdp", "parallel.reshard_after_forward=false", "steps=12", "resume=outputs/run"))
    assert "run, resumed after step 9" in out
    done(start(0, "precision=bf16", "steps=12", "run_name=whole"))
    moved, whole = losses(run), losses(tmp_path / "outputs" / "whole")
    assert list(moved) == list(range(1, 13))
    assert list(moved.values()) == pytest.approx(list(whole.values()), rel=2e-3)
    one, other = load(run / "checkpoints").tensors(), load(tmp_path / "outputs/whole/checkpoints").tensors()
    shapes = {name: tensor.shape for name, tensor in other.items() if not name.startswith("rng/1")}
    assert {name: tensor.shape for name, tensor in one.items() if not name.startswith("rng/1")} == shapes
    exported = json.loads((run / "best" / "config.json").read_text())
    assert exported["n_layer"] == 4
    assert len(list((tmp_path / "outputs").iterdir())) == 2


LOST = """
import os, signal, sys
from trainer.run import command
from trainer.trainer import Trainer

train_step = Trainer.train_step

def lost(self, microbatches):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.step == 7:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # until torchrun ends it, which else may see this one's end first
    return train_step(self, microbatches)

Trainer.train_step = lost
sys.exit(command.main())
"""


def test_a_lost_rank_is_named_and_the_restart_continues(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    run = tmp_path / "outputs" / "run"
    more = ("parallel=ddp", "steps=12", "checkpoint.every=2", "deterministic=true", "recipe.dropout=0.1")
    out, err = done(start(2, *more, launcher=("--max-restarts=1",), script=str(tmp_path / "lost.py")))
    assert re.search(r"exitcode: -9\) local_rank: 1\b", err), err
    resumed = re.search(r"run, resumed after step (\d+)", out)
    assert resumed
    assert int(resumed[1]) in (4, 6)  # whether the last one was whole in time
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["run"]
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 13))  # each once
    done(start(2, *more, "run_name=whole"))
    assert losses(run) == losses(tmp_path / "outputs" / "whole")  # to the last bit


BROKEN = """
import os, sys
from trainer.errors import UserError
from trainer.run import command
from trainer.trainer import Trainer

train_step = Trainer.train_step

def broken(self, microbatches):
    if os.environ["RANK"] == "1" and self.step == 2:
        raise UserError("the third step is unlucky")
    return train_step(self, microbatches)

Trainer.train_step = broken
sys.exit(command.main())
"""


def test_an_error_on_one_rank_is_reported_with_the_rank(start: Start, tmp_path: Path) -> None:
    """And a sweep does not continue: the other ranks would meet this one in another run."""
    (tmp_path / "broken.py").write_text(BROKEN)
    sweep = ("hydra.mode=MULTIRUN", "seed=0,1", "parallel=ddp", "steps=9")
    _, err = done(start(2, *sweep, script=str(tmp_path / "broken.py")), code=1)
    assert "rank 1: error: run-seed_0: the third step is unlucky" in err
    assert re.search(r"Root Cause[^~]*?rank\s+: 1 ", err), err
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["run-seed_0"]


def test_an_error_on_all_ranks_is_reported_once_and_the_sweep_continues(start: Start, tmp_path: Path) -> None:
    wrong_first = ("hydra.mode=MULTIRUN", "batch_size=7,8", "parallel=ddp", "steps=2")
    _, err = done(start(2, *wrong_first), code=1)
    assert err.count("error: run-batch_size_7: batch_size=7 is not a multiple") == 1
    assert json.loads((tmp_path / "outputs/run-batch_size_8/summary.json").read_text())["status"] == "FINISHED"


def test_a_signal_to_torchrun_saves_on_all_ranks(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    long = ("eval_every=40", "eval_samples=100000", "recipe.context=2", "batch_size=2", "micro_batch_size=1")
    process = start(2, "parallel=fsdp", "steps=100000", *long, "checkpoint.save_on_signal=[USR1]", fresh=True)
    wait_for_step(run, 3, process)
    os.kill(rank_process(process, 1).pid, signal.SIGUSR1)  # to one rank only
    deadline = time.monotonic() + 300
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    first = max(losses(run))
    wait_for_step(run, first + 2, process)  # and continues
    wait_for_step(run, stop := 40 * (max(losses(run)) // 40 + 1), process)  # to an evaluation of 16,000 batches
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert "saved (requested by a signal)" in out
    printed = re.search(r"stopped by SIGTERM after step (\d+), saved. Resume with:\n  (.*)", err)
    assert printed, err
    assert err.count("stopped by SIGTERM") == 1
    assert load(run / "checkpoints").step == int(printed[1]) == stop
    assert re.fullmatch(r"torchrun --nproc-per-node=2 \S+/scripts/train\.py resume=outputs/run", printed[2])


def test_two_hosts_connect_and_train_together(start: Start, tmp_path: Path) -> None:
    """Two agents, as on two machines, find each other through torchrun's c10d rendezvous."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=false")
    launcher = ("--nnodes=2", *where, "--rdzv-id=pair")
    hosts = [start(1, "parallel=fsdp", "steps=4", launcher=launcher) for _ in range(2)]
    outs = [done(host)[0] for host in hosts]
    assert sorted("2 processes (fsdp)" in out for out in outs) == [False, True]
    assert list(losses(tmp_path / "outputs" / "run")) == [1, 2, 3, 4]
