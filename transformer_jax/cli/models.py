"""Parsers of the commands that move and examine models: import, export, compare, params; and doctor."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from transformer_jax.cli.parsing import Positional, arg, parse, usage_error
from transformer_jax.presets import load_recipe
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError

_MODEL_FIELDS = (
    *("num_heads", "decoder_num_heads", "source_bos", "norm_position", "norm_epsilon", "activation"),
    *("scale_embeddings", "positions"),
)
"""Fields of `ModelConfig` that `import` takes, because a state dict does not show them."""


def import_model(args: list[str]) -> None:
    """`transformer-jax import`."""

    @dataclass(frozen=True)
    class Import:
        path: Positional[Path]
        """The foreign file or folder."""
        source: Annotated[
            Literal["torch", "annotated", "fairseq", "marian", "ctranslate2", "safetensors"], arg(name="from")
        ]
        """What it is."""
        output: Path
        """The new run's folder."""
        config: str | None = None
        """For a state dict: a recipe, FILE or FILE:NAME, or a run's config.json. Default: proposed from the tensors."""
        tokenizer: Path | None = None
        """For a state dict: a run, its tokenizer/, or a tokenizer.json of Hugging Face."""
        mapping: Path | None = None
        """With --from torch: a TOML file that names the tensors of your own model."""
        num_heads: int | None = None
        """Number of attention heads, which state dicts and old CTranslate2 files do not store."""
        decoder_num_heads: int | None = None
        """Number of attention heads of the decoder, if it differs."""
        source_bos: bool | None = None
        """For a state dict: whether its batches start the source with BOS, as <s> source </s> does."""
        norm_position: Literal["post", "pre"] | None = None
        """For a state dict of torch modules: pre for norm_first=True."""
        norm_epsilon: float | None = None
        """For a state dict: LayerNorm's epsilon. Default: 1e-5, and 1e-6 with --from annotated."""
        activation: Literal["relu", "gelu", "swish"] | None = None
        """For a state dict of torch modules: activation of the feed-forward networks."""
        scale_embeddings: bool | None = None
        """For a state dict of torch modules: whether embeddings are multiplied by sqrt(d_model)."""
        positions: Literal["interleaved", "halves", "learned"] | None = None
        """For a state dict of torch modules: kind of positions. interleaved: the paper's sinusoids."""
        overwrite: bool = False
        """Replace an earlier import."""

    parsed = parse(Import, "import", args, default=None, description="Makes a run of another software's model.")
    model = {name: getattr(parsed, name) for name in _MODEL_FIELDS if getattr(parsed, name) is not None}
    from transformer_jax.interop.convert import import_run

    run = import_run(
        parsed.path,
        parsed.source,
        parsed.output,
        config=load_recipe(parsed.config) if parsed.config else None,
        tokenizer=parsed.tokenizer,
        mapping=parsed.mapping,
        overwrite=parsed.overwrite,
        **model,
    )
    print(f"{run.path}: a run for translate, evaluate, export and --training.init-from")


def export_model(args: list[str]) -> None:
    """`transformer-jax export`."""

    @dataclass(frozen=True)
    class Export:
        run: Positional[Path]
        """The run's folder."""
        target: Annotated[Literal["safetensors", "torch", "marian", "ctranslate2"], arg(name="to")]
        """For which software."""
        output: Path
        """The folder to write."""
        checkpoint: str | None = None
        """last, best, average or the number of a step; None: as the run says."""
        overwrite: bool = False
        """Replace an earlier export."""

    parsed = parse(Export, "export", args, default=None, description="Writes a run for another software.")
    from transformer_jax.interop.convert import export_run

    def warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

    folder = export_run(
        parsed.run,
        parsed.target,
        parsed.output,
        checkpoint=parsed.checkpoint,
        overwrite=parsed.overwrite,
        warn=warn,
    )
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


def compare(args: list[str]) -> int:
    """`transformer-jax compare`: 0 within tolerance, 1 outside."""

    @dataclass(frozen=True)
    class Compare:
        against: Literal["torch", "annotated", "fairseq", "marian"]
        """The other side."""
        path: Positional[Path | None] = None
        """A state dict, or a folder of that software; none: random weights."""
        config: str | None = None
        """A recipe, FILE or FILE:NAME, or a run's config.json; none: a small model."""
        dtype: Literal["float32", "float64"] = "float32"
        """Of both sides."""
        json: bool = False
        """One JSON object on one line, and nothing else on stdout."""

    parsed = parse(
        Compare, "compare", args, default=None, description="The same weights here and there, layer by layer."
    )
    from transformer_jax.parity import command
    from transformer_jax.parity.compare import render

    try:
        config = load_recipe(parsed.config) if parsed.config else None
        report = command.compare(parsed.against, parsed.path, config, parsed.dtype)
    except UserError as error:  # 1 means that the two sides differ
        usage_error("compare", str(error))
    print(report.to_json() if parsed.json else render(report))
    return 0 if report.ok else 1


def params(args: list[str]) -> None:
    """`transformer-jax params`."""

    @dataclass(frozen=True)
    class Params:
        config: Positional[str] = ""
        """A recipe, FILE or FILE:NAME; none: the built-in one. A file of several recipes: all of them."""
        vocab_size: int | None = None
        """Another vocabulary than the recipe's."""
        flops: bool = False
        """The cost of training too."""
        json: bool = False
        """One JSON object on one line."""

    parsed = parse(Params, "params", args, default=None, description="Counts parameters and the cost of training.")
    from transformer_jax.experiments.cost import params_report, render

    report = params_report(parsed.config, parsed.vocab_size, parsed.flops)
    print(to_json(report) if parsed.json else render(report))


def doctor(args: list[str]) -> int:
    """`transformer-jax doctor`: 0 if all is well, 1 if something needs fixing."""

    @dataclass(frozen=True)
    class Doctor:
        subject: Positional[str] = ""
        """A recipe, FILE or FILE:NAME, a run's folder or its config.json; none: this machine alone."""

    parsed = parse(Doctor, "doctor", args, default=None, description="What is ready here, and what needs fixing.")
    from transformer_jax.doctor import examine

    findings = list(examine(parsed.subject, print))
    return 0 if all(finding.ok for finding in findings) else 1
