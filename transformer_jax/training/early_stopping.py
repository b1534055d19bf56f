"""Early stopping: a training ends when validations have got no better for a while."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from transformer_jax.checkpoint.checkpoint import selection_score
from transformer_jax.checkpoint.run_dir import RunDir


class EarlyStopping:
    """Counts the validations since the best one. What it says follows from the figures of all validations of the run,
    so a resumed run ends where an uninterrupted one does.

    >>> patience = EarlyStopping(2, "valid_loss", [{"valid_loss": 3.0}, {"valid_loss": 2.0}, {"valid_loss": 2.5}])
    >>> patience.should_stop()
    False
    >>> patience.add({"valid_loss": 2.0})
    >>> patience.should_stop()
    True

    Args:
        most: so many validations without a better figure are too many; 0: there is no end.
        best_by: the figure.
        earlier: figures of the validations so far.
    """

    def __init__(self, most: int, best_by: str, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._most, self._best_by = most, best_by
        self._best, self._since = float("-inf"), 0
        for figures in earlier:
            self.add(figures)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Counts a validation, if there was one."""
        if self._best_by not in figures:
            return
        found = selection_score({name: float("nan") if x is None else x for name, x in figures.items()}, self._best_by)
        self._since = 0 if found > self._best else self._since + 1
        self._best = max(self._best, found)

    def should_stop(self) -> bool:
        """Whether training is to end."""
        return 0 < self._most <= self._since


def validations_of(run: RunDir, best_by: str) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that hold this figure."""
    lines = run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.is_file() else []
    return [row for row in map(json.loads, lines) if best_by in row]
