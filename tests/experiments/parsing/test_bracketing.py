"""Labeled bracketing F1 against hand counts, EVALB's documentation and a naive implementation."""

import random

import pytest
from naive_evalb import f1

from transformer_jax.experiments.parsing.bracketing import brackets, score_brackets
from transformer_jax.experiments.parsing.trees import Tree, clean, delinearize, linearize, parse_trees, read_trees
from transformer_jax.types import UserError


def tree(text: str) -> Tree:
    [found] = parse_trees([text], "here")
    return found


def score(gold: str, parse: str):
    return score_brackets([(tree(gold), tree(parse))])


def test_brackets_equal_the_example_of_evalb():
    """Eight words, of which six count, and five brackets."""
    text = "(S (INTJ (RB No)) (, ,) (NP (PRP it)) (VP (VBD was) (RB n't) (NP (NNP Black) (NNP Monday))) (. .))"
    assert brackets(tree(f"(TOP {text})")) == {
        ("S", 0, 6): 1,
        ("INTJ", 0, 1): 1,
        ("NP", 1, 2): 1,
        ("VP", 2, 6): 1,
        ("NP", 4, 6): 1,
    }


GOLD = "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ runs) (ADVP (RB fast))) (. .)))"


@pytest.mark.parametrize(
    ("gold", "parse", "matched", "num_gold", "num_predicted"),
    [
        (GOLD, GOLD, 4, 4, 4),
        # VP ends one word early. PRT counts as ADVP.
        (GOLD, "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ runs)) (PRT (RB fast)) (. .)))", 3, 4, 4),
        # Another label; the full stop within VP does not matter.
        (GOLD, "(TOP (S (NX (DT the) (NN dog)) (VP (VBZ runs) (ADVP (RB fast)) (. .))))", 3, 4, 4),
        # Flat: S alone.
        (GOLD, "(TOP (S (DT the) (NN dog) (VBZ runs) (RB fast) (. .)))", 1, 4, 1),
        # No bracket at all.
        (GOLD, "(TOP (DT the) (NN dog) (VBZ runs) (RB fast) (. .))", 0, 4, 0),
        # A bracket of punctuation alone is none, nor are the roots.
        (GOLD, "(ROOT (S (NP (DT the) (NN dog)) (VP (VBZ runs) (ADVP (RB fast))) (PRN (. .))))", 4, 4, 4),
        # An empty element is no word, and what holds it alone no bracket.
        (
            "(TOP (S (NP (-NONE- *)) (VP (TO to) (VP (VB run)))))",
            "(TOP (S (VP (-NONE- *)) (NP (TO to) (VP (VB run)))))",
            2,
            3,
            3,
        ),
        # EVALB: two of a label over the same words against one, and the reverse.
        ("(TOP (NP (NP (DT the) (NN man))))", "(TOP (NP (DT the) (NN man)))", 1, 2, 1),
        ("(TOP (NP (DT the) (NN man)))", "(TOP (NP (NP (DT the) (NN man))))", 1, 1, 2),
    ],
)
def test_brackets_by_hand(gold, parse, matched, num_gold, num_predicted):
    found = score(gold, parse)
    assert (found.num_matched, found.num_gold, found.num_predicted) == (matched, num_gold, num_predicted)
    assert found.precision == pytest.approx(100 * matched / num_predicted if num_predicted else 0)
    assert found.recall == pytest.approx(100 * matched / num_gold)
    assert found.f1 == pytest.approx(100 * 2 * matched / (num_gold + num_predicted))
    assert found.complete_match == (100 if matched == num_gold == num_predicted else 0)


def test_scores_are_ratios_of_sums_over_the_corpus():
    flat = "(TOP (S (DT the) (NN dog) (VBZ runs) (RB fast) (. .)))"
    found = score_brackets([(tree(GOLD), tree(GOLD)), (tree(GOLD), tree(flat))])
    assert (found.num_matched, found.num_gold, found.num_predicted) == (5, 8, 5)
    assert (found.precision, found.recall, found.complete_match) == (100, 62.5, 50)
    assert found.f1 == pytest.approx(2 * 100 * 62.5 / 162.5)


def test_parse_with_other_words_or_tags_is_rejected():
    for parse in ("(TOP (S (NN dog)))", "(TOP (S (DT a)))", "(TOP (S (NN the)))"):
        with pytest.raises(UserError, match="sentence 1: the parse has other words or tags"):
            score("(TOP (S (DT the)))", parse)


def random_tree(rng: random.Random, depth: int = 0) -> Tree:
    if depth > 4 or (depth > 1 and rng.random() < 0.5):
        return Tree(rng.choice(["DT", "NN", ",", ".", "''", ":"]), word=rng.choice("abc"))
    label = rng.choice(["S", "NP", "VP", "ADVP", "PRT"]) if depth else "TOP"
    return Tree(label, tuple(random_tree(rng, depth + 1) for _ in range(rng.randint(1, 3))))


def damaged(gold: Tree, rng: random.Random) -> Tree:
    """Return a tree rebuilt from the gold tokens after some are dropped, doubled or renamed."""
    tokens = []
    for token in linearize(gold):
        chance = rng.random()
        if chance > 0.1:
            tokens.append(token if chance < 0.9 or token[0] not in "()" else token[0] + rng.choice(["NP", "VP", "PRT"]))
        if chance > 0.95:
            tokens.append(token)
    leaves = list(gold.leaves())
    return delinearize(tokens, [leaf.word for leaf in leaves], [leaf.label for leaf in leaves]).tree


def assert_as_naive(golds: list[Tree], rng: random.Random) -> float:
    pairs = [(gold, damaged(gold, rng)) for gold in golds]
    ours = score_brackets(pairs)
    assert (ours.precision, ours.recall, ours.f1) == pytest.approx(f1([(str(g), str(p)) for g, p in pairs]))
    return ours.f1


def test_random_trees_score_as_naive_counting():
    rng = random.Random(0)
    assert 20 < assert_as_naive([random_tree(rng) for _ in range(300)], rng) < 90


def test_treebank_sample_scores_as_naive_counting(data_folder):
    trees = read_trees(data_folder / "ptb-wsj-sample" / "wsj_0160-0179.dev.mrg.xz")[:60]
    assert 20 < assert_as_naive(list(map(clean, trees)), random.Random(1)) < 90
