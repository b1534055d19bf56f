"""Count a model's parameters by part, and the floating-point operations of training, from its configuration.

An operation is one multiplication or one addition, so a matrix of n entries takes 2n operations per token in the
forward pass. The backward pass takes twice that: the gradients of the input and of the matrix. Embedding look-ups,
softmax, LayerNorm and biases are not counted; they are a few percent.
"""

import dataclasses
import runpy
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformer_jax.config import Config, ModelConfig, StackSize
from transformer_jax.presets import load_recipe, numbers_config

FIRST_RELEASE_VOCAB_SIZE, PAPER_VOCAB_SIZE = 40_960, 37_000
SENTENCE_LENGTH = 30  # roughly WMT14's, in tokens: affects only the products of attention weights

# Section 6.1: "training time, number of GPUs, sustained single-precision capacity of each", 9.5 TFLOPS for a P100.
NUM_GPUS, GPU_FLOPS = 8, 9.5e12

Report = dict[str, Any]  # a tree of values that JSON can hold


class PaperCost(NamedTuple):
    """The paper's estimate of a training cost (Table 2), and the time it is computed from (section 5.2)."""

    flops: float
    hours: float

    @property
    def recomputed(self) -> float:
        """Return the training cost in floating-point operations: seconds x number of GPUs x operations per second."""
        return self.hours * 3600 * NUM_GPUS * GPU_FLOPS


PAPER_COSTS = {"base": PaperCost(3.3e18, 12.0), "big": PaperCost(2.3e19, 84.0)}


class Sides(NamedTuple):
    """One number per source token and one number per target token."""

    source: int
    target: int


def _pair(d_model: int, size: StackSize) -> int:
    """Return the entries of an attention's query and output projections, or of its key and value projections."""
    return d_model * size.num_heads * (size.d_k + size.d_v)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part, without tracing the model, which would take 0.3 seconds.

    Embeddings include learned positions, and the projection to logits with its bias.

    >>> parameters_by_part(ModelConfig.base(37_000))
    {'embeddings': 18944000, 'encoder': 18902016, 'decoder': 25199616, 'total': 63045632}
    """
    d_model, norm = config.d_model, 2 * config.d_model

    def stack(size: StackSize, attentions: int) -> int:
        bias = size.num_heads * (2 * size.d_k + size.d_v) + d_model if config.attention_bias else 0
        feed_forward = 2 * d_model * size.d_ff + size.d_ff + d_model
        layer = attentions * (2 * _pair(d_model, size) + bias + norm) + feed_forward + norm
        return size.num_layers * layer + (norm if config.final_norm else 0)

    rows = {
        "all": config.vocab_size,
        "target": config.source_rows + config.vocab_size,
        "none": config.source_rows + 2 * config.vocab_size,
    }[config.tie_embeddings] + (2 * config.max_length if config.positions == "learned" else 0)
    parts = {
        "embeddings": rows * d_model + (config.vocab_size if config.logits_bias else 0),
        "encoder": stack(config.encoder, attentions=1),
        "decoder": stack(config.decoder, attentions=2),
    }
    return parts | {"total": sum(parts.values())}


def matrix_entries(config: ModelConfig) -> Sides:
    """Return the number of weight-matrix entries used in the forward pass of one source token and one target token.

    The key and value projections of the cross-attention count for source tokens, and the logits for target tokens.
    """
    d_model, encoder, decoder = config.d_model, config.encoder, config.decoder
    encoder_layer = 2 * _pair(d_model, encoder) + 2 * d_model * encoder.d_ff
    decoder_layer = 3 * _pair(d_model, decoder) + 2 * d_model * decoder.d_ff
    return Sides(
        source=encoder.num_layers * encoder_layer + decoder.num_layers * _pair(d_model, decoder),
        target=decoder.num_layers * decoder_layer + d_model * config.vocab_size,
    )


def attention_products(config: ModelConfig, src_length: int, tgt_length: int) -> Sides:
    """Return the multiplications of Q K^T and of the weights with V for one token, including masked keys."""
    per_key = [size.num_layers * size.num_heads * (size.d_k + size.d_v) for size in (config.encoder, config.decoder)]
    return Sides(per_key[0] * src_length, per_key[1] * (tgt_length + src_length))


def training_flops(config: ModelConfig, src_length: int = SENTENCE_LENGTH, tgt_length: int = SENTENCE_LENGTH) -> Sides:
    """Return the operations for one token of each side: 2 x (entries + products) forward, and twice that backward.

    >>> training_flops(ModelConfig.base(37_000))
    Sides(source=133226496, target=247996416)
    """
    entries, products = matrix_entries(config), attention_products(config, src_length, tgt_length)
    return Sides(6 * (entries.source + products.source), 6 * (entries.target + products.target))


def params_report(recipe: str, vocab_size: int | None = None, flops: bool = False) -> Report:
    """Return the parameters of a recipe by part, or those of each row if its file has several (`ROWS` and `PAPER`).

    An empty recipe selects the built-in one. Without a vocabulary size, rows are counted with Table 3's two sizes.
    """
    config = load_recipe(recipe) if recipe else numbers_config()
    module = runpy.run_path(recipe) if recipe.endswith(".py") else {}  # else FILE:NAME, or a run's config.json
    report: Report = {"recipe": recipe or "numbers"}
    configs = {report["recipe"]: config}
    if "ROWS" in module and "PAPER" in module:
        changes, paper = module["ROWS"], module["PAPER"]
        configs = {name: module["get_config"](name) for name in changes}
        sizes = [FIRST_RELEASE_VOCAB_SIZE, PAPER_VOCAB_SIZE] if vocab_size is None else [vocab_size]
        rows = [_row(name, configs[name], changes[name], paper[name].millions, sizes) for name in configs]
        report["table"] = {"vocab_sizes": sizes, "rows": rows}
        configs = {name: config for name, config in configs.items() if name in PAPER_COSTS}
    else:
        model = _with_vocab_size(config.model, vocab_size)
        report |= {"vocab_size": model.vocab_size, "parameters": parameters_by_part(model)}
    if flops:
        report["flops"] = [_cost(name, config, vocab_size) for name, config in configs.items()]
        report["paper_cost"] = {n: c._asdict() | {"recomputed": c.recomputed} for n, c in PAPER_COSTS.items()}
    return report


def _with_vocab_size(model: ModelConfig, vocab_size: int | None) -> ModelConfig:
    if vocab_size is None:
        return model
    source = None if model.source_vocab_size is None else vocab_size
    return dataclasses.replace(model, vocab_size=vocab_size, source_vocab_size=source)


def _row(name: str, config: Config, changes: dict[str, object], paper: int | None, sizes: list[int]) -> Report:
    """Return the parameters of a row of Table 3 for each vocabulary size, next to the paper's number in millions."""
    # With the biases of the first release. Without them C6 would have 52.47 million parameters, which is not 53.
    models = [dataclasses.replace(_with_vocab_size(config.model, size), attention_bias=True) for size in sizes]
    counts = [parameters_by_part(model)["total"] for model in models]
    return {
        "row": name,
        "change": ", ".join(f"{key.partition('.')[2]} {value}" for key, value in changes.items()),
        "parameters": counts,
        "paper_millions": paper,
        "match": [None if paper is None else round(count / 1e6) == paper for count in counts],
    }


