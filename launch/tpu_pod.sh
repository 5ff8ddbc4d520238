#!/usr/bin/env bash
# Trains on a TPU VM slice: brings this checkout to every host, installs it there once and starts one process a host;
# they find each other through the slice. The same command again continues the run.
#   TPU=my-slice ZONE=us-east5-a ./launch/tpu_pod.sh [--dry-run] --config FILE --workdir DIR [k3train train arguments ...]
# The mesh must have as many devices as the slice has chips. DIR is a folder that all hosts see (a mounted bucket or a
# shared disk). --dry-run prints the commands and does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=yes
  shift
fi
run() {
  if [ "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}
case " $* " in
*" --config"*) ;;
*) sed -n '2,6s/^# \{0,1\}//p' launch/tpu_pod.sh >&2 && exit 2 ;;
esac
if [ -z "${TPU:-}" ] || [ -z "${ZONE:-}" ]; then
  echo "set TPU to the name of the slice and ZONE to its zone" >&2
  exit 2
fi

# What git knows of, as it lies here, uncommitted changes included.
archive=${TMPDIR:-/tmp}/k3train.tar.gz
[ "$dry" ] || git ls-files -z | tar --null --files-from=- -czf "$archive"
run gcloud compute tpus tpu-vm scp "$archive" "$TPU:k3train.tar.gz" --zone="$ZONE" --worker=all
on_host="mkdir -p k3train && tar -xzf k3train.tar.gz -C k3train && cd k3train"
on_host+=" && source scripts/environment.sh && prepare_environment tpu"
on_host+=" && k3train train --multihost $(printf '%q ' "$@")"
run gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$on_host"
