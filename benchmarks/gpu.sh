#!/usr/bin/env bash
# Measure what is worth most on a new GPU machine, in order: benchmarks/gpu.sh [STAGE …]; without names, every stage.
#   OUT=DIR      folder of logs and runs (default: outputs/gpu); a stage that is done there is not repeated
#   PYTHON=…     default: python
#   TEXT=FILE    tinyshakespeare's text, for the claim that needs it
# Every stage has a limit in seconds. One that fails does not stop the others, but the gate does: its tests say whether
# any number here means something. The exit code is 1 where a stage failed.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/gpu} PYTHON=${PYTHON:-python} TEXT=${TEXT:-} failed=0
mkdir -p "$OUT"
wanted=" $* "

stage() {  # NAME SECONDS COMMAND…
  local name=$1 limit=$2 code=0
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  [[ ! -e $OUT/$name.done ]] || { echo "$name: done before"; return 0; }
  timeout --kill-after=60 "$limit" "$PYTHON" "$@" >"$OUT/$name.log" 2>&1 || code=$?
  if [[ $code == 0 ]]; then
    touch "$OUT/$name.done"
  else
    failed=1
  fi
  echo "$name: exit code $code: $(tail -n 1 "$OUT/$name.log")"
  return $code
}

train() {  # NAME SECONDS OVERRIDE…
  local name=$1 limit=$2
  shift 2
  stage "$name" "$limit" scripts/train.py output_dir="$OUT/$name" run_name=run tracking=local tracking.epilogue=false \
    checkpoint=none loader=synthetic-on-device data=synthetic log_every=10 eval_samples=32 "$@"
}

gpt2="recipe=gpt2 recipe.size=124M recipe.context=1024 batch_size=32 micro_batch_size=32"
resnet="recipe=resnet recipe.arch=resnet50 recipe.image_size=224 data.samples=1024 optimizer=sgd precision=bf16"
steps="steps=60 eval_every=60"
traced="profiler=torch steps=12"
gate="bitwise_the_bare_loop or skipped_fused_step_leaves or fp32_is_fp32 or (compiled_gradients and cuda)"

stage gate 240 -m pytest tests/gpu -q -W default -k "$gate" || { echo "the gate failed: mend that first"; exit 1; }
train gpt2_compiled 240 $gpt2 precision=bf16 compile=default $steps          # goal on an H200: 500k tokens/s
train gpt2_profile 240 $gpt2 precision=bf16 compile=default $traced
train gpt2_master 240 $gpt2 precision=bf16_master compile=default $steps
train resnet50_compiled 240 $resnet batch_size=512 micro_batch_size=512 compile=default $steps  # 5k images/s
train gpt2_eager 150 $gpt2 precision=bf16 compile=off $steps
stage tests 270 -m pytest tests/gpu -q -n 4 -W default
stage bench 300 benchmarks/bench.py only=memory,precision,trainer repeats=3
stage claims 3600 scripts/reproduce.py all=true output_dir="$OUT/claims" ${TEXT:+data.path="$TEXT"}
exit $failed
