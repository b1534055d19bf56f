"""Compute labeled bracketing F1 as EVALB does with the parameters of Collins (1997)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformer_jax.experiments.parsing.trees import ROOTS, Tree
from transformer_jax.types import UserError

IGNORED_TAGS = frozenset({",", ":", "``", "''", ".", "-NONE-"})
"""Parts of speech of words that do not count. A constituent of only such words does not count either."""

Bracket = tuple[str, int, int]
"""Label, index of the first word, and index after the last word. Words that do not count have no index."""


@dataclass(frozen=True)
class BracketScores:
    """Scores of parses against gold trees, in percent."""

    precision: float
    recall: float
    f1: float
    complete_match: float
    """Share of sentences with exactly the gold brackets."""
    num_sentences: int
    num_gold: int
    num_predicted: int
    num_matched: int


def brackets(tree: Tree) -> Counter[Bracket]:
    """Count each bracket of a tree. A bracket occurs twice if nested constituents have the same label and words.

    Root labels and single words are not brackets. PRT counts as ADVP.

    >>> brackets(Tree("TOP", (Tree("S", (Tree("RB", word="so"), Tree(".", word="."))),)))
    Counter({('S', 0, 1): 1})
    """
    found: Counter[Bracket] = Counter()

    def walk(node: Tree, start: int) -> int:
        if node.word:
            return start + (node.label not in IGNORED_TAGS)
        end = start
        for child in node.children:
            end = walk(child, end)
        if end > start and node.label not in ROOTS:
            found["ADVP" if node.label == "PRT" else node.label, start, end] += 1
        return end

    walk(tree, 0)
    return found


def score_brackets(pairs: Iterable[tuple[Tree, Tree]]) -> BracketScores:
    """Return the scores of (gold tree, parse) pairs, computed from the bracket counts of all sentences.

    A parse must have the words and tags of its gold tree, because words with IGNORED_TAGS do not count.
    """
    totals: Counter[str] = Counter()
    for number, (gold, predicted) in enumerate(pairs, 1):
        if [*gold.leaves()] != [*predicted.leaves()]:
            raise UserError(f"sentence {number}: the parse has other words or tags than the gold tree")
        expected, found = brackets(gold), brackets(predicted)
        totals.update(sentences=1, gold=expected.total(), predicted=found.total(), complete=int(expected == found))
        totals.update(matched=(expected & found).total())
    return BracketScores(
        precision=_percent(totals["matched"], totals["predicted"]),
        recall=_percent(totals["matched"], totals["gold"]),
        f1=_percent(2 * totals["matched"], totals["gold"] + totals["predicted"]),
        complete_match=_percent(totals["complete"], totals["sentences"]),
        **{f"num_{name}": totals[name] for name in ("sentences", "gold", "predicted", "matched")},
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
