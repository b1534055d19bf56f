"""Labeled bracketing F1, as EVALB counts it with the parameters of Collins (1997)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformer_jax.experiments.parsing.trees import ROOTS, Tree
from transformer_jax.types import UserError

IGNORED_TAGS = frozenset({",", ":", "``", "''", ".", "-NONE-"})
"""Words of these parts of speech do not count, nor does what holds only such words."""

Bracket = tuple[str, int, int]
"""A label, the first word, and the one after the last; words that do not count are not numbered."""


@dataclass(frozen=True)
class BracketScores:
    """What parses score against the gold trees. Percentages."""

    precision: float
    recall: float
    f1: float
    complete_match: float
    """Sentences with exactly the gold brackets."""
    num_sentences: int
    num_gold: int
    num_predicted: int
    num_matched: int


def brackets(tree: Tree) -> Counter[Bracket]:
    """The constituents of a tree, each as often as it is there: one over the other may have label and words in common.

    Left out are roots and words; ADVP and PRT are one label.

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
    """Scores of (gold tree, parse) pairs: sums over all sentences, then percentages.

    Both of a pair must have the same words with the same tags, since tags say which words count.

    Raises:
        UserError: they have not.
    """
    gold_sum = predicted_sum = matched_sum = complete = sentences = 0
    for gold, predicted in pairs:
        sentences += 1
        if [*gold.leaves()] != [*predicted.leaves()]:
            raise UserError(f"sentence {sentences}: the parse has other words or tags than the gold tree")
        gold_brackets, predicted_brackets = brackets(gold), brackets(predicted)
        gold_sum += gold_brackets.total()
        predicted_sum += predicted_brackets.total()
        matched_sum += (gold_brackets & predicted_brackets).total()
        complete += gold_brackets == predicted_brackets
    return BracketScores(
        precision=_percent(matched_sum, predicted_sum),
        recall=_percent(matched_sum, gold_sum),
        f1=_percent(2 * matched_sum, gold_sum + predicted_sum),
        complete_match=_percent(complete, sentences),
        num_sentences=sentences,
        num_gold=gold_sum,
        num_predicted=predicted_sum,
        num_matched=matched_sum,
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
