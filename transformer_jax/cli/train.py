"""The command `train`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from transformer_jax.cli.parsing import FlagConversionOff, Positional, arg
from transformer_jax.cli.session import processes
from transformer_jax.config import Config
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.runtime.distributed import Cluster, is_main_process


@dataclass(frozen=True)
class Train:
    """Train a recipe, or resume the run in --workdir. Every field of the recipe is a flag."""

    recipe: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Recipe: FILE or FILE:NAME of a Python file that defines get_config(), or a run's config.json. Empty uses the
    built-in recipe, spelled-out numbers."""
    workdir: Path = Path("runs") / "numbers"
    """Folder of the run. An equal command resumes the run in it."""
    profile: bool = False
    """Trace five training steps into the run's profile/, for TensorBoard and Perfetto."""
    strict: bool = False
    """Fail if the newest checkpoint is damaged, instead of resuming from an earlier one."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)
    config: Annotated[FlagConversionOff[Config], arg(name="")] = field(default_factory=numbers_config)

    def run(self) -> None:
        """Train, and print the scores on the test split."""
        with processes(self.cluster):
            from transformer_jax import run
            from transformer_jax.evaluation.evaluate import result_lines

            outcome = run.train(self.config, self.workdir, profile=self.profile, strict=self.strict)
            if outcome.test is not None and is_main_process():
                print(*result_lines(outcome.test), sep="\n")


def train_defaults(recipe: str) -> Train:
    """Return the default of every flag of `train` for a recipe."""
    if not recipe:
        return Train()
    path, _, name = recipe.partition(":")
    workdir = Path("runs") / (Path(path).stem + (f"-{name}" if name else ""))
    return Train(recipe, workdir, config=load_recipe(recipe))
