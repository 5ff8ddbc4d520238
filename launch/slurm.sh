#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process a GPU. From a login node it submits itself; inside the job it starts the
# processes, which find each other through Slurm. The same command again continues the run.
#   NODES=8 GPUS=8 ./launch/slurm.sh [--dry-run] --config FILE --workdir DIR [k3train train arguments ...]
# NODES x GPUS = the devices of the mesh. DIR must be on a filesystem that all nodes see. SBATCH_* variables (account,
# partition, time limit) are Slurm's own. --dry-run prints the command and does nothing.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

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
*) sed -n '2,6s/^# \{0,1\}//p' launch/slurm.sh >&2 && exit 2 ;;
esac

if [ -z "${SLURM_JOB_ID:-}" ]; then
  nodes=${NODES:-8} gpus=${GPUS:-8}
  # --signal: Slurm asks for a checkpoint three minutes before the time limit; --requeue: and starts the job again
  run sbatch --job-name=k3train --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus" \
    --exclusive --requeue --signal=TERM@180 --output=k3train-%j.log launch/slurm.sh "$@"
  exit
fi

if [ -z "$dry" ]; then
  source scripts/environment.sh
  prepare_environment gpu
fi
# --kill-on-bad-exit: one lost process ends all, and the job can be started again from the last checkpoint
run srun --kill-on-bad-exit=1 k3train train --multihost "$@"
