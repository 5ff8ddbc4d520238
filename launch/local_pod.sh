#!/usr/bin/env bash
# A pod on one machine: several processes with a few simulated CPU devices each find each other as hosts of a pod do and
# train one run together. Process 0 speaks and writes; if one ends badly, all are ended.
#   ./launch/local_pod.sh PROCESSES DEVICES [k3train train arguments ...]
# e.g. ./launch/local_pod.sh 4 2 --config configs/tiny.py --workdir runs/pod      (PROCESSES x DEVICES = the mesh's devices)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ || ! $2 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
processes=$1 devices=$2
shift 2
source scripts/environment.sh
prepare_environment

configured=
for argument in "$@"; do
  case $argument in --config | --config=*) configured=yes ;; esac
done
[ "$configured" ] || set -- --config configs/tiny.py "$@"

port=$(python -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$processes
echo "$processes processes with $devices devices each: k3train train $*"
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM # each saves together with the others and ends
for ((process = 0; process < processes; process++)); do
  JAX_PROCESS_ID=$process k3train train --devices $((processes * devices)) "$@" &
  pids+=($!)
done

# The first that ends badly decides; the others notice by themselves, and get a moment for it.
code=0
for ((ended = 0; ended < processes; ended++)); do
  wait -n "${pids[@]}" && status=0 || status=$?
  while [ "$status" -gt 128 ] && [ "$(jobs -rp | wc -l)" -eq $((processes - ended)) ]; do
    wait -n "${pids[@]}" && status=0 || status=$? # a trapped signal, not an end
  done
  if [ "$status" -ne 0 ] && [ "$code" -eq 0 ]; then
    code=$status
    [ "$status" -eq 4 ] || { sleep "${GRACE:-20}" && kill -KILL "${pids[@]}" 2>/dev/null; } &
  fi
done
exit "$code"
