"""The commands that exchange models with other libraries: import, export, compare."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from transformer_jax.cli.parsing import Positional, arg, usage_error
from transformer_jax.presets import load_recipe
from transformer_jax.types import UserError

_MODEL_FIELDS = (
    *("num_heads", "decoder_num_heads", "source_bos", "norm_position", "norm_epsilon", "activation"),
    *("scale_embeddings", "positions", "norm_variant", "position_exponent", "position_offset", "decoder_start"),
    "source_eos",
)
"""Fields of `ModelConfig` that `import` takes, because a state dict does not show them."""


@dataclass(frozen=True)
class Import:
    """Make a run of a model of another library."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """File or folder of the model."""
    format: Annotated[
        Literal["torch", "annotated", "fairseq", "marian", "ctranslate2", "safetensors"], arg(name="from")
    ]
    """Format of the model."""
    output: Path
    """Folder of the new run."""
    config: str | None = None
    """For a state dict: recipe (FILE or FILE:NAME) or config.json of a run. None proposes one from the tensors."""
    tokenizer: Path | None = None
    """For a state dict: run, its tokenizer/ folder, or a tokenizer.json of Hugging Face."""
    mapping: Path | None = None
    """With --from torch: TOML file that names the tensors of your own model."""
    num_heads: int | None = None
    """Number of attention heads, which state dicts and old CTranslate2 files do not store."""
    decoder_num_heads: int | None = None
    """Number of attention heads of the decoder. None takes num_heads."""
    source_bos: bool | None = None
    """For a state dict: whether its batches start the source with BOS, as in <s> source </s>."""
    norm_position: Literal["post", "pre"] | None = None
    """For a state dict of torch modules: pre for norm_first=True."""
    norm_epsilon: float | None = None
    """For a state dict: epsilon of LayerNorm. None takes 1e-5, or 1e-6 with --from annotated."""
    activation: Literal["relu", "gelu", "swish"] | None = None
    """For a state dict of torch modules: activation of the feed-forward networks."""
    scale_embeddings: bool | None = None
    """For a state dict of torch modules: whether embeddings are multiplied by sqrt(d_model)."""
    positions: Literal["interleaved", "halves", "learned"] | None = None
    """For a state dict of torch modules: kind of positions. interleaved: the paper's sinusoids."""
    norm_variant: Literal["standard", "unbiased_std"] | None = None
    """With a mapping: unbiased_std for norms that divide by the unbiased standard deviation plus epsilon."""
    position_exponent: Literal["paper", "tensor2tensor"] | None = None
    """For a state dict: exponents of the sinusoids. None takes paper."""
    position_offset: int | None = None
    """For a state dict: position of the first token. None takes 0."""
    decoder_start: Literal["bos", "eos", "pad", "zeros"] | None = None
    """For a state dict: what the decoder reads first. None takes bos."""
    source_eos: bool | None = None
    """For a state dict: whether its batches end the source with EOS. None takes True."""
    overwrite: bool = False
    """Replace an earlier import."""

    def run(self) -> None:
        """Import the model, and print the new run."""
        from transformer_jax.interop.convert import import_run

        model = {name: getattr(self, name) for name in _MODEL_FIELDS if getattr(self, name) is not None}
        run = import_run(
            self.path,
            self.format,
            self.output,
            config=load_recipe(self.config) if self.config else None,
            tokenizer=self.tokenizer,
            mapping=self.mapping,
            overwrite=self.overwrite,
            **model,
        )
        print(f"{run.path}: a run for translate, evaluate, export and --training.init-from")


@dataclass(frozen=True)
class Export:
    """Write a run in the format of another library."""

    run_folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    format: Annotated[Literal["safetensors", "torch", "marian", "ctranslate2"], arg(name="to")]
    """Format to write."""
    output: Path
    """Folder to write."""
    checkpoint: str | None = None
    """Parameters: last, best, average or the number of a step. None takes the run's own."""
    overwrite: bool = False
    """Replace an earlier export."""

    def run(self) -> None:
        """Export the run, and print the files."""
        from transformer_jax.interop.convert import export_run

        def warn(message: str) -> None:
            warnings.warn(message, stacklevel=2)

        folder = export_run(
            self.run_folder,
            self.format,
            self.output,
            checkpoint=self.checkpoint,
            overwrite=self.overwrite,
            warn=warn,
        )
        print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


@dataclass(frozen=True)
class Compare:
    """Compare the model with that of another library, layer by layer. A large difference gives exit status 1."""

    against: Literal["torch", "annotated", "fairseq", "marian"]
    """Library to compare with."""
    path: Annotated[Positional[Path | None], arg(metavar="PATH")] = None
    """State dict, or model folder of that library. None takes random weights."""
    config: str | None = None
    """Recipe (FILE or FILE:NAME) or config.json of a run. None takes a small model."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of both sides."""
    json: bool = False
    """Print one JSON object on one line, and nothing else on stdout."""

    def run(self) -> int:
        """Print the report. Return 1 if a difference exceeds the tolerance."""
        from transformer_jax.parity.compare import compare
        from transformer_jax.parity.report import render

        try:
            config = load_recipe(self.config) if self.config else None
            report = compare(self.against, self.path, config, self.dtype)
        except UserError as error:  # 1 means that the two sides differ
            usage_error("compare", str(error))
        print(report.to_json() if self.json else render(report))
        return 0 if report.ok else 1
