#!/usr/bin/env bash
# A TPU pod slice on Google Cloud (here v5e-64: 16 hosts of 4 chips), one process a host:
#   bash docs/launch/tpu_pod.sh NAME ZONE SERVER:/EXPORT configs/multi30k_en_de.py
# The same command again goes on with the run.
set -euo pipefail
name="$1" zone="$2" export="$3"
shift 3

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

gcloud compute tpus tpu-vm describe "$name" --zone "$zone" >/dev/null 2>&1 ||
  gcloud compute tpus tpu-vm create "$name" --zone "$zone" --accelerator-type v5litepod-64 --version v2-alpha-tpuv5-lite

# The run's folder must be one that all hosts see, such as Filestore or another NFS server. The code lies there too.
on_all_hosts "mkdir -p ~/shared && (mountpoint -q ~/shared || sudo mount -t nfs $export ~/shared)"
on_all_hosts "cd ~/shared/transformer_jax && pip install -q '.[tpu]'"

# The same command on every host, started at the same time: JAX asks the machine for the others.
on_all_hosts "cd ~/shared/transformer_jax && python train.py $* --workdir ~/shared/runs/$name"
