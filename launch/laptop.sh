#!/usr/bin/env bash
# Trains a small K3 with every text mechanism on this machine's CPU, on the running Python's own source files.
#   ./launch/laptop.sh [--devices N] [k3train train arguments ...]
# e.g. ./launch/laptop.sh --workdir runs/longer --config.num_steps=2000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment

has() { local a; for a in "${@:2}"; do case $a in "$1"|"$1="*) return 0;; esac; done; return 1; }
arguments=("$@")
has --config "$@" || arguments=(--config configs/tiny.py "${arguments[@]}")
echo "k3train train ${arguments[*]}"
exec k3train train "${arguments[@]}"
