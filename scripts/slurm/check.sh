#!/bin/bash
# Run scripts/slurm/train.sbatch, and a sweep, on a real SLURM of two nodes on this machine:
#   sudo apt install slurm-wlm munge && sudo env PATH="$PATH" scripts/slurm/check.sh /tmp/slurm
# Needs root, because slurmd does, and torchrun and python on the PATH. Everything is below the given folder, which must
# not exist. A node is a slurmd in its own UTS and mount namespace, with a host name and an address of its own on
# loopback, and two GPUs that are only names. The daemons are stopped at the end. The sweep needs
# hydra-submitit-launcher and is left out without it. Takes five to fifteen minutes on two cores.
set -euo pipefail

[ $# = 1 ] || { echo "usage: scripts/slurm/check.sh FOLDER"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: slurmd needs root; run it with sudo"; exit 2; }
for program in munged slurmctld slurmd sbatch torchrun python unshare; do
    command -v "$program" >/dev/null || { echo "error: no $program; apt install slurm-wlm munge, and activate .venv"; exit 2; }
done
mkdir -m 755 "$1" || { echo "error: give a folder that does not exist yet"; exit 2; }
folder=$(realpath "$1")
cd "$(dirname "$0")/../.."
export SLURM_CONF=$folder/slurm.conf PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 MLFLOW_TRACKING_URI=sqlite:///$folder/mlflow.db

stop() {
    scancel --user=root 2>/dev/null || true
    timeout 60 sh -c 'while squeue -h | grep -q .; do sleep 1; done' 2>/dev/null || true
    for file in "$folder"/slurmd-*.pid "$folder"/slurmctld.pid "$folder"/munged.pid; do
        [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
}
trap stop EXIT

start() {
    mkdir "$folder/state"
    touch "$folder/gpu0" "$folder/gpu1"
    echo "Name=gpu File=$folder/gpu[0-1]" >"$folder/gres.conf"
    { cat /etc/hosts; echo "127.0.0.2 node1"; echo "127.0.0.3 node2"; } >"$folder/hosts"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=check
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
GresTypes=gpu
NodeName=node1 NodeAddr=127.0.0.2 Port=17001 CPUs=2 Gres=gpu:2
NodeName=node2 NodeAddr=127.0.0.3 Port=17002 CPUs=2 Gres=gpu:2
PartitionName=check Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
CONF
    (umask 277 && head -c 128 /dev/urandom >"$folder/munge.key")
    munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
    slurmctld
    for node in node1 node2; do
        unshare --mount --uts sh -c "hostname $node && mount --bind $folder/hosts /etc/hosts && exec slurmd -N $node"
    done
    timeout 60 sh -c 'until sinfo -h -o %T | grep -q "^idle$"; do sleep 1; done'
    sinfo
}

# job RUN OPTION…: submit the job file for a tiny model, and print the job's number. Options of sbatch in $options.
job() {
    run=$1; shift
    # shellcheck disable=SC2086
    sbatch --parsable --nodes=2 --gpus-per-node=2 --cpus-per-task=2 --output="$folder/$run.log" ${options:---time=30} \
        scripts/slurm/train.sbatch recipe=gpt2 recipe.size=nano recipe.context=16 data=synthetic data.vocab_size=64 \
        batch_size=8 eval_samples=8 log_every=1 run_name="$run" output_dir="$folder/outputs" "$@"
}

# ended JOB: wait until it is no longer in the queue.
ended() { while squeue -h -j "$1" 2>/dev/null | grep -q .; do sleep 1; done; }

# step RUN N: wait until the run has done N steps.
step() { until grep -q "\"step\": $2[,}]" "$folder/outputs/$1/metrics.jsonl" 2>/dev/null; do sleep 0.5; done; }

# judge RUN STEPS RESTARTS: every step once in MLflow, in a single run that finished, and in the run's own log.
judge() {
    python - "$folder" "$@" <<'PYTHON'
import json, pathlib, re, sqlite3, sys

folder, run, steps, restarts = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lines = [json.loads(line) for line in (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines()]
logged = [line["step"] for line in lines if "loss" in line]
assert logged == list(range(1, steps + 1)), logged
database = sqlite3.connect(folder / "mlflow.db")
((found, status),) = database.execute("select run_uuid, status from runs where name = ?", (run,)).fetchall()
tracked = [step for step, in database.execute(
    "select step from metrics where run_uuid = ? and key = 'loss' order by step", (found,))]
assert status == "FINISHED" and tracked == logged, (status, tracked)
resumed = re.findall(r"resumed after step (\d+)", (folder / f"{run}.log").read_text())
assert len(resumed) >= restarts, resumed
print(f"{run}: {steps} steps, each once; one MLflow run, FINISHED, each step once; resumed after {resumed or 'no'} steps")
PYTHON
}

start
for mode in ddp fsdp; do
    echo; echo "== $mode on two nodes"
    ended "$(job "$mode" parallel="$mode" steps=6)"
    grep -E "^  batch|^step " "$folder/$mode.log"
    judge "$mode" 6 0
done

echo; echo "== scancel --signal=USR1 saves; USR1 to the batch script, as before the time limit: save, end, requeue, continue"
number=$(job stopped parallel=fsdp steps=60)
step stopped 5; scancel --signal=USR1 "$number"
until ls "$folder/outputs/stopped/checkpoints" 2>/dev/null | grep step; do sleep 0.5; done
step stopped 20; scancel --batch --signal=USR1 "$number"
ended "$number"
judge stopped 60 1

echo; echo "== preempted by a job of a partition with higher priority"
number=$(job preempted parallel=ddp steps=60)
step preempted 10; srun --partition=urgent --nodes=2 --cpus-per-task=2 hostname
ended "$number"
judge preempted 60 1

echo; echo "== a rank is killed"
number=$(job lost parallel=fsdp steps=60)
step lost 5; scancel --signal=USR1 "$number"
step lost 12; kill -KILL "$(pgrep -n -f "train.py .*run_name=lost ")"
ended "$number"
judge lost 60 1

echo; echo "== scancel ends it for good, with a checkpoint"
number=$(job cancelled parallel=ddp steps=5000)
step cancelled 10; scancel "$number"
ended "$number"
grep -E "^stopped by|^resume with|resume=" "$folder/cancelled.log" | head -n 2
scontrol show job "$number" | grep -o "JobState=[A-Z]*"

if python -c "import hydra_plugins.hydra_submitit_launcher" 2>/dev/null; then
    for seeds in 0,1 0,1,2; do
        echo; echo "== a sweep through hydra-submitit-launcher: seed=$seeds"
        python scripts/train.py -m hydra/launcher=submitit_slurm hydra.launcher.cpus_per_task=1 hydra.launcher.timeout_min=30 \
            recipe=bignet recipe.width=8 recipe.layers=2 steps=6 eval_samples=8 output_dir="$folder/sweep" precision=fp32,bf16 \
            seed="$seeds" 2>&1 | grep -v sacct | grep -v "accounting storage"
    done
fi
echo; echo "all passed"
