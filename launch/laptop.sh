#!/usr/bin/env bash
# Trains a small K3 with every text mechanism on this machine's CPU, on the running Python's own source files.
#   ./launch/laptop.sh [--devices N] [k3train train arguments ...]
# e.g. ./launch/laptop.sh --workdir runs/longer --config.num_steps=2000
# With 64 devices it is configs/tiny_64.py: 896 experts on data 4 x expert 16.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment

configured='' config=configs/tiny.py previous=''
for argument in "$@"; do
  case $argument in --config | --config=*) configured=yes ;; esac
  case $previous$argument in --devices64 | --devices=64) config=configs/tiny_64.py ;; esac
  previous=$argument
done
[ "$configured" ] || set -- --config "$config" "$@"
echo "k3train train $*"
exec k3train train "$@"
