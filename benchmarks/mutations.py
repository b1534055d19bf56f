"""Measure what the tests notice: break one line at a time in a copy of the project, and run the tests.

    python -m benchmarks.mutations                 # all breakages
    python -m benchmarks.mutations --only 3 17     # two breakages
    python -m benchmarks.mutations --check         # only report table entries that no longer match the code

For each breakage the fast tier's tests of its area run first and, if they pass, the slow tests of its area. A breakage
is killed if a test fails. The status is 1 if one survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("transformer_jax", "tests", "benchmarks", "configs", "docs", "pyproject.toml", "README.md", "train.py")


class Mutation(NamedTuple):
    """A breakage: a text that occurs once in a file of the package, and what replaces it."""

    file: str
    old: str
    new: str


# Tests to run for a folder of the package, besides the folder of the same name.
TESTS = {
    "model": ["tests/model", "tests/decoding/test_translator.py"],
    "training": ["tests/training"],
    "data": ["tests/data", "tests/fuzz"],
    "decoding": ["tests/decoding"],
    "checkpoint": ["tests/checkpoint", "tests/test_run.py"],
    "interop": ["tests/interop"],
}

MUTATIONS = [
    Mutation(*entry)
    for entry in (
        ("model/attention.py", "/ math.sqrt(query.shape[-1])", "/ query.shape[-1]"),
        ("model/attention.py", "jnp.where(mask, scores, jnp.finfo(scores.dtype).min)", "scores"),
        ("model/attention.py", "dtype = jnp.promote_types(query.dtype, jnp.float32)", "dtype = query.dtype"),
        ("model/attention.py", "self.query(x), self.key(memory)", "self.query(memory), self.key(x)"),
        ("model/masks.py", "return jnp.tril(jnp.ones(", "return jnp.triu(jnp.ones("),
        ("model/masks.py", "return (tokens != pad_id)[", "return (tokens == pad_id)["),
        ("model/masks.py", "(padding_mask(tgt_in, pad_id) | is_start)", "padding_mask(tgt_in, pad_id)"),
        ("model/masks.py", " & (keys != 0)[:, None, :]", ""),
        ("model/positional.py", "powers = 2 * i / d_model", "powers = i / d_model"),
        ("model/positional.py", "[np.sin(angles), np.cos(angles)]", "[np.cos(angles), np.sin(angles)]"),
        ("model/positional.py", "np.arange(offset, offset + length)", "np.arange(length)"),
        ("model/positional.py", "return self.table[self.offset : self.offset + length]", "return self.table[:length]"),
        ("model/positional.py", "return jnp.where(segments == 0, 0, index - start)", "return index"),
        ("model/normalization.py", "jax.lax.rsqrt(variance + jnp.asarray(epsilon, dtype))", "jax.lax.rsqrt(variance)"),
        ("model/normalization.py", "(x.shape[-1] - 1)", "x.shape[-1]"),
        ("model/normalization.py", " - jnp.mean(x, axis=-1, keepdims=True, dtype=dtype)", ""),
        ("model/feed_forward.py", "approximate=False", "approximate=True"),
        ("model/feed_forward.py", "activate(self.inner(x), self.activation)", "self.inner(x)"),
        ("model/feed_forward.py", "self.dropout(hidden, deterministic=deterministic)", "hidden"),
        ("model/embedding.py", "vectors * math.sqrt(table.shape[1]) if", "vectors * table.shape[1] if"),
        ("model/embedding.py", "return logits + unembedding.bias", "return logits - unembedding.bias"),
        ("training/loss.py", "return 1 - self.label_smoothing - (0", "return 1 - (0"),
        ("training/loss.py", '"non_target": vocab_size - 1', '"non_target": vocab_size'),
        ("training/loss.py", "counts = weights.astype(logits.dtype)", "counts = jnp.ones_like(nll)"),
        ("training/loss.py", "on_target * nll + uniform *", "on_target * nll - uniform *"),
        (
            "training/loss.py",
            "jnp.where(weights[:, None], jax.nn.softmax(logits) - q, 0)",
            "jax.nn.softmax(logits) - q",
        ),
        ("training/loss.py", "(grad * cotangents[0])", "grad"),
        ("training/optimizer.py", "scale * d_model**-0.5", "scale * d_model**0.5"),
        ("training/optimizer.py", "step * warmup_steps**-1.5", "step * warmup_steps**-0.5"),
        ("training/optimizer.py", "(1 + done) / (10 + done)", "done / (10 + done)"),
        ("training/step.py", "jax.random.fold_in(dropout_rng, state.step)", "dropout_rng"),
        ("training/step.py", "jnp.maximum(sums.num_tokens, 1)", "jnp.asarray(batch.tgt_out.size)"),
        ("training/step.py", "TrainState(state.step + 1, params", "TrainState(state.step, params"),
        ("training/step.py", " & jnp.isfinite(grad_norm)", ""),
        ("training/step.py", "LossSpec(0.0,", "LossSpec(0.1,"),
        ("data/batching.py", "if model.source_eos:", "if not model.source_eos:"),
        ("data/batching.py", "np.random.default_rng([self.seed, epoch])", "np.random.default_rng(self.seed)"),
        ("data/batching.py", "rng.permutation(self._num_units)", "np.arange(self._num_units)"),
        ("data/batching.py", "1 - num_tokens / int", "num_tokens / int"),
        ("data/batching.py", "bucket = np.maximum(src, tgt)\n", "bucket = np.minimum(src, tgt)\n"),
        ("data/packing.py", "(free - needed[:, :, None]).min(axis=0)", "(free - needed[:, :, None]).max(axis=0)"),
        ("data/packing.py", "pairs[self._slots] = by_group", "pairs[:] = by_group"),
        ("decoding/search.py", "return ((5 + length) / 6) ** alpha", "return ((6 + length) / 6) ** alpha"),
        (
            "decoding/search.py",
            "jnp.minimum(self.max_lengths, self.max_length)",
            "jnp.minimum(self.max_lengths, self.max_length - 1)",
        ),
        ("decoding/search.py", "(step < self.min_length)", "(step <= self.min_length)"),
        ("decoding/search.py", "carry.done | (log_prob == -jnp.inf)", "carry.done"),
        ("decoding/search.py", "~jnp.all(carry.done)", "~jnp.any(carry.done)"),
        ("decoding/beam_search.py", "spec.score(log_probs, spec.limits))", "spec.score(log_probs, length + 1))"),
        ("decoding/beam_search.py", "ends = step.tokens == spec.eos_id", "ends = step.tokens != spec.eos_id"),
        ("decoding/beam_search.py", "beam.num_finished >= spec.beam_size", "beam.num_finished >= 1"),
        ("decoding/beam_search.py", "n = min(2 * k, v)", "n = min(k, v)"),
        ("checkpoint/averaging.py", "return steps[-last:]", "return steps[:last]"),
        ("checkpoint/averaging.py", "(leaf / count).astype(dtype)", "leaf.astype(dtype)"),
        ("checkpoint/averaging.py", "<= 60 * minutes", "<= minutes"),
        ("checkpoint/manifest.py", "if Checksum.of_file(path) not in accepted:", "if False:"),
        ("checkpoint/manifest.py", "if size not in {checksum.bytes for checksum in accepted}:", "if False:"),
        ("interop/tables.py", "if new in old_names:", "if False:"),
        ("interop/tables.py", "and not np.any(tensors[name])", ""),
        ("interop/tables.py", "if path not in leaves and path not in missing", "if False"),
        ("interop/tables.py", "if name not in used and not", "if not"),
    )
]


def stale() -> dict[Mutation, str]:
    """Return a line for each entry whose old text does not occur exactly once. These entries are not tried."""
    lines = {}
    for mutation in MUTATIONS:
        file = ROOT / "transformer_jax" / mutation.file
        count = file.read_text().count(mutation.old) if file.exists() else 0
        if count != 1:
            lines[mutation] = f"{mutation.file}: {mutation.old!r} occurs {count} times"
    return lines


def killing_tier(mutation: Mutation) -> str | None:
    """Break a copy of the project, run tests in it, and return the first tier in which one fails."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        broken = Path(folder) / "transformer_jax" / mutation.file
        broken.write_text(broken.read_text().replace(mutation.old, mutation.new))
        environment = {**os.environ, "PYTHONPATH": folder}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "mutations"))
        for tier in ("fast", "slow"):
            tests = TESTS[mutation.file.partition("/")[0]]
            # One process, because pytest-xdist with -x reports a failed test as an interrupted run.
            command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", tier, *tests]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
            if done.returncode == pytest.ExitCode.TESTS_FAILED:
                return tier
            if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                sys.exit(f"pytest ended with status {done.returncode}: {' '.join(command)}")
    return None


def main() -> int:
    """Print the tier that kills each breakage, and the counts at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="numbers of the breakages, from 1")
    parser.add_argument("--check", action="store_true", help="only check that each entry matches the code")
    options = parser.parse_args()
    problems = stale()
    print(*problems.values(), sep="\n", end="\n" if problems else "")
    if options.check:
        return bool(problems)
    chosen = options.only or range(1, len(MUTATIONS) + 1)
    numbers = [number for number in chosen if MUTATIONS[number - 1] not in problems]
    tiers: Counter[str | None] = Counter()
    for number in numbers:
        mutation = MUTATIONS[number - 1]
        tier = killing_tier(mutation)
        tiers[tier] += 1
        print(f"{number:3} {tier or 'SURVIVED':8} {mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
    print(f"{len(numbers)} tried: {tiers['fast']} killed by fast tests, {tiers['slow']} by slow tests alone")
    return bool(tiers[None])


if __name__ == "__main__":
    sys.exit(main())
