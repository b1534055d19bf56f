"""Search over a callback: the specification, the loop that every search shares, greedy search and sampling."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.config import Sampling
from transformer_jax.decoding.top_k import Constraints, mask_logits, top_k_tokens

LengthPenalty = Literal["gnmt", "power", "none"]
Stopping = Literal["paper", "huggingface", "ctranslate2"]

State = Any  # a pytree of arrays, for example the key-value cache of a model
StepFn = Callable[[Int[Array, " rows"], State], tuple[Float[Array, "rows v"], State]]
"""Maps the last token of each row and the state to the logits of the next token and the next state."""
ResizeFn = Callable[[State, int], State]
"""Maps a state and a number of positions to the state with capacity for that number of positions."""


def length_penalty(kind: LengthPenalty, length: ArrayLike, alpha: float) -> Float[Array, "..."]:
    """Return the number that log P(y | x) is divided by to rank hypotheses of different lengths.

        gnmt    ((5 + length) / 6)^alpha    Wu et al. 2016, equation 14, without its coverage term; paper section 6.1
        power   length^alpha                fairseq, Hugging Face, CTranslate2
        none    1

    A length counts tokens, including EOS and excluding the start token. The result is in JAX's default float type.

    >>> [round(float(length_penalty("gnmt", n, 0.6)), 4) for n in (1, 7)]
    [1.0, 1.5157]
    """
    length = jnp.asarray(length, float)
    match kind:
        case "gnmt":
            return ((5 + length) / 6) ** alpha
        case "power":
            return length**alpha
        case "none":
            return jnp.ones_like(length)
    raise ValueError(f"length_penalty={kind!r} is unknown. Use 'gnmt', 'power' or 'none'.")


@dataclasses.dataclass(frozen=True, eq=False)
class SearchSpec:
    """What a search may generate, how it ranks hypotheses and when it stops.

    A pytree: `max_lengths` and `prefix` are arrays, every other field is a compile-time constant.

    Raises:
        ValueError: A field has an illegal value.
    """

    max_lengths: Int[Array | np.ndarray, " b"]
    """Maximum number of tokens of each sentence, including EOS. 0 generates nothing."""
    max_length: int
    """Upper bound of `max_lengths`: the width of the result."""
    start_id: int
    """Token that the decoder reads first."""
    eos_id: int
    """Token that ends a hypothesis."""
    pad_id: int
    """Token that follows a hypothesis. It is never generated."""
    beam_size: int = 4
    """k: number of live hypotheses of a beam search. Greedy search and sampling ignore it."""
    n_best: int = 1
    """Number of hypotheses that a beam search returns for each sentence, at most `beam_size`."""
    alpha: float = 0.6
    """Exponent of the length penalty."""
    length_penalty: LengthPenalty = "gnmt"
    """Length penalty by which log-probabilities are divided to give scores; see `length_penalty`."""
    stopping: Stopping = "paper"
    """Stopping rule of a beam search; see `beam_search`."""
    min_length: int = 0
    """Number of tokens before EOS may be generated. 0 allows EOS as the first token."""
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that are never generated, in addition to `pad_id`."""
    renormalize_logits: bool = False
    """Exclude forbidden tokens from the softmax, instead of masking them after it."""
    prefix: Int[Array | np.ndarray, "b p"] | None = None
    """Tokens that each sentence begins with, whatever their probability. Negative after the last token of a prefix."""
    cache_sizes: tuple[int, ...] = ()
    """Capacities below `max_length`, ascending, to which the state is resized. The initial state has the first one."""

    def __post_init__(self) -> None:
        if not 1 <= self.n_best <= self.beam_size:
            raise ValueError(
                f"n_best={self.n_best} is out of range for beam_size={self.beam_size}. "
                "Set n_best to a value from 1 to beam_size."
            )
        if self.stopping not in get_args(Stopping):
            raise ValueError(f"stopping={self.stopping!r} is unknown. Use one of {', '.join(get_args(Stopping))}.")

    @property
    def limits(self) -> Int[Array, " b"]:
        """Maximum number of tokens of each sentence, at most `max_length`."""
        return jnp.minimum(self.max_lengths, self.max_length).astype(jnp.int32)

    def score(self, log_probs: Float[Array, "..."], lengths: Int[Array, "..."]) -> Float[Array, "..."]:
        """Return log-probability / length penalty, in the dtype of the log-probabilities."""
        return log_probs / length_penalty(self.length_penalty, lengths, self.alpha).astype(log_probs.dtype)

    def constraints(self, step: Int[Array, ""], v: int, k: int = 1) -> Constraints:
        """Return which of v tokens each of k hypotheses of each sentence may generate at this step."""
        ids = np.arange(v)
        forbidden = jnp.asarray(np.isin(ids, self.forbidden_ids))
        if self.min_length:
            forbidden |= (ids == self.eos_id) & (step < self.min_length)
        forced = None
        if self.prefix is not None:
            tokens = jnp.take(self.prefix, step, axis=1, mode="fill", fill_value=-1)
            forced = jnp.repeat(tokens, k, total_repeat_length=len(self.prefix) * k)
        return Constraints(forbidden, self.pad_id, self.renormalize_logits, forced)


