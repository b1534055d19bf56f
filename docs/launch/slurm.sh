#!/usr/bin/env bash
# Two nodes with eight GPUs each on SLURM: sbatch docs/launch/slurm.sh configs/multi30k_en_de.py
# The same job again goes on with the run, with as many nodes as you give it.
#SBATCH --job-name=transformer-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8        # one process a GPU: JAX gives each process the GPU of its number on the node
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120          # two minutes before the end: all processes save and leave with status 0
#SBATCH --requeue

set -euo pipefail
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY  # a proxy between the nodes keeps the processes apart

# $SCRATCH must be the same folder on all nodes. Nothing else is needed: JAX reads SLURM's variables.
srun --kill-on-bad-exit=1 python train.py "$@" --workdir "$SCRATCH/runs/$SLURM_JOB_NAME"