def _cost(name: str, config: Config, vocab_size: int | None) -> Report:
    model = _with_vocab_size(config.model, vocab_size)
    tokens, steps, per_token = config.data.batch_tokens, config.training.num_steps, training_flops(model)
    return {
        "name": name,
        "vocab_size": model.vocab_size,
        "length": SENTENCE_LENGTH,
        "matrix_entries": matrix_entries(model)._asdict(),
        "attention_products": attention_products(model, SENTENCE_LENGTH, SENTENCE_LENGTH)._asdict(),
        "flops_per_token": per_token._asdict(),
        "batch_tokens": tokens,
        "num_steps": steps,
        "total": float(sum(per_token) * tokens * steps),
    }


def render(report: Report) -> str:
    """Return a report of `params_report` as text."""
    if "table" in report:
        lines = list(_table_lines(report["table"]))
    else:
        lines = [f"{report['recipe']}, vocabulary {report['vocab_size']:,}"]
        lines += [f"  {part:11} {count:>13,}" for part, count in report["parameters"].items()]
    for cost in report.get("flops", ()):
        lines += ["", *_cost_lines(cost)]
    if "flops" in report:
        lines += ["", "the paper's cost is time x GPUs x sustained single-precision rate (section 6.1):"]
        lines += [
            f"  {name:4}  {cost['hours']:g} h x 3,600 s x {NUM_GPUS} GPUs x {GPU_FLOPS:.1e} FLOPS (P100) = "
            f"{cost['recomputed']:.2e}; the paper states {cost['flops']:.1e}"
            for name, cost in report["paper_cost"].items()
        ]
    return "\n".join(lines)


def _table_lines(table: Report) -> Iterator[str]:
    heads = [f"V={size:,}" for size in table["vocab_sizes"]]
    width = max(len(row["change"]) for row in table["rows"])
    yield "parameters in millions, with biases on the attention projections as in the first released code"
    yield f"{'row':5} {'change':{width}}{''.join(f'{head:>10}' for head in heads)}{'paper':>7}  match at {heads[0]}"
    for row in table["rows"]:
        paper = "-" if row["paper_millions"] is None else row["paper_millions"]
        match = {None: "-", True: "yes", False: "no"}[row["match"][0]]
        counts = "".join(f"{count / 1e6:10.2f}" for count in row["parameters"])
        yield f"{row['row']:5} {row['change']:{width}}{counts}{paper:>7}  {match}"


def _cost_lines(cost: Report) -> Iterator[str]:
    yield f"{cost['name']}, vocabulary {cost['vocab_size']:,}: operations of a training token, forward and backward"
    for side in Sides._fields:
        entries, products = cost["matrix_entries"][side], cost["attention_products"][side]
        yield (
            f"  {side}  6 x ({entries:,} matrix entries + {products:,} attention products at length {cost['length']})"
            f" = {cost['flops_per_token'][side]:.3e}"
        )
    both = sum(cost["flops_per_token"].values())
    yield (
        f"  training: {both:.3e} x {cost['batch_tokens']:,} tokens of each side x {cost['num_steps']:,} steps = "
        f"{cost['total']:.2e}"
    )
    for name, paper in PAPER_COSTS.items():
        if name == cost["name"] or cost["name"] not in PAPER_COSTS:
            share = 100 * cost["total"] / paper.flops
            yield f"  that is {share:.3g} % of the paper's {paper.flops:.1e} ({name})"
