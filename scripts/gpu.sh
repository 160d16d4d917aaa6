#!/usr/bin/env bash
# scripts/gpu.py on a machine without network: WHEELS=.whl scripts/gpu.sh budget=9min
#   WHEELS   a folder of wheels, installed once into SITE (nothing is downloaded, nothing else is changed)
#   SITE     where to (default: .site)
#   PYTHON   the Python that has torch (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
site="${SITE:-$PWD/.site}"
if [ -n "${WHEELS:-}" ] && [ ! -e "$site/.complete" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl
    touch "$site/.complete"
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" scripts/gpu.py "$@"
