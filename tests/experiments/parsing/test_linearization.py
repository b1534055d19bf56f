"""Trees as tokens and back, and what is made of tokens that are no tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.experiments.parsing.linearization import delinearize, linearize
from transformer_jax.experiments.parsing.trees import MAX_DEPTH, clean, parse_trees, read_trees

WORDS = ["the", "dog", "runs"]
TAGS = ["DT", "NN", "VBZ"]


def read(tokens, words=WORDS, tags=TAGS):
    found = delinearize(tokens.split(), words, tags)
    return str(found.tree).removeprefix("(TOP ").removesuffix(")"), found.state


def test_tokens_by_hand():
    [tree] = parse_trees(["((S (NP (DT the) (NN dog)) (VP (VBZ runs))) (. .))"], "here")
    tokens = linearize(clean(tree))
    assert tokens == ["(S", "(NP", "DT", "NN", ")NP", "(VP", "VBZ", ")VP", ")S", "."]
    assert delinearize(tokens, [*WORDS, "."]) == (clean(tree), "whole")


def test_the_tags_given_replace_those_written():
    assert read("(S (NP NN NN )NP VBZ )S") == ("(S (NP (DT the) (NN dog)) (VBZ runs))", "whole")
    assert str(delinearize(["(S", "UH", ")S"], ["oh"]).tree) == "(TOP (S (UH oh)))"


@pytest.mark.parametrize(
    ("tokens", "tree", "state"),
    [
        ("(S (NP DT NN )NP (VP VBZ", "(S (NP (DT the) (NN dog)) (VP (VBZ runs)))", "repaired"),  # not closed
        ("(S (NP DT NN )S VBZ", "(S (NP (DT the) (NN dog))) (VBZ runs)", "repaired"),  # NP is closed with S
        ("(S DT NN VBZ )NP )S", "(S (DT the) (NN dog) (VBZ runs))", "repaired"),  # nothing to close
        ("(S DT NN VBZ )S )S", "(S (DT the) (NN dog) (VBZ runs))", "repaired"),
        ("(S (NP )NP DT NN VBZ )S", "(S (DT the) (NN dog) (VBZ runs))", "repaired"),  # nothing in it
        ("(S DT NN VBZ VBZ )S", "(S (DT the) (NN dog) (VBZ runs))", "repaired"),  # a word too many
        ("(S (NP DT )NP )S", "(S (NP (DT the)) (NN dog) (VBZ runs))", "repaired"),  # two too few
        ("(S DT )S NN", "(S (DT the)) (NN dog) (VBZ runs)", "repaired"),
        ("DT NN VBZ", "(DT the) (NN dog) (VBZ runs)", "failed"),
        ("", "(DT the) (NN dog) (VBZ runs)", "failed"),
        ("(S (NP )NP )S", "(DT the) (NN dog) (VBZ runs)", "failed"),
        ("( ) <unk>", "(DT the) (NN dog) (VBZ runs)", "failed"),
    ],
)
def test_what_is_no_tree_is_made_one(tokens, tree, state):
    assert read(tokens) == (tree, state)


def test_depth_has_an_end():
    found = delinearize(["(S"] * 5_000 + ["DT", "NN", "VBZ"], WORDS)
    assert found.state == "repaired"
    assert str(found.tree).count("(S") == MAX_DEPTH - 1


@given(
    st.lists(st.sampled_from(["(S", ")S", "(NP", ")NP", "(VP", ")VP", "NN", "VB", "<unk>", "(", ")"]), max_size=30),
    st.integers(1, 8),
)
def test_whatever_comes_is_a_tree_over_exactly_the_words(tokens, count):
    words, tags = [f"w{i}" for i in range(count)], [f"t{i}" for i in range(count)]
    tree, state = delinearize(tokens, words, tags)
    assert [(leaf.word, leaf.label) for leaf in tree.leaves()] == list(zip(words, tags, strict=True))
    again = delinearize(linearize(tree), words, tags)
    assert again.tree == tree
    assert again.state != "repaired"
    if state == "whole":
        brackets = [token for token in tokens if len(token) > 1 and token[0] in "()"]
        assert [token for token in linearize(tree) if token[0] in "()"] == brackets


def test_every_tree_of_the_sample_comes_back(data_folder):
    trees = read_trees(data_folder / "ptb-wsj-sample" / "wsj_0160-0179.dev.mrg.xz")
    assert len(trees) == 273
    for tree in map(clean, trees):
        words = [leaf.word for leaf in tree.leaves()]
        tags = [leaf.label for leaf in tree.leaves()]
        tokens = linearize(tree)
        assert delinearize(tokens, words) == (tree, "whole")
        assert delinearize(tokens, words, tags).tree == tree
