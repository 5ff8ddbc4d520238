#!/usr/bin/env bash
# Trains a small K3 with every text mechanism on this machine's CPU, on the running Python's own source files.
#   ./launch/laptop.sh [--devices N] [k3train train arguments ...]
# e.g. ./launch/laptop.sh --workdir runs/longer --config.num_steps=2000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment

configured=
for argument in "$@"; do
  case $argument in --config | --config=*) configured=yes ;; esac
done
[ "$configured" ] || set -- --config configs/tiny.py "$@"
echo "k3train train $*"
exec k3train train "$@"
