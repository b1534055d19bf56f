"""The commands that exchange models with other libraries: import, export, compare."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from transformer_jax.cli.parsing import CheckpointFlag, ModelFlags, Positional, RunFolder, UsageError, arg, given
from transformer_jax.presets import load_recipe
from transformer_jax.types import UserError


@dataclass(frozen=True)
class Import:
    """Make a run from a model of another library."""

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
    model: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
    overwrite: bool = False
    """Replace an earlier import."""

    def run(self) -> None:
        """Import the model, and print the new run."""
        from transformer_jax.interop.convert import import_run

        run = import_run(
            self.path,
            self.format,
            self.output,
            config=load_recipe(self.config) if self.config else None,
            tokenizer=self.tokenizer,
            mapping=self.mapping,
            overwrite=self.overwrite,
            **given(self.model),
        )
        print(f"{run.path}: a run for translate, evaluate, export and --training.init-from")


@dataclass(frozen=True)
class Export:
    """Write a run in the format of another library."""

    run_folder: RunFolder
    format: Annotated[Literal["safetensors", "torch", "marian", "ctranslate2"], arg(name="to")]
    """Format to write."""
    output: Path
    """Folder to write."""
    parameters: Annotated[CheckpointFlag, arg(name="")] = field(default_factory=CheckpointFlag)
    overwrite: bool = False
    """Replace an earlier export."""

    def run(self) -> None:
        """Export the run, and print the files."""
        from transformer_jax.interop.convert import export_run

        def warn(message: str) -> None:
            warnings.warn(message, stacklevel=2)

        folder = export_run(
            self.run_folder, self.format, self.output, overwrite=self.overwrite, warn=warn, **given(self.parameters)
        )
        print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


@dataclass(frozen=True)
class Compare:
    """Compare the model with that of another library, layer by layer. A large difference gives exit status 1."""

    against: Literal["torch", "annotated", "fairseq", "marian"]
    """Library to compare with."""
    path: Annotated[Positional[Path | None], arg(metavar="PATH")] = None
    """State dict, or model folder of that library. None compares random weights."""
    config: str | None = None
    """Recipe (FILE or FILE:NAME) or config.json of a run. None proposes one from PATH, or uses a small model."""
    model: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
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
            report = compare(self.against, self.path, config, self.dtype, **given(self.model))
        except UserError as error:  # 1 means that the two sides differ
            raise UsageError(str(error)) from error
        print(report.to_json() if self.json else render(report))
        return 0 if report.ok else 1
