"""Count a model's parameters by part, and the floating-point operations of training, from its configuration.

An operation is one multiplication or one addition, so a matrix of n entries takes 2n operations per token in the
forward pass. The backward pass takes twice that: the gradients of the input and of the matrix. Embedding look-ups,
softmax, LayerNorm and biases are not counted; they are a few percent.
"""

import dataclasses
import runpy
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


def params_report(recipe: str, vocab_size: int | None = None, flops: bool = False) -> tuple[Report, str]:
    """Return the parameters of a recipe by part, or those of each row if its file has several (`ROWS` and `PAPER`).

    An empty recipe selects the built-in one. Without a vocabulary size, rows are counted with Table 3's two sizes.

    Returns:
        The numbers as a tree that JSON can hold, and as text.
    """
    config = load_recipe(recipe) if recipe else numbers_config()
    module = runpy.run_path(recipe) if recipe.endswith(".py") else {}  # else FILE:NAME, or a run's config.json
    report: Report = {"recipe": recipe or "numbers"}
    configs = {report["recipe"]: config}
    if "ROWS" in module and "PAPER" in module:
        configs = {name: module["get_config"](name) for name in module["ROWS"]}
        sizes = [FIRST_RELEASE_VOCAB_SIZE, PAPER_VOCAB_SIZE] if vocab_size is None else [vocab_size]
        report["table"], lines = _table(module, configs, sizes)
        configs = {name: config for name, config in configs.items() if name in PAPER_COSTS}
    else:
        model = _with_vocab_size(config.model, vocab_size)
        report |= {"vocab_size": model.vocab_size, "parameters": parameters_by_part(model)}
        lines = [f"{report['recipe']}, vocabulary {model.vocab_size:,}"]
        lines += [f"  {part:11} {count:>13,}" for part, count in report["parameters"].items()]
    if flops:
        costs = [_cost(name, config, vocab_size) for name, config in configs.items()]
        report["flops"] = [cost for cost, _ in costs]
        report["paper_cost"] = {n: c._asdict() | {"recomputed": c.recomputed} for n, c in PAPER_COSTS.items()}
        lines += [line for _, cost_lines in costs for line in ["", *cost_lines]]
        lines += ["", "the paper's cost is time x GPUs x sustained single-precision rate (section 6.1):"]
        lines += [
            f"  {name:4}  {cost.hours:g} h x 3,600 s x {NUM_GPUS} GPUs x {GPU_FLOPS:.1e} FLOPS (P100) = "
            f"{cost.recomputed:.2e}; the paper states {cost.flops:.1e}"
            for name, cost in PAPER_COSTS.items()
        ]
    return report, "\n".join(lines)


def _with_vocab_size(model: ModelConfig, vocab_size: int | None) -> ModelConfig:
    if vocab_size is None:
        return model
    source = None if model.source_vocab_size is None else vocab_size
    return dataclasses.replace(model, vocab_size=vocab_size, source_vocab_size=source)


def _table(module: Report, configs: dict[str, Config], sizes: list[int]) -> tuple[Report, list[str]]:
    """Return the parameters of Table 3's rows for each vocabulary size, next to the paper's numbers in millions."""
    rows, lines = [], []
    changes = {
        name: ", ".join(f"{key.partition('.')[2]} {value}" for key, value in row.items())
        for name, row in module["ROWS"].items()
    }
    width = max(map(len, changes.values()))
    for name, config in configs.items():
        # With the biases of the first release. Without them C6 would have 52.47 million parameters, which is not 53.
        models = [dataclasses.replace(_with_vocab_size(config.model, size), attention_bias=True) for size in sizes]
        counts, paper = [parameters_by_part(model)["total"] for model in models], module["PAPER"][name].millions
        match = [None if paper is None else round(count / 1e6) == paper for count in counts]
        row = {"row": name, "change": changes[name], "parameters": counts, "paper_millions": paper, "match": match}
        rows.append(row)
        millions = "".join(f"{count / 1e6:10.2f}" for count in counts)
        fits = {None: "-", True: "yes", False: "no"}[match[0]]
        lines.append(f"{name:5} {changes[name]:{width}}{millions}{'-' if paper is None else paper:>7}  {fits}")
    heads = [f"V={size:,}" for size in sizes]
    title = "parameters in millions, with biases on the attention projections as in the first released code"
    head = f"{'row':5} {'change':{width}}{''.join(f'{head:>10}' for head in heads)}{'paper':>7}  match at {heads[0]}"
    return {"vocab_sizes": sizes, "rows": rows}, [title, head, *lines]


def _cost(name: str, config: Config, vocab_size: int | None) -> tuple[Report, list[str]]:
    """Return the operations of training a model, and their share of the paper's."""
    model, length = _with_vocab_size(config.model, vocab_size), SENTENCE_LENGTH
    sides = {
        "matrix_entries": matrix_entries(model),
        "attention_products": attention_products(model, length, length),
        "flops_per_token": training_flops(model),
    }
    tokens, steps, per_pair = config.data.batch_tokens, config.training.num_steps, sum(sides["flops_per_token"])
    total = float(per_pair * tokens * steps)
    report = {"name": name, "vocab_size": model.vocab_size, "length": length}
    report |= {key: value._asdict() for key, value in sides.items()}
    report |= {"batch_tokens": tokens, "num_steps": steps, "total": total}
    return report, [
        f"{name}, vocabulary {model.vocab_size:,}: operations of a training token, forward and backward",
        *(
            f"  {side}  6 x ({entries:,} matrix entries + {products:,} attention products at length {length})"
            f" = {flops:.3e}"
            for side, entries, products, flops in zip(Sides._fields, *sides.values(), strict=True)
        ),
        f"  training: {per_pair:.3e} x {tokens:,} tokens of each side x {steps:,} steps = {total:.2e}",
        *(
            f"  that is {100 * total / paper.flops:.3g} % of the paper's {paper.flops:.1e} ({paper_name})"
            for paper_name, paper in PAPER_COSTS.items()
            if paper_name == name or name not in PAPER_COSTS
        ),
    ]
