#!/usr/bin/env bash
# Measure on a GPU what is worth most, for 480 seconds: benchmarks/gpu.sh [key=value …]; options: see benchmarks/gpu.py.
# A second call goes on. Wheels in .whl are installed into .site first, for a machine without network.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(command -v python || echo python3)}
if [[ -d .whl && ! -d .site ]]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target .site.new .whl/*.whl
  mv .site.new .site
fi
PYTHONPATH="$PWD/.site:$PWD" exec "$PYTHON" benchmarks/gpu.py "$@"
