"""The job file for SLURM, with programs in the place of SLURM's."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests.helpers import compose

SLURM = Path(__file__).resolve().parents[2] / "scripts" / "slurm"
PROGRAMS = {
    # The pipe "started" gets its arguments; it ends with the code that the pipe "end" gets.
    "srun": 'printf "%q " "$@" >started; read -r code <end; exit "$code"',
    "scancel": 'echo "scancel $*" >>called; echo 1 >end',
    "scontrol": 'case "$2" in hostnames) printf "first\\nsecond\\n";; job) cat state;;\n'
    '*) echo "scontrol $*" >>called;; esac',
}
Begin = Callable[..., "subprocess.Popen[str]"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SLURM is for Linux")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """``begin("parallel=fsdp")``: the job with these arguments."""
    (tmp_path / "bin").mkdir()
    for name, content in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{content}\n")
        program.chmod(0o755)
    for pipe in ("started", "end"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "state").write_text("JobState=RUNNING PreemptTime=None\n")
    (tmp_path / "called").touch()
    begun: list[subprocess.Popen[str]] = []
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodes", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    environment = os.environ | job | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(SLURM / "train.sbatch"), *arguments]
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, start_new_session=True))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_job_starts_torchrun_with_its_arguments(begin: Begin, tmp_path: Path) -> None:
    process = begin("recipe=bignet", "parallel=fsdp", "run_name='my run'")
    words = shlex.split((tmp_path / "started").read_text())
    (tmp_path / "end").write_text("0\n")
    assert process.wait(60) == 0
    assert (tmp_path / "called").read_text() == ""
    assert words[:3] == ["env", "--ignore-signal=USR1", "torchrun"]
    options = torchrun.get_args_parser().parse_args(words[3:])
    assert (options.nnodes, options.nproc_per_node) == ("2", "4")
    assert (options.rdzv_endpoint, options.rdzv_id) == ("first:29500", "7-0")
    assert options.training_script == "scripts/train.py"
    given = options.training_script_args
    assert given[:3] == ["recipe=bignet", "parallel=fsdp", "run_name='my run'"]
    config = compose(*given)
    assert (config.resume, config.checkpoint.save_on_signal) == ("auto", ["USR1"])


def test_the_signal_before_the_time_limit_stops_the_ranks_and_queues_the_job_again(
    begin: Begin, tmp_path: Path
) -> None:
    process = begin()
    (tmp_path / "started").read_text()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 1
    assert (tmp_path / "called").read_text() == "scancel --signal=TERM 7.0\nscontrol requeue 7\n"


@pytest.mark.parametrize(("preempted", "called"), [("None", ""), ("2026-11-23T01:13:59", "scontrol requeue 7\n")])
def test_a_job_that_slurm_stops_waits_for_its_ranks_and_is_queued_again_if_preempted(
    begin: Begin, tmp_path: Path, preempted: str, called: str
) -> None:
    process = begin()
    (tmp_path / "started").read_text()
    (tmp_path / "state").write_text(f"JobState=RUNNING PreemptTime={preempted}\n")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "end").write_text("143\n")  # the ranks end after the signal came
    assert process.wait(60) in (1, 143)
    assert (tmp_path / "called").read_text() == called
