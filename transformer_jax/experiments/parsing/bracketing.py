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
    """Return the constituents of a tree and how often each occurs, because nested ones may have equal label and words.

    Roots and words are left out. ADVP and PRT count as one label.

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
    """Return the scores of (gold tree, parse) pairs: percentages of sums over all sentences.

    Raises:
        UserError: A parse has other words or tags than its gold tree. Tags decide which words count.
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
