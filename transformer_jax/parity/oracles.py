"""Oracles: models of other implementations, independent of this package's model code."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch
from torch import nn

from transformer_jax.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.interop.tables import flatten
from transformer_jax.types import Batch, Params

Arrays = dict[str, np.ndarray]
# A hypothesis: its tokens with EOS and without the start token, and the score that ranks it.
Line = tuple[list[int], float]


class Oracle(Protocol):
    """The other side of a comparison, with this package's names of layers and parameters."""

    @property
    def name(self) -> str:
        """Name of the implementation."""

    @property
    def config(self) -> ModelConfig:
        """Conventions that it follows."""

    def astype(self, dtype: str) -> "Oracle":
        """Return the model in float32 or float64."""

    def params(self) -> Params:
        """Return its weights as this package's parameters."""

    def sublayers(self, src: np.ndarray, tgt_in: np.ndarray) -> Arrays:
        """Return the output of every sub-layer in the order of the forward pass, `logits` last."""

    def loss_and_gradients(self, batch: Batch, training: TrainingConfig) -> tuple[float, Arrays]:
        """Return the mean loss over the target tokens and its gradient for every parameter."""

    def trajectory(
        self, batches: Sequence[Batch], rates: Sequence[float], training: TrainingConfig
    ) -> tuple[list[float], Arrays]:
        """Train with Adam and one learning rate per batch. Return the losses and the final parameters."""

    def decoding(self, decoding: DecodingConfig) -> DecodingConfig:
        """Return the settings of the nearest search that it offers."""

    def search(self, src: np.ndarray, limits: Sequence[int], decoding: DecodingConfig) -> list[Line]:
        """Return the best hypothesis of each row, by greedy search if beam_size is 1."""


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """Run torch in one thread, because its threads mostly wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Hook(NamedTuple):
    """A module whose output is recorded, or with `is_input` its input."""

    module: str
    is_input: bool = False


@dataclass(frozen=True)
class TorchOracle:
    """An oracle that is a torch module.

    Args:
        name: Name of the implementation.
        config: Conventions that it follows.
        build: Makes the module with its weights in a dtype.
        hooks: Module of each sub-layer. `{i}` is the index of a layer.
        to_params: Converts named tensors (weights, gradients) to this package's parameters.
        logits: Calls the module.
        skipped: Name endings of parameters that are constants.
        time_first: Whether outputs of sub-layers are `t b d_model`.
        generates: Whether the module's own `generate` searches.
        dtype: Dtype of the module.
    """

    name: str
    config: ModelConfig
    build: Callable[[str], nn.Module]
    hooks: Mapping[str, Hook]
    to_params: Callable[[Arrays, ModelConfig], Params]
    logits: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    skipped: tuple[str, ...] = ()
    time_first: bool = False
    generates: bool = False
    dtype: str = "float32"
    _built: dict[str, nn.Module] = field(default_factory=dict, repr=False, compare=False)

    def astype(self, dtype: str) -> "TorchOracle":
        """Return the model in float32 or float64."""
        return self if dtype == self.dtype else dataclasses.replace(self, dtype=dtype)

    def params(self) -> Params:
        """Return its weights as this package's parameters."""
        return self._to_params({name: parameter.detach() for name, parameter in self._named(self._module())})

    @few_threads()
    def sublayers(self, src: np.ndarray, tgt_in: np.ndarray) -> Arrays:
        """Return the output of every sub-layer in the order of the forward pass, `logits` last."""
        module, seen, handles = self._module(), {}, []

        def see(name: str, value: Any) -> None:
            value = value[0] if isinstance(value, tuple) else value
            seen[name] = (value.transpose(0, 1) if self.time_first else value).detach().numpy()

        for name, hook in self._places():
            place = module.get_submodule(hook.module)
            if hook.is_input:
                handles.append(place.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0])))
            else:
                handles.append(place.register_forward_hook(lambda _, args, output, name=name: see(name, output)))
        try:
            logits = self.logits(module, _ids(src), _ids(tgt_in))
        finally:
            for handle in handles:
                handle.remove()
        return {**seen, "logits": logits.detach().numpy()}

    @few_threads()
    def loss_and_gradients(self, batch: Batch, training: TrainingConfig) -> tuple[float, Arrays]:
        """Return the mean loss over the target tokens and its gradient for every parameter."""
        module = self._module()
        module.zero_grad()
        loss = self._loss(module, batch, training)
        loss.backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._named(module)
        }
        return loss.item(), flatten(self._to_params(gradients))

    @few_threads()
    def trajectory(
        self, batches: Sequence[Batch], rates: Sequence[float], training: TrainingConfig
    ) -> tuple[list[float], Arrays]:
        """Train with Adam and one learning rate per batch. Return the losses and the final parameters."""
        module, losses = self._fresh(), []
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        betas = (training.adam_beta1, training.adam_beta2)
        optimizer = torch.optim.Adam(trained, betas=betas, eps=training.adam_epsilon)
        for batch, rate in zip(batches, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = self._loss(module, batch, training)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, flatten(self._to_params({name: parameter.detach() for name, parameter in self._named(module)}))

    def decoding(self, decoding: DecodingConfig) -> DecodingConfig:
        """Return the settings of the nearest search that it offers."""
        if self.generates:
            return dataclasses.replace(decoding, length_penalty="power", stopping="huggingface")
        return dataclasses.replace(decoding, stopping="paper")

    @few_threads()
    def search(self, src: np.ndarray, limits: Sequence[int], decoding: DecodingConfig) -> list[Line]:
        """Return the best hypothesis of each row, by greedy search if beam_size is 1."""
        lines = []
        for row, limit in zip(src, limits, strict=True):
            row = row[row != self.config.pad_id]  # one sentence at a time: a search must not depend on the others
            if self.generates:
                lines.append(generate(self._module(), row, limit, decoding, self.config))
            else:
                lines.append(brute_beam(partial(self._next, row), limit, decoding, self.config))
        return lines

    def _next(self, src: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """Return log-probabilities `n v` of the token after each prefix."""
        tokens = np.concatenate([np.full((len(prefixes), 1), self.config.start_id), prefixes], axis=1)
        logits = self.logits(self._module(), _ids(np.repeat(src[None], len(prefixes), axis=0)), _ids(tokens))
        return logits[:, -1].log_softmax(-1).detach().numpy()

    def _module(self) -> nn.Module:
        if self.dtype not in self._built:
            self._built[self.dtype] = self._fresh()
        return self._built[self.dtype]

    def _fresh(self) -> nn.Module:
        with torch.random.fork_rng():  # the random weights are replaced
            # Gradients stay enabled, because torch's fused inference layers would bypass the hooks.
            return self.build(self.dtype).eval()

    def _places(self) -> list[tuple[str, Hook]]:
        places = []
        for name, hook in self.hooks.items():
            if name.endswith("final_norm") and not self.config.final_norm:
                continue
            stack = self.config.encoder if name.startswith("encoder") else self.config.decoder
            for layer in range(stack.num_layers) if "{i}" in name else (0,):
                filled = [text.replace("{i}", str(layer)) for text in (name, hook.module)]
                places.append((filled[0], Hook(filled[1], hook.is_input)))
        return places

    def _named(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters, a shared one under each of its names."""
        named = module.named_parameters(remove_duplicate=False)
        return [(name, parameter) for name, parameter in named if not name.endswith(self.skipped or ("\0",))]

    def _to_params(self, tensors: Mapping[str, torch.Tensor]) -> Params:
        changes = {"dtype": self.dtype, "param_dtype": self.dtype}
        config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]  # a str that is a Dtype
        with jax.enable_x64(self.dtype == "float64"):  # the table takes shapes from the model
            return self.to_params({name: tensor.numpy() for name, tensor in tensors.items()}, config)

    def _loss(self, module: nn.Module, batch: Batch, training: TrainingConfig) -> torch.Tensor:
        logits = self.logits(module, _ids(batch.src), _ids(batch.tgt_in))
        return smoothed_loss(logits, _ids(batch.tgt_out), training, self.config.pad_id)


def smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, training: TrainingConfig, pad_id: int) -> torch.Tensor:
    """Return the mean of -sum_v q(v) log p(v) over the targets that are not padding, with q written out."""
    size, smoothing, mass = logits.shape[-1], training.label_smoothing, training.label_smoothing_over
    q = torch.full_like(logits, smoothing / {"non_target": size - 1, "all": size, "non_target_non_pad": size - 2}[mass])
    if mass == "non_target_non_pad":
        q[..., pad_id] = 0
    right = 1 - smoothing + (smoothing / size if mass == "all" else 0)
    q.scatter_(-1, targets[..., None], right)
    loss = -(q * logits.log_softmax(-1)).sum(-1)
    counts = targets != pad_id
    return (loss * counts).sum() / counts.sum()


def brute_beam(
    next_log_probs: Callable[[np.ndarray], np.ndarray], limit: int, decoding: DecodingConfig, config: ModelConfig
) -> Line:
    """Return the best hypothesis of a beam search that never stops early and recomputes every prefix.

    Args:
        next_log_probs: Returns log-probabilities `n v` of the token after each of n prefixes of one length.
        limit: Maximum number of tokens, with EOS.
        decoding: beam_size (1 for greedy search), length_penalty, alpha, min_length and forbidden_ids.
        config: eos_id, and pad_id, which is never generated.
    """
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, limit + 1):
        prefixes = np.array([tokens for tokens, _ in live], np.int64).reshape(len(live), length - 1)
        log_probs = next_log_probs(prefixes) + np.array([log_prob for _, log_prob in live])[:, None]
        log_probs[:, [config.pad_id, *decoding.forbidden_ids]] = -np.inf
        if length <= decoding.min_length:
            log_probs[:, config.eos_id] = -np.inf
        candidates = [
            ([*live[flat // log_probs.shape[1]][0], int(flat % log_probs.shape[1])], float(log_probs.flat[flat]))
            for flat in np.argsort(-log_probs, axis=None, kind="stable")[: 2 * decoding.beam_size]
        ]
        if decoding.beam_size == 1:  # greedy search ends where the best token is EOS
            if candidates[0][0][-1] == config.eos_id:
                return candidates[0]
            live = candidates[:1]
            continue
        penalty = _penalty(length, decoding)
        finished += [(tokens, value / penalty) for tokens, value in candidates if tokens[-1] == config.eos_id]
        live = [candidate for candidate in candidates if candidate[0][-1] != config.eos_id][: decoding.beam_size]
    if finished:
        return max(finished, key=lambda line: line[1])
    return live[0][0], live[0][1] / _penalty(limit, decoding)


def generate(module: Any, src: np.ndarray, limit: int, decoding: DecodingConfig, config: ModelConfig) -> Line:
    """Return the best hypothesis of the method `generate` of transformers."""
    found = module.generate(
        input_ids=_ids(src[None]),
        attention_mask=torch.ones(1, len(src), dtype=torch.long),
        num_beams=decoding.beam_size,
        do_sample=False,
        early_stopping=False,
        max_length=limit + 1,  # the start token counts
        min_length=decoding.min_length + 1,  # the start token counts
        bad_words_ids=[[token] for token in (config.pad_id, *decoding.forbidden_ids)],
        decoder_start_token_id=config.start_id,
        eos_token_id=config.eos_id,
        pad_token_id=config.pad_id,
        bos_token_id=config.bos_id,
        return_dict_in_generate=True,
        output_scores=True,
        **({"length_penalty": decoding.alpha} if decoding.beam_size > 1 else {}),
    )
    tokens = found.sequences[0, 1:].tolist()
    if config.eos_id in tokens:
        tokens = tokens[: tokens.index(config.eos_id) + 1]
    return tokens, float(found.sequences_scores[0]) if decoding.beam_size > 1 else math.nan


def _penalty(length: int, decoding: DecodingConfig) -> float:
    if decoding.length_penalty == "none":
        return 1.0
    return ((5 + length) / 6 if decoding.length_penalty == "gnmt" else length) ** decoding.alpha


def _ids(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens, np.int64))
