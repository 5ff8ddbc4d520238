#!/usr/bin/env bash
# Everything that must hold: style, types, floors, tests. Extra arguments go to pytest:  ./scripts/test.sh tests/ops -k kda
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment dev

step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff check .
step ruff format --check .
step pyright
step lint-imports
# Two workers: the tests simulate 8 devices each, more workers than cores only wait for one another. A file stays with
# one worker, because its tests share compiled programs; files of whole runs start first (tests/conftest.py).
step python -m pytest -q -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder --durations 15 "$@"
