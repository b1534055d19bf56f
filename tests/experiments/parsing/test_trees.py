"""Trees in bracket form: reading and cleaning."""

import lzma

import pytest

from transformer_jax.experiments.parsing.trees import MAX_DEPTH, Tree, clean, parse_trees, read_trees
from transformer_jax.types import UserError

DOG = "(S (NP (DT the) (NN dog)) (VP (VBZ runs)))"


def test_a_tree_is_read_and_written_again():
    [tree] = parse_trees([DOG], "here")
    assert str(tree) == DOG
    assert tree.children[1] == Tree("VP", (Tree("VBZ", word="runs"),))
    assert [leaf.word for leaf in tree.leaves()] == ["the", "dog", "runs"]


def test_trees_may_share_lines_and_go_over_several(tmp_path):
    text = f"{DOG} ( (\nS\n\n   (VP (VB\ngo))\n))\n"
    path = tmp_path / "trees.mrg.xz"
    path.write_bytes(lzma.compress(text.encode()))
    assert list(map(str, read_trees(path))) == [DOG, "( (S (VP (VB go))))"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NP the dog))", "line 1: the word 'dog' stands in no bracket of its own"),
        ("(S the)\n(S (DT the) dog)", "line 2: the word 'dog' stands in no bracket"),
        ("(S (DT the)", "ends with 1 brackets open"),
        ("(S (DT the)))", r"line 1: '\)' outside of all brackets"),
        ("dog", "line 1: 'dog' outside of all brackets"),
        ("(S ())", r"line 1: the bracket \(\) is empty"),
        ("(S (NP))", r"the bracket \(NP\) is empty"),
        ("(S (NP dog (DT the)))", "a bracket after the word 'dog'"),
        ("(S " * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} brackets within each other"),
    ],
)
def test_what_is_no_tree_is_said_with_its_line(text, message):
    with pytest.raises(UserError, match=f"here(, |: )?.*{message}"):
        parse_trees(text.split("\n"), "here")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"({DOG})", f"(TOP {DOG})"),
        (f"(ROOT {DOG})", f"(TOP {DOG})"),
        (DOG, f"(TOP {DOG})"),
        ("((S (NP-SBJ-1 (PRP it)) (VP=2 (VBZ is))) (. .))", "(TOP (S (NP (PRP it)) (VP (VBZ is))) (. .))"),
        # EVALB's own example: what holds nothing but traces goes with them.
        (
            "((S (VP (VBD reported) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))) (. .)))",
            "(TOP (S (VP (VBD reported)) (. .)))",
        ),
        # Hyphens of tags are their own.
        ("((S (NP (-LRB- -LRB-) (NNP A-B))))", "(TOP (S (NP (-LRB- -LRB-) (NNP A-B))))"),
    ],
)
def test_traces_and_function_tags_go(text, expected):
    [tree] = parse_trees([text], "here")
    assert str(clean(tree)) == expected


def test_nothing_is_left_of_traces_alone():
    [tree] = parse_trees(["((S (NP (-NONE- *))))"], "here")
    assert clean(tree) == Tree("TOP")
