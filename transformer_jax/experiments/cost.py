"""Count a model's parameters by part, and the floating-point operations of training, from its configuration.

An operation is one multiplication or one addition, so a matrix of n entries takes 2n operations per token in the
forward pass. The backward pass takes twice that: the gradients of the input and of the matrix. Embedding look-ups,
softmax, LayerNorm and biases are not counted; they are a few percent.
"""

import dataclasses
import math
import runpy
from typing import Any, NamedTuple

from transformer_jax.config import Config, ModelConfig, StackSize
from transformer_jax.presets import load_recipe, numbers_config

FIRST_RELEASE_VOCAB_SIZE, PAPER_VOCAB_SIZE = 40_960, 37_000
SENTENCE_LENGTH = 30  # roughly WMT14's, in tokens: affects only the products of attention weights

# Section 6.1: "training time, number of GPUs, sustained single-precision capacity of each", 9.5 TFLOPS for a P100.
NUM_GPUS, GPU_FLOPS = 8, 9.5e12


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


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of the embeddings, of each stack, and in total.

    Embeddings include learned positions, and the projection to logits with its bias. The numbers are computed by
    arithmetic, because the table of all rows needs 40 models and tracing one takes 0.3 seconds.

    >>> parameters_by_part(ModelConfig.base(37_000))
    {'embeddings': 18944000, 'encoder': 18902016, 'decoder': 25199616, 'total': 63045632}
    """
    d_model, norm = config.d_model, 2 * config.d_model

    def stack(size: StackSize, attentions: int) -> int:
        attention = 2 * d_model * size.num_heads * (size.d_k + size.d_v)
        if config.attention_bias:
            attention += size.num_heads * (2 * size.d_k + size.d_v) + d_model
        feed_forward = 2 * d_model * size.d_ff + size.d_ff + d_model
        layer = attentions * (attention + norm) + feed_forward + norm
        return size.num_layers * layer + (norm if config.final_norm else 0)

    rows = {
        "all": config.vocab_size,
        "target": config.source_rows + config.vocab_size,
        "none": config.source_rows + 2 * config.vocab_size,
    }[config.tie_embeddings]
    if config.positions == "learned":
        rows += 2 * config.max_length
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
    # A pair of projections, query and output or key and value, has one of width d_k and one of width d_v.
    encoder_pair = d_model * encoder.num_heads * (encoder.d_k + encoder.d_v)
    decoder_pair = d_model * decoder.num_heads * (decoder.d_k + decoder.d_v)
    encoder_layer = 2 * encoder_pair + 2 * d_model * encoder.d_ff
    decoder_layer = 3 * decoder_pair + 2 * d_model * decoder.d_ff
    return Sides(
        source=encoder.num_layers * encoder_layer + decoder.num_layers * decoder_pair,
        target=decoder.num_layers * decoder_layer + d_model * config.vocab_size,
    )


def attention_products(config: ModelConfig, src_length: int, tgt_length: int) -> Sides:
    """Return the multiplications of Q K^T and of the weights with V for one token, including masked keys."""
    encoder, decoder = config.encoder, config.decoder
    return Sides(
        source=encoder.num_layers * encoder.num_heads * (encoder.d_k + encoder.d_v) * src_length,
        target=decoder.num_layers * decoder.num_heads * (decoder.d_k + decoder.d_v) * (tgt_length + src_length),
    )


def forward_flops(config: ModelConfig, src_length: int, tgt_length: int) -> Sides:
    """Return the forward operations for one token of each side: 2 x (matrix entries + attention products)."""
    entries, products = matrix_entries(config), attention_products(config, src_length, tgt_length)
    return Sides(2 * (entries.source + products.source), 2 * (entries.target + products.target))


def training_flops(config: ModelConfig, src_length: int = SENTENCE_LENGTH, tgt_length: int = SENTENCE_LENGTH) -> Sides:
    """Return the forward and backward operations for one token of each side, three times `forward_flops`.

    >>> training_flops(ModelConfig.base(37_000))
    Sides(source=133226496, target=247996416)
    """
    forward = forward_flops(config, src_length, tgt_length)
    return Sides(3 * forward.source, 3 * forward.target)


def params_report(recipe: str, vocab_size: int | None = None, flops: bool = False) -> dict[str, Any]:
    """Return the counts that `render` prints, as values that JSON can hold.

    A recipe file with several rows (`ROWS` and `PAPER`, as in configs/table3.py) and no name after it gives the
    parameter column of the paper's Table 3. Any other recipe gives its parameters by part.

    Args:
        recipe: FILE or FILE:NAME. An empty string selects the built-in recipe.
        vocab_size: Vocabulary size to count with. None uses the recipe's size, or Table 3's two sizes.
        flops: Whether to count operations too.

    Raises:
        UserError: The recipe does not exist, or the vocabulary is too small for it.
    """
    config = load_recipe(recipe) if recipe else numbers_config()
    module = runpy.run_path(recipe) if recipe.endswith(".py") else {}  # else FILE:NAME, or a run's config.json
    report: dict[str, Any] = {"recipe": recipe or "numbers"}
    if "ROWS" in module and "PAPER" in module:
        configs = {name: module["get_config"](name) for name in module["ROWS"]}
        millions = {name: module["PAPER"][name].millions for name in configs}
        report["table"] = _table(configs, millions, module["ROWS"], vocab_size)
        costly = {name: config for name, config in configs.items() if name in PAPER_COSTS}
    else:
        model = _with_vocab_size(config.model, vocab_size)
        report |= {"vocab_size": model.vocab_size, "parameters": parameters_by_part(model)}
        costly = {report["recipe"]: config}
    if flops:
        report["flops"] = [_cost(name, config, vocab_size) for name, config in costly.items()]
        report["paper_cost"] = {
            name: {"flops": cost.flops, "hours": cost.hours, "recomputed": cost.recomputed}
            for name, cost in PAPER_COSTS.items()
        }
    return report


def render(report: dict[str, Any]) -> str:
    """Return a report of `params_report` as text."""
    lines = _render_table(report["table"]) if "table" in report else _render_parts(report)
    if "flops" in report:
        lines += [line for cost in report["flops"] for line in ["", *_render_cost(cost)]]
        lines += ["", "the paper's cost is time x GPUs x sustained single-precision rate (section 6.1):"]
        for name, cost in report["paper_cost"].items():
            lines.append(
                f"  {name:4}  {cost['hours']:g} h x 3,600 s x {NUM_GPUS} GPUs x {GPU_FLOPS:.1e} FLOPS (P100) = "
                f"{cost['recomputed']:.2e}; the paper states {cost['flops']:.1e}"
            )
    return "\n".join(lines)


def _with_vocab_size(model: ModelConfig, vocab_size: int | None) -> ModelConfig:
    if vocab_size is None:
        return model
    source = None if model.source_vocab_size is None else vocab_size
    return dataclasses.replace(model, vocab_size=vocab_size, source_vocab_size=source)


def _table(
    configs: dict[str, Config],
    millions: dict[str, int | None],
    changes: dict[str, dict[str, Any]],
    vocab_size: int | None,
) -> dict[str, Any]:
    sizes = [FIRST_RELEASE_VOCAB_SIZE, PAPER_VOCAB_SIZE] if vocab_size is None else [vocab_size]
    rows, fits = [], {}
    for name, config in configs.items():
        # With the biases of the first release. Without them C6 would have 52.47 million parameters, which is not 53.
        models = [dataclasses.replace(_with_vocab_size(config.model, v), attention_bias=True) for v in sizes]
        counts = [parameters_by_part(model)["total"] for model in models]
        paper = millions[name]
        rows.append(
            {
                "row": name,
                "change": ", ".join(f"{key.partition('.')[2]} {value}" for key, value in changes[name].items()),
                "parameters": counts,
                "paper_millions": paper,
                "match": [None if paper is None else round(count / 1e6) == paper for count in counts],
            }
        )
        if paper is not None:
            # One tied table has d_model parameters per row.
            others = counts[0] - sizes[0] * config.model.d_model
            fits[name] = [_rows_for(edge * 1e6 - others, config.model.d_model) for edge in (paper - 0.5, paper + 0.5)]
    most = [fit for name, fit in fits.items() if name != "big"]
    table = {"vocab_sizes": sizes, "rows": rows}
    if most and "big" in fits:
        table["all_but_big_fit"] = [max(first for first, _ in most), min(end for _, end in most) - 1]
        table["big_fits"] = [fits["big"][0], fits["big"][1] - 1]
    return table


def _rows_for(parameters: float, d_model: int) -> int:
    """Return the minimum number of rows with which an embedding table has this number of parameters."""
    return math.ceil(parameters / d_model)


def _cost(name: str, config: Config, vocab_size: int | None) -> dict[str, Any]:
    model = _with_vocab_size(config.model, vocab_size)
    tokens, steps = config.data.batch_tokens, config.training.num_steps
    per_token = training_flops(model)
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


def _render_parts(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['recipe']}, vocabulary {report['vocab_size']:,}"]
    return lines + [f"  {part:11} {count:>13,}" for part, count in report["parameters"].items()]


def _render_table(table: dict[str, Any]) -> list[str]:
    heads = [f"V={size:,}" for size in table["vocab_sizes"]]
    columns = "".join(f"{head:>10}" for head in heads)
    width = max(len(row["change"]) for row in table["rows"])
    lines = [
        "parameters in millions, with biases on the attention projections as in the first released code",
        f"{'row':5} {'change':{width}}{columns}{'paper':>7}  match at {heads[0]}",
    ]
    for row in table["rows"]:
        paper = "-" if row["paper_millions"] is None else row["paper_millions"]
        match = {None: "-", True: "yes", False: "no"}[row["match"][0]]
        counts = "".join(f"{count / 1e6:10.2f}" for count in row["parameters"])
        lines.append(f"{row['row']:5} {row['change']:{width}}{counts}{paper:>7}  {match}")
    if "big_fits" in table:
        (first, last), (big_first, big_last) = table["all_but_big_fit"], table["big_fits"]
        lines.append(
            f"The paper's figure of big needs {big_first:,} to {big_last:,} rows in the embedding table, those of the "
            f"others {first:,} to {last:,}."
        )
        if big_last < first or last < big_first:
            lines.append("So the big row (213) fits no vocabulary that the others fit.")
    return lines


def _render_cost(cost: dict[str, Any]) -> list[str]:
    lines = [f"{cost['name']}, vocabulary {cost['vocab_size']:,}: operations of a training token, forward and backward"]
    for side in Sides._fields:
        entries, products = cost["matrix_entries"][side], cost["attention_products"][side]
        lines.append(
            f"  {side}  6 x ({entries:,} matrix entries + {products:,} attention products at length {cost['length']})"
            f" = {cost['flops_per_token'][side]:.3e}"
        )
    both = sum(cost["flops_per_token"].values())
    lines.append(
        f"  training: {both:.3e} x {cost['batch_tokens']:,} tokens of each side x {cost['num_steps']:,} steps = "
        f"{cost['total']:.2e}"
    )
    for name, paper in PAPER_COSTS.items():
        if name == cost["name"] or cost["name"] not in PAPER_COSTS:
            share = 100 * cost["total"] / paper.flops
            lines.append(f"  that is {share:.3g} % of the paper's {paper.flops:.1e} ({name})")
    return lines
