"""Steps whose loss or gradient is not finite: where it began, in which sentences, and whether to stop or to skip."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.files import to_json, write_atomically
from transformer_jax.training.accumulation import split
from transformer_jax.training.step import loss_sums
from transformer_jax.types import Batch, Params, UserError, first_line

MAX_IN_A_ROW = 10
"""So many skipped steps, one after the other, end a training that skips."""
MAX_REPORTS = 10
"""So many skipped steps of a process are looked into and written down; all are counted in `metrics.jsonl`."""

Sentences = Callable[[int], Sequence[Mapping[str, Any]]]
"""The sentence pairs of a global batch, by its number from 0: objects with their number, text and ids."""


class Divergence:
    """The policy `training.on_divergence`.

    Args:
        config: the run's configuration.
        run: gets `diverged-STEP.json`.
        rng: the run's dropout key.
        sentences: the sentence pairs of a batch.
        max_logits: as for `train_step`.
    """

    def __init__(self, config: Config, run: RunDir, rng: Array, sentences: Sentences, max_logits: int) -> None:
        self._config, self._run, self._rng, self._sentences = config, run, rng, sentences
        self._max_logits = max_logits
        self._last_step, self._in_a_row, self._reports = -1, 0, 0

    def handle(self, step: int, problem: str, batch: Batch, params: Params) -> int:
        """Writes down what there is to know of the step, and stops or lets go on.

        Args:
            step: whose loss or gradient is not finite.
            problem: what is not, and its value.
            batch: the step's batch, on the devices.
            params: the parameters of the step; in a run that skips they may be those after one more update.

        Returns:
            How many steps in a row are skipped by now.

        Raises:
            UserError: the policy is to stop, or too many steps in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        skips, ends = self._config.training.on_divergence == "skip", self._in_a_row >= MAX_IN_A_ROW
        written = ""
        if not skips or ends or self._reports < MAX_REPORTS:
            self._reports += 1
            written = self._write(step, problem, batch, params)
        if skips and not ends:
            return self._in_a_row
        count = f" and {self._in_a_row} steps in a row were skipped" if skips else ""
        raise UserError(
            f"training stopped: {problem}{count}; {written}. Checkpoints are from before it; a lower learning rate, "
            "more warmup_steps or training.clip_norm 1 may help"
            + ("" if skips else ", or training.on_divergence skip where it is rare")
        )

    def _write(self, step: int, problem: str, batch: Batch, params: Params) -> str:
        """Writes the report. Returns what it says first, and where it is."""
        try:
            found = find_bad(self._config, params, batch, self._rng, step, self._max_logits)
        except Exception as error:  # such as no memory: the step is named all the same
            found = {"first": f"unknown: looking for it failed: {first_line(error)}"}
        path = self._run.path / f"diverged-{step}.json"
        try:
            if jax.process_index() == 0:
                report = {"step": step, "problem": problem, **found, "sentences": list(self._sentences(step - 1))}
                write_atomically(path, to_json(report, indent=1) + "\n")
        except UserError as error:
            return f"first: {found['first']} ({error})"
        return f"first: {found['first']}; all of it and the batch's sentences are in {path}"


def find_bad(
    config: Config, params: Params, batch: Batch, dropout_rng: Array, step: int, max_logits: int | None = None
) -> dict[str, Any]:
    """What is not finite in a training step, found by computing it again.

    Args:
        config: model and training.
        params: of the step.
        batch: of the step.
        dropout_rng: the run's key.
        step: its number, from 1.
        max_logits: as for `train_step`.

    Returns:
        `parameters`, `outputs` and `gradients`: the paths of those that are not finite, the outputs of modules in the
        order of the forward pass and gradients in that of the backward pass; `first`: where it began, in words.
    """
    training = config.training
    # Modules are seen one by one only where no loop runs over them; their parameters are the same.
    model = Transformer(dataclasses.replace(config.model, scan_layers=False, remat="none"))
    options = {"smoothing": training.label_smoothing, "mass": training.label_smoothing_over, "max_logits": max_logits}
    rng = jax.random.fold_in(dropout_rng, step - 1)
    parts = [(batch, rng)]
    if training.accumulate > 1:
        split_parts = split(batch, training.accumulate), jax.random.split(rng, training.accumulate)
        parts = [jax.tree.map(lambda x, i=i: x[i], split_parts) for i in range(training.accumulate)]
    outputs: list[str] = []
    gradients: list[str] = []
    largest, loss_is_finite = ("", -1.0), True
    for part in parts:
        loss, output_is_finite, biggest = jax.device_get(_look(params, *part, model=model, **options))
        loss_is_finite &= bool(jnp.isfinite(loss))
        order = [name.partition(" ")[2] for name in output_is_finite]  # sorted by the number before the name
        outputs += [name.partition(" ")[2] for name, good in output_is_finite.items() if not good]
        for path, value in sorted(_paths(biggest), key=lambda item: -_place(item[0], order)):
            if not jnp.isfinite(value):
                gradients.append(path)
            elif value > largest[1]:
                largest = (path, float(value))
    parameters = [path for path, leaf in _paths(jax.device_get(_all_finite(params))) if not leaf]
    first = f"every value is finite but a sum is not; the largest gradient is {largest[1]:.3g}, of {largest[0]}"
    if parameters:
        first = f"the parameter {parameters[0]}"
    elif outputs:
        first = f"the output of {outputs[0]}"
    elif not loss_is_finite:
        first = "the loss; every module's output is finite"
    elif gradients:
        first = f"the gradient of {gradients[0]}"
    unique = {"outputs": list(dict.fromkeys(outputs)), "gradients": list(dict.fromkeys(gradients))}
    return {"first": first, "parameters": parameters, **unique}


@partial(jax.jit, static_argnames=("model", "smoothing", "mass", "max_logits"))
def _look(
    params: Params, batch: Batch, rng: Array, *, model: Transformer, **loss_options: Any
) -> tuple[Any, dict[str, Any], Params]:
    """The loss; whether each module's output is finite, in order of the calls; the largest entry of each gradient."""

    def loss_and_flags(params: Params) -> tuple[Array, tuple[Array, dict[str, Any]]]:
        calls: list[tuple[str, ...]] = []

        def is_wanted(module: Any, method: str) -> bool:  # asked at the end of each call
            if method == "__call__":
                calls.append(module.path)
            return method == "__call__"

        sums, seen = loss_sums(
            model,
            params,
            batch,
            **loss_options,
            deterministic=False,
            rngs={"dropout": rng},
            mutable=["intermediates"],
            capture_intermediates=is_wanted,
        )
        flags: dict[str, Any] = {}
        times: dict[tuple[str, ...], int] = {}
        for number, path in enumerate(calls):
            values: Any = seen["intermediates"]
            for name in path:
                values = values[name]
            output = values["__call__"][times.setdefault(path, 0)]
            times[path] += 1
            flags[f"{number:06d} {'/'.join(path)}"] = jnp.isfinite(output).all()
        return sums.loss_sum, (sums.loss_sum, flags)

    gradients, (loss, flags) = jax.grad(loss_and_flags, has_aux=True)(params)
    return loss, flags, jax.tree.map(lambda g: jnp.abs(g).max(), gradients)


@jax.jit
def _all_finite(params: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)


def _paths(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in leaves]


def _place(path: str, calls: Sequence[str]) -> int:
    """When the module of a parameter is first called; one that is not called, like an output projection, is last."""
    names = path.split("/")
    for length in range(len(names) - 1, 0, -1):
        if "/".join(names[:length]) in calls:
            return calls.index("/".join(names[:length]))
    return len(calls)
