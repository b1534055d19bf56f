#!/usr/bin/env bash
# Train on SLURM with two nodes of eight GPUs each:
#   sbatch docs/launch/slurm.sh configs/multi30k_en_de.py
# Submit the same job again to resume the run. The number of nodes may differ.
#SBATCH --job-name=transformer-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8        # one process per GPU; JAX assigns each process the GPU with its local rank
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120          # two minutes before the time limit, all processes save and exit with status 0
#SBATCH --requeue

set -euo pipefail
# A proxy between the nodes would prevent the processes from connecting.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY

# $SCRATCH must be the same folder on all nodes. JAX reads the other settings from SLURM's variables.
srun --kill-on-bad-exit=1 python train.py "$@" --workdir "$SCRATCH/runs/$SLURM_JOB_NAME"
