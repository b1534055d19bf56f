"""Read, clean and linearize trees, and rebuild trees from any tokens."""

import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.experiments.parsing.trees import (
    MAX_DEPTH,
    Tree,
    clean,
    delinearize,
    linearize,
    parse_trees,
    read_trees,
)
from transformer_jax.types import UserError

DOG = "(S (NP (DT the) (NN dog)) (VP (VBZ runs)))"


def test_tree_round_trip():
    [tree] = parse_trees([DOG], "here")
    assert str(tree) == DOG
    assert tree.children[1] == Tree("VP", (Tree("VBZ", word="runs"),))
    assert [leaf.word for leaf in tree.leaves()] == ["the", "dog", "runs"]


def test_trees_may_share_a_line_or_extend_over_several(tmp_path):
    text = f"{DOG} ( (\nS\n\n   (VP (VB\ngo))\n))\n"
    path = tmp_path / "trees.mrg.xz"
    path.write_bytes(lzma.compress(text.encode()))
    assert list(map(str, read_trees(path))) == [DOG, "( (S (VP (VB go))))"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NP the dog))", "line 1: the word 'dog' needs its own bracket"),
        ("(S the)\n(S (DT the) dog)", "line 2: the word 'dog' needs its own bracket"),
        ("(S (DT the)", "ends with 1 brackets open"),
        ("(S (DT the)))", r"line 1: '\)' outside of all brackets"),
        ("dog", "line 1: 'dog' outside of all brackets"),
        ("(S ())", r"line 1: the bracket \(\) is empty"),
        ("(S (NP))", r"the bracket \(NP\) is empty"),
        ("(S (NP dog (DT the)))", "a bracket follows the word 'dog'"),
        ("(S " * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} nested brackets"),
    ],
)
def test_invalid_tree_names_its_line(text, message):
    with pytest.raises(UserError, match=f"here(, |: )?.*{message}"):
        parse_trees(text.split("\n"), "here")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"({DOG})", f"(TOP {DOG})"),
        (f"(ROOT {DOG})", f"(TOP {DOG})"),
        (DOG, f"(TOP {DOG})"),
        ("((S (NP-SBJ-1 (PRP it)) (VP=2 (VBZ is))) (. .))", "(TOP (S (NP (PRP it)) (VP (VBZ is))) (. .))"),
        # EVALB's example: constituents that contain only traces are removed too.
        (
            "((S (VP (VBD reported) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))) (. .)))",
            "(TOP (S (VP (VBD reported)) (. .)))",
        ),
        # Hyphens within tags are kept.
        ("((S (NP (-LRB- -LRB-) (NNP A-B))))", "(TOP (S (NP (-LRB- -LRB-) (NNP A-B))))"),
    ],
)
def test_clean_removes_traces_and_function_tags(text, expected):
    [tree] = parse_trees([text], "here")
    assert str(clean(tree)) == expected
    assert clean(parse_trees(["((S (NP (-NONE- *))))"], "here")[0]) == Tree("TOP")


WORDS = ["the", "dog", "runs"]
TAGS = ["DT", "NN", "VBZ"]


def read(tokens, words=WORDS, tags=TAGS):
    found = delinearize(tokens.split(), words, tags)
    return str(found.tree).removeprefix("(TOP ").removesuffix(")"), found.state


def test_linearize_by_hand():
    [tree] = parse_trees(["((S (NP (DT the) (NN dog)) (VP (VBZ runs))) (. .))"], "here")
    tokens = linearize(clean(tree))
    assert tokens == ["(S", "(NP", "DT", "NN", ")NP", "(VP", "VBZ", ")VP", ")S", "."]
    assert delinearize(tokens, [*WORDS, "."]) == (clean(tree), "whole")


def test_given_tags_replace_the_tags_of_the_tokens():
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
def test_invalid_tokens_are_repaired(tokens, tree, state):
    assert read(tokens) == (tree, state)


def test_depth_is_limited():
    found = delinearize(["(S"] * 5_000 + ["DT", "NN", "VBZ"], WORDS)
    assert found.state == "repaired"
    assert str(found.tree).count("(S") == MAX_DEPTH - 1


@given(
    st.lists(st.sampled_from(["(S", ")S", "(NP", ")NP", "(VP", ")VP", "NN", "VB", "<unk>", "(", ")"]), max_size=30),
    st.integers(1, 8),
)
def test_any_tokens_give_a_tree_over_exactly_the_words(tokens, count):
    words, tags = [f"w{i}" for i in range(count)], [f"t{i}" for i in range(count)]
    tree, state = delinearize(tokens, words, tags)
    assert [(leaf.word, leaf.label) for leaf in tree.leaves()] == list(zip(words, tags, strict=True))
    again = delinearize(linearize(tree), words, tags)
    assert again.tree == tree
    assert again.state != "repaired"
    if state == "whole":
        brackets = [token for token in tokens if len(token) > 1 and token[0] in "()"]
        assert [token for token in linearize(tree) if token[0] in "()"] == brackets


def test_every_tree_of_the_sample_round_trips(data_folder):
    trees = read_trees(data_folder / "ptb-wsj-sample" / "wsj_0160-0179.dev.mrg.xz")
    assert len(trees) == 273
    for tree in map(clean, trees):
        words = [leaf.word for leaf in tree.leaves()]
        tags = [leaf.label for leaf in tree.leaves()]
        tokens = linearize(tree)
        assert delinearize(tokens, words) == (tree, "whole")
        assert delinearize(tokens, words, tags).tree == tree
