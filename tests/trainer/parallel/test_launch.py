"""What launchers, schedulers and earlier shells leave in the environment: one process, several, or a sentence."""

from __future__ import annotations

import io
import re
import signal
import sys
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from trainer.errors import UserError
from trainer.parallel import world, wrap
from trainer.parallel.wrap import DDP, Parallel

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
ONE = {
    "nothing": {},
    "an empty variable": {"WORLD_SIZE": ""},
    "one by hand": {"RANK": "0", "WORLD_SIZE": "1"},
    "only a rank": {"RANK": "3"},
    "Kubeflow with one worker": {"RANK": "0", "WORLD_SIZE": "1", **MEETING},
    "the shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
    "an interactive step": SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    "a batch script": SRUN | {"SLURM_PROCID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
}
ALONE = {
    "srun": SRUN | {"SLURM_STEP_NUM_TASKS": "8"},
    "Open MPI's mpirun": {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "Intel's mpirun": {"PMI_SIZE": "8", "PMI_RANK": "1"},
}
RAY = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1", **MEETING}
SEVERAL = {
    "Ray Train": RAY,
    "torchrun": RAY | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
    "torchrun, started by srun": RAY | SRUN | {"SLURM_STEP_NUM_TASKS": "8"},
}
PART = {
    "left over": ({"RANK": "1", "WORLD_SIZE": "2"}, "without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    "Kubeflow without torchrun": ({"RANK": "1", "WORLD_SIZE": "2", **MEETING}, "without LOCAL_RANK, LOCAL_WORLD_SIZE"),
    "a job script's": ({"WORLD_SIZE": "16", **MEETING}, "without RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"),
    "no place to meet": ({**RAY, "MASTER_PORT": ""}, "without MASTER_PORT"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for each in (*ONE.values(), *ALONE.values(), *SEVERAL.values()) for name in each}:
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", ONE)
def test_one_process(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ONE[case])
    assert Parallel().world("cpu").size == 1
    assert not world.tasks_alone()
    with pytest.raises(UserError, match="torchrun --nproc"):
        DDP().world("cpu")


@pytest.mark.parametrize("case", ALONE)
def test_tasks_that_do_not_know_each_other(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ALONE[case])
    assert re.fullmatch("(srun|mpirun) started 8 processes", world.tasks_alone())
    assert Parallel().world("cpu").size == 1
    with pytest.raises(UserError, match="started 8 processes"):
        DDP().world("cpu")


@pytest.mark.parametrize("case", SEVERAL)
def test_several_processes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, SEVERAL[case])
    world.check_launch()
    assert world.launched_processes() == 8
    assert not world.tasks_alone()
    with pytest.raises(UserError, match=r"started 8 processes.*unset RANK WORLD_SIZE"):
        Parallel().world("cpu")


@pytest.mark.parametrize("case", PART)
@pytest.mark.parametrize("kind", [Parallel, DDP])
def test_what_is_missing_is_named_at_once_and_the_remedy_helps(
    case: str, kind: type[Parallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, words = PART[case]
    given(monkeypatch, environment)
    with pytest.raises(UserError, match=words) as caught:
        kind().world("cpu")
    (unset,) = re.findall(r"for one process: unset (.*)", str(caught.value))
    for name in unset.split():
        monkeypatch.delenv(name, raising=False)
    assert Parallel().world("cpu").size == 1


@pytest.mark.parametrize("error", [wrap.dist.DistStoreError, wrap.dist.DistNetworkError])
def test_processes_that_do_not_meet_are_one_sentence(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, SEVERAL["torchrun"])
    monkeypatch.setattr(wrap.dist, "rendezvous", Mock(side_effect=error("address already in use")))
    words = "the processes did not meet at 127.0.0.1:29500 (address already in use); for one process: unset RANK"
    with pytest.raises(UserError, match=re.escape(words)):
        DDP().world("cpu")


@pytest.mark.parametrize("case", SEVERAL)
def test_a_process_says_for_whom_it_waits_and_how_to_end_that(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a job has left are like those of a job whose other processes are late."""
    given(monkeypatch, SEVERAL[case])
    told, handlers = threading.Event(), [signal.getsignal(signal.SIGINT)]

    class Told(io.StringIO):
        def flush(self) -> None:
            told.set()

    def rendezvous(*_: Any, **__: Any) -> Any:
        assert told.wait(60)
        handlers.append(signal.getsignal(signal.SIGINT))
        raise UserError("nobody came")

    monkeypatch.setattr(sys, "stderr", shown := Told())
    monkeypatch.setattr(wrap, "_TELLS_AFTER_S", 0.0)
    monkeypatch.setattr(wrap.dist, "rendezvous", rendezvous)
    with pytest.raises(UserError, match="nobody came"):
        DDP(timeout_s=90).world("cpu")
    assert shown.getvalue() == (
        "waiting up to 0:01:30 for all 8 processes at 127.0.0.1:29500; Ctrl-C ends this; "
        "or, for one process: unset RANK WORLD_SIZE\n"
    )
    assert handlers[1] == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == handlers[0]
