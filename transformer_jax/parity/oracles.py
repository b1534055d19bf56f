"""Oracles: models of other implementations, independent of this package's model code."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_jax.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.interop.tables import Format, Legal, check_expressible, flatten, from_foreign, to_foreign
from transformer_jax.model.positional import sinusoids
from transformer_jax.parity.this_side import Arrays, Hypothesis, Trained
from transformer_jax.parity.torch_models import load_numpy
from transformer_jax.training.optimizer import make_schedule
from transformer_jax.types import Batch, Params

SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with."""

    name: str
    default: ModelConfig  # small model with its conventions
    table: Format
    build: Callable[[ModelConfig, Path | None], nn.Module]  # with the weights in a folder if there is one, else random
    stacks: str  # prefix of the modules `encoder` and `decoder`
    sublayers: Mapping[str, str]  # modules of each sub-layer and of its norm, in the order of `SUBLAYERS`
    logits: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = nn.Module.__call__
    narrower: tuple[str, Legal] = ("", {})  # software that supports less than the table, and its legal values
    prefix: str = ""  # of its parameter names, in front of the names in the table
    time_first: bool = False  # whether the outputs of sub-layers are `t b d_model`
    generates: bool = False  # whether `search` calls the module's own `generate`

    def check(self, config: ModelConfig) -> None:
        """Raise UserError unless the peer can compute a model."""
        self.table.check(config)
        check_expressible(config, *self.narrower)


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """Run torch in one thread, because its threads mostly wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Oracle:
    """A reference implementation to compare with, whose layers and parameters get this package's names."""

    peer: Peer
    config: ModelConfig
    weights: Params
    folder: Path | None = None  # from which the implementation itself reads the weights, in place of `weights`
    dtype: str = "float32"

    def astype(self, dtype: str) -> "Oracle":
        """Return the model in float32 or float64."""
        return self if dtype == self.dtype else dataclasses.replace(self, dtype=dtype)

    @cached_property
    def module(self) -> nn.Module:
        """The module that everything but `train` calls."""
        return self.build()

    def build(self) -> nn.Module:
        """Return a new module with the weights."""
        with torch.random.fork_rng():  # the random weights are replaced
            # Gradients stay enabled, because torch's fused inference layers would bypass the hooks.
            module = self.peer.build(self.config, self.folder).to(getattr(torch, self.dtype)).eval()
        if self.folder is None:
            buffers = dict(module.named_buffers())
            own = {n: t.numpy() for n, t in module.state_dict().items() if n in buffers or _is_constant(n)}
            load_numpy(module, own | self._foreign(self.weights))
        # Tensors that the format always has and the model lacks are zero, and must stay zero in training.
        ones = self._foreign(jax.tree.map(lambda leaf: np.ones(np.shape(leaf), np.float32), self.weights))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if _is_constant(name) or (name in ones and not ones[name].any()):
                parameter.requires_grad_(False)
        if self.dtype == "float64":
            _widen_positions(module)
        return module

    def params(self) -> Arrays:
        """Return the weights under this package's names."""
        return self._arrays(self.module, lambda parameter: parameter)

    @few_threads()
    def sublayers(self, src: np.ndarray, tgt_in: np.ndarray) -> Arrays:
        """Return the output of every sub-layer in the order of the forward pass, `logits` last."""
        seen = Arrays()

        def record(name: str, value: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            value = value[0] if isinstance(value, tuple) else value
            seen[name] = (value.transpose(0, 1) if self.peer.time_first else value).detach().numpy()

        with contextlib.ExitStack() as hooks:
            for name, place in self._places().items():
                module = self.module.get_submodule(place)
                if name.endswith("embedding"):
                    hook = module.register_forward_pre_hook(lambda _, args, name=name: record(name, args))
                else:
                    hook = module.register_forward_hook(lambda _, args, output, name=name: record(name, output))
                hooks.enter_context(hook)
            seen["logits"] = self.peer.logits(self.module, _ids(src), _ids(tgt_in)).detach().numpy()
        return seen

    @few_threads()
    def train(self, batches: Sequence[Batch], training: TrainingConfig) -> Trained:
        """Run one update of torch's Adam per batch."""
        module = self.build()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        betas = (training.adam_beta1, training.adam_beta2)
        optimizer = torch.optim.Adam(trained, betas=betas, eps=training.adam_epsilon)
        rates = np.asarray(jax.jit(make_schedule(training, self.config.d_model))(jnp.arange(len(batches)))).tolist()
        losses, gradients = [], Arrays()
        for batch, rate in zip(batches, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            logits = self.peer.logits(module, _ids(batch.src), _ids(batch.tgt_in))
            loss = smoothed_loss(logits, _ids(batch.tgt_out), training, self.config.pad_id)
            loss.backward()
            gradients = gradients or self._arrays(
                module, lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            optimizer.step()
            losses.append(loss.item())
        return Trained(losses, gradients, self._arrays(module, lambda parameter: parameter))

    def decoding(self, decoding: DecodingConfig) -> DecodingConfig:
        """Return the settings supported by `search` that are closest to the given ones."""
        if self.peer.generates:
            return dataclasses.replace(decoding, length_penalty="power", stopping="huggingface")
        return dataclasses.replace(decoding, stopping="paper")

    @few_threads()
    def search(self, src: np.ndarray, limits: Sequence[int], decoding: DecodingConfig) -> list[Hypothesis]:
        """Return the best hypothesis of each row, by greedy search if beam_size is 1."""
        found = []
        for row, limit in zip(src, limits, strict=True):
            row = row[row != self.config.pad_id]  # one sentence at a time: a search must not depend on the others
            if self.peer.generates:
                found.append(generate(self.module, row, limit, decoding, self.config))
            else:
                found.append(brute_beam(partial(self._next, row), limit, decoding, self.config))
        return found

    def _next(self, src: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """Return log-probabilities `n v` of the token after each prefix."""
        tokens = np.concatenate([np.full((len(prefixes), 1), self.config.start_id), prefixes], axis=1)
        logits = self.peer.logits(self.module, _ids(np.repeat(src[None], len(prefixes), axis=0)), _ids(tokens))
        return logits[:, -1].log_softmax(-1).detach().numpy()

    def _places(self) -> dict[str, str]:
        """Return the module path of each name. `embedding` maps to the first layer, whose input is recorded."""
        places = {}
        for stack, size in (("encoder", self.config.encoder), ("decoder", self.config.decoder)):
            layers = f"{self.peer.stacks}{stack}.layers"
            places[f"{stack}/embedding"] = f"{layers}.0"
            names = [name for sublayer in SUBLAYERS[stack] for name in (sublayer, f"{sublayer}_norm")]
            for layer in range(size.num_layers):
                for name, module in zip(names, self.peer.sublayers[stack].split(), strict=True):
                    places[f"{stack}/layer_{layer}/{name}"] = f"{layers}.{layer}.{module}"
            if self.config.final_norm:
                places[f"{stack}/final_norm"] = f"{self.peer.stacks}{stack}.norm"
        return places

    def _foreign(self, params: Params) -> Arrays:
        tensors = to_foreign(params, self.peer.table, self.config)
        return {self.peer.prefix + name: tensor for name, tensor in tensors.items()}

    def _arrays(self, module: nn.Module, value: Callable[[nn.Parameter], torch.Tensor]) -> Arrays:
        """Return a value of each parameter under this package's names."""
        tensors = {
            name.removeprefix(self.peer.prefix): value(parameter).detach().numpy()
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not _is_constant(name)
        }
        changes = {"dtype": self.dtype, "param_dtype": self.dtype}
        config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]  # a str that is a Dtype
        with jax.enable_x64(self.dtype == "float64"):  # the table takes shapes from the model
            return flatten(from_foreign(tensors, self.peer.table, config, f"{self.peer.name}'s module"))


def _is_constant(name: str) -> bool:
    """Return whether a parameter of transformers is a table of sinusoids."""
    return name.endswith("embed_positions.weight")


def _widen_positions(module: nn.Module) -> None:
    """Replace position tables that transformers computes in float32 by tables in float64."""
    for name, place in module.named_modules():
        if not _is_constant(f"{name}.weight"):
            continue
        is_fairseq = hasattr(place, "make_positions")
        rows, d_model = place.weight.shape
        new = torch.from_numpy(sinusoids(rows, d_model, "halves", "tensor2tensor" if is_fairseq else "paper"))
        if is_fairseq:
            new[place.padding_idx] = 0
        if (new - place.weight.detach()).abs().max() > 1e-3:
            raise RuntimeError(f"{name} of transformers is not the table that it is known to have")
        place.weight.data = new


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
) -> Hypothesis:
    """Return the best hypothesis of a beam search that never stops early and recomputes every prefix.

    `next_log_probs` returns log-probabilities `n v` of the token after each of n prefixes. The limit counts EOS.
    """
    live: list[Hypothesis] = [([], 0.0)]
    finished: list[Hypothesis] = []
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


def generate(
    module: nn.Module, src: np.ndarray, limit: int, decoding: DecodingConfig, config: ModelConfig
) -> Hypothesis:
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
    return {"none": 1.0, "gnmt": (5 + length) / 6, "power": length}[decoding.length_penalty] ** decoding.alpha


def _ids(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens, np.int64))
