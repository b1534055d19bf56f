#!/usr/bin/env bash
# Train on a TPU pod slice on Google Cloud, here v5e-64 (16 hosts of 4 chips) with one process per host:
#   bash docs/launch/tpu_pod.sh NAME ZONE SERVER:/EXPORT configs/multi30k_en_de.py
# Run the same command again to resume the run. SERVER:/EXPORT is an NFS export that contains this repository.
set -euo pipefail
name="$1" zone="$2" export="$3"
shift 3

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

gcloud compute tpus tpu-vm describe "$name" --zone "$zone" >/dev/null 2>&1 ||
  gcloud compute tpus tpu-vm create "$name" --zone "$zone" --accelerator-type v5litepod-64 --version v2-alpha-tpuv5-lite

# All hosts need the run folder and the code on a shared file system, such as Filestore or another NFS server.
on_all_hosts "mkdir -p ~/shared && (mountpoint -q ~/shared || sudo mount -t nfs $export ~/shared)"
on_all_hosts "cd ~/shared/transformer_jax && pip install -q '.[tpu]'"

# Start the same command on every host at the same time. JAX gets the addresses of the other hosts from the TPU metadata.
on_all_hosts "cd ~/shared/transformer_jax && python train.py $* --workdir ~/shared/runs/$name"
