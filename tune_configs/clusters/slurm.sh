#!/usr/bin/env bash
# A sweep under SLURM: sbatch slurm.sh CONFIG.yaml STORE [options of `depthlaw sweep`]
# One Ray node a machine, for as long as the job; submitted again, it goes on where it ended. CONFIG, STORE, the
# environment and $DEPTHLAW_DATA must be on a file system that all nodes share.
#SBATCH --job-name=depthlaw
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

config=${1:?the YAML of the sweep}
store=${2:?the folder of the store}
shift 2

# shellcheck disable=SC1091
source "${DEPTHLAW_VENV:-.venv}/bin/activate"
export DEPTHLAW_DATA=${DEPTHLAW_DATA:-$PWD/data} RAY_USAGE_STATS_ENABLED=0
# Nodes are taken whole: `ray symmetric-run` ends with `ray stop`, which ends every Ray of this user on them.
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# Starts Ray on every node, waits for all of them, runs the command on the first and stops Ray again.
srun --kill-on-bad-exit=1 ray symmetric-run --address "$address:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats \
  -- depthlaw sweep "$config" --address "$address:$port" --storage "$store" "$@"
