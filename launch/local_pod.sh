#!/usr/bin/env bash
# A pod on one machine: processes with a few simulated CPU devices each find each other as the hosts of a pod do and train
# one run together. Process 0 speaks and writes. If one is lost, the others end too; the same command then goes on.
#   ./launch/local_pod.sh PROCESSES DEVICES [k3train train arguments ...]
# e.g. ./launch/local_pod.sh 4 2 --workdir runs/pod       (4 x 2 = the devices of the mesh in configs/tiny.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ || ! $2 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
processes=$1 devices=$(($1 * $2))
shift 2
source scripts/environment.sh
prepare_environment

configured=
for argument in "$@"; do
  case $argument in --config | --config=*) configured=yes ;; esac
done
[ "$configured" ] || set -- --config configs/tiny.py "$@"

port=$(python -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$processes
echo "$processes processes: k3train train --devices $devices $*"
pids=()
for ((process = 0; process < processes; process++)); do
  # the filter takes away what the CPU's collectives say whenever devices connect
  JAX_PROCESS_ID=$process k3train train --devices "$devices" "$@" > >(grep --line-buffered -v '\[Gloo\]') &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM # they save together and end

code=0
for pid in "${pids[@]}"; do
  while true; do
    status=0
    wait "$pid" || status=$?
    kill -0 "$pid" 2>/dev/null || break # else a signal has ended the waiting, not the process
  done
  [ "$code" -ne 0 ] || code=$status
done
exit "$code"