_DATA_FIELDS = ["max_lengths", "prefix"]
_META_FIELDS = [item.name for item in dataclasses.fields(SearchSpec) if item.name not in _DATA_FIELDS]
jax.tree_util.register_dataclass(SearchSpec, _DATA_FIELDS, _META_FIELDS)


class SearchResult(NamedTuple):
    """n hypotheses of each sentence, best first."""

    tokens: Int[Array, "b n l"]
    """Token ids without the start token; EOS if the hypothesis ends with it, then padding."""
    scores: Float[Array, "b n"]
    """Log-probability / length penalty, by which hypotheses are ranked. -inf: there is no such hypothesis."""
    lengths: Int[Array, "b n"]
    """Number of tokens that are not padding, including EOS."""
    log_probs: Float[Array, "b n"]
    """log P(y | x), the sum over the tokens."""


def take_hypotheses(hypotheses: SearchResult, index: Int[Array, "#b n"]) -> SearchResult:
    """Return the hypotheses at these indices of each sentence."""

    def take_leaf(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, index.reshape(index.shape + (1,) * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(take_leaf, hypotheses)


def best_hypotheses(hypotheses: SearchResult, n: int) -> SearchResult:
    """Return the n hypotheses with the highest scores, best first; of equal scores the earlier one first."""
    return take_hypotheses(hypotheses, jax.lax.top_k(hypotheses.scores, n)[1])


def decode_loop(advance: Callable[[Any], Any], carry: Any, sizes: Sequence[int], resize_fn: ResizeFn) -> Any:
    """Run `advance` until every sentence is done, in one compiled loop for each cache size; return the last carry.

    A carry has the fields `step`, `done` and `state`; the state, which has capacity for `sizes[0]` positions at first,
    is None in the result. The last of the ascending sizes is the maximum number of steps.
    """
    carry = jax.lax.while_loop(lambda carry: ~jnp.all(carry.done) & (carry.step < sizes[0]), advance, carry)
    if len(sizes) == 1:
        return carry._replace(state=None)

    def resume(carry: Any) -> Any:
        return decode_loop(advance, carry._replace(state=resize_fn(carry.state, sizes[1])), sizes[1:], resize_fn)

    return jax.lax.cond(jnp.all(carry.done), lambda carry: carry._replace(state=None), resume, carry)


def score_dtype(step_fn: StepFn, tokens: Int[Array, " rows"], state: State) -> jnp.dtype:
    """Return the dtype of log-probabilities, at least float32, without computing anything."""
    logits, _ = jax.eval_shape(step_fn, tokens, state)
    return jnp.promote_types(logits.dtype, jnp.float32)


def keep_state(state: State, max_length: int) -> State:
    """Return the state unchanged, for a callback whose state has no capacity."""
    return state


def greedy_search(step_fn: StepFn, state: State, spec: SearchSpec, *, resize_fn: ResizeFn = keep_state) -> SearchResult:
    """Generate the most probable token at each step until EOS or the limit; of equal tokens the lowest id.

    Args:
        step_fn: Maps the last token of each sentence and a state to logits `b v` and the next state, which has the
            same structure, shapes and dtypes.
        state: The initial state.
        spec: Limits, special tokens and length penalty; the fields of the beam are ignored.
        resize_fn: Resizes the state to the next of `spec.cache_sizes`.

    Returns:
        One hypothesis per sentence (n = 1).

    A bigram model in place of a Transformer, whose best continuation of 2 is 3, and of 3 is EOS:

    >>> bigrams = jnp.log(jnp.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0.1, 0.2, 0.7], [0, 0.6, 0.3, 0.1]]))
    >>> spec = SearchSpec(jnp.array([5]), max_length=5, start_id=2, eos_id=1, pad_id=0)
    >>> greedy_search(lambda tokens, state: (bigrams[tokens], state), None, spec).tokens.tolist()
    [[[3, 1, 0, 0, 0]]]
    """

    def choose(logits: Array, step: Array) -> tuple[Array, Array]:
        log_probs, ids = top_k_tokens(logits, 1, spec.constraints(step, logits.shape[1]))
        return log_probs[:, 0], ids[:, 0]

    return search_without_beam(step_fn, state, spec, choose, resize_fn)


def sample(
    step_fn: StepFn,
    state: State,
    spec: SearchSpec,
    sampling: Sampling,
    keys: Key[Array, "b n"],
    *,
    resize_fn: ResizeFn = keep_state,
) -> SearchResult:
    """Sample n hypotheses per sentence, token by token and independently of each other.

    Args:
        step_fn: As for `greedy_search`. There are b * n rows: row i is sample i % n of sentence i // n.
        state: The initial state, for b * n rows.
        spec: Limits, special tokens and length penalty; the fields of the beam are ignored.
        sampling: Distribution to sample from.
        keys: One random key per sample. A sample depends on its own key and on no other sample.
        resize_fn: Resizes the state to the next of `spec.cache_sizes`.

    Returns:
        The samples, highest score first. Scores and log-probabilities are those of the model itself, at temperature 1
        and without truncation.
    """
    b, n = keys.shape
    row_keys = keys.reshape(b * n)
    spec = dataclasses.replace(
        spec,
        max_lengths=jnp.repeat(spec.max_lengths, n, total_repeat_length=b * n),
        prefix=None if spec.prefix is None else jnp.repeat(spec.prefix, n, axis=0, total_repeat_length=b * n),
    )

    def choose(logits: Array, step: Array) -> tuple[Array, Array]:
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, step)
        return sample_tokens(logits, step_keys, sampling, spec.constraints(step, logits.shape[1]))

    samples = search_without_beam(step_fn, state, spec, choose, resize_fn)
    return best_hypotheses(jax.tree.map(lambda leaf: leaf.reshape(b, n, *leaf.shape[2:]), samples), n)


def sample_keys(seed: int, lines: Sequence[int], num_rows: int, n: int) -> Key[Array, "{num_rows} {n}"]:
    """Return a key for each of n samples of each row, a function of seed, line and sample; last rows may be padding."""
    padded = np.zeros(num_rows, np.uint32)
    padded[: len(lines)] = lines
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold_in, (0, None))(fold_in(jax.random.key(seed), padded), np.arange(n, dtype=np.uint32))


