"""Small checkpoints, and damage to files, for the tests of run folders."""

import shutil

import jax.numpy as jnp

from transformer_jax.checkpoint.checkpoint import Checkpoints
from transformer_jax.config import ModelConfig

MODEL = ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def save_steps(run, steps, **options):
    """Save a checkpoint for each step of {step: metrics}. Its one array holds the number of the step."""
    checkpoints = Checkpoints(run, **options)
    for step, metrics in steps.items():
        checkpoints.save(step, {"params": {"w": jnp.full(300, float(step))}}, metrics)
    checkpoints.close()


def flip(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    path.write_bytes(b"\xff" * path.stat().st_size)


def replace_by_folder(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.mkdir()


def replace_by_file(path):
    shutil.rmtree(path)
    path.write_text("")