def sample_tokens(
    logits: Float[Array, "rows v"], keys: Key[Array, " rows"], sampling: Sampling, constraints: Constraints
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """Sample one token per row; return its log P under the model itself, -inf if none may be generated, and its id."""
    masked, normalizer = mask_logits(logits, constraints)
    ids, values = None, masked / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        values, ids = jax.lax.top_k(values, min(sampling.top_k or values.shape[1], values.shape[1]))
    if sampling.top_p < 1:
        probs = jax.nn.softmax(values)
        values = jnp.where(jnp.cumsum(probs, axis=1) - probs < sampling.top_p, values, -jnp.inf)
    index = jax.vmap(jax.random.categorical)(keys, values)[:, None]
    tokens = index if ids is None else jnp.take_along_axis(ids, index, axis=1)
    token_logits = jnp.take_along_axis(masked, tokens, axis=1)
    return jnp.where(token_logits == -jnp.inf, -jnp.inf, token_logits - normalizer)[:, 0], tokens[:, 0]


def search_without_beam(
    step_fn: StepFn,
    state: State,
    spec: SearchSpec,
    choose: Callable[[Float[Array, "rows v"], Int[Array, ""]], tuple[Float[Array, " rows"], Int[Array, " rows"]]],
    resize_fn: ResizeFn,
) -> SearchResult:
    """Generate one hypothesis per row; `choose(logits, step)` returns log P and the id of each row's next token."""
    limits = spec.limits
    (rows,) = limits.shape
    start = jnp.full((rows,), spec.start_id, jnp.int32)
    dtype = score_dtype(step_fn, start, state)

    def advance(carry: _Rows) -> _Rows:
        logits, state = step_fn(carry.last, carry.state)
        log_prob, chosen = choose(logits, carry.step)
        stopped = carry.done | (log_prob == -jnp.inf)  # -inf: no token may be generated
        chosen = jnp.where(stopped, spec.pad_id, chosen)
        length = carry.step + 1
        return _Rows(
            step=length,
            tokens=carry.tokens.at[:, carry.step].set(chosen),
            last=chosen,
            log_probs=jnp.where(carry.done, carry.log_probs, carry.log_probs + log_prob),
            lengths=jnp.where(stopped, carry.lengths, length),
            done=stopped | (chosen == spec.eos_id) | (length >= limits),
            state=state,
        )

    initial = _Rows(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.full((rows, spec.max_length), spec.pad_id, jnp.int32),
        last=start,
        log_probs=jnp.zeros((rows,), dtype),
        lengths=jnp.zeros((rows,), jnp.int32),
        done=limits <= 0,
        state=state,
    )
    final = decode_loop(advance, initial, (*spec.cache_sizes, spec.max_length), resize_fn)
    # An empty hypothesis has log-probability 0, or -inf if no token may be generated: any penalty above 0 keeps these.
    scores = spec.score(final.log_probs, jnp.maximum(final.lengths, 1))
    columns = final.tokens, scores, final.lengths, final.log_probs
    return SearchResult(*(column[:, None] for column in columns))


class _Rows(NamedTuple):
    """The loop carry of a search with one hypothesis per row."""

    step: Int[Array, ""]
    tokens: Int[Array, "rows l"]
    last: Int[Array, " rows"]
    log_probs: Float[Array, " rows"]
    lengths: Int[Array, " rows"]
    done: Bool[Array, " rows"]
    state: State
