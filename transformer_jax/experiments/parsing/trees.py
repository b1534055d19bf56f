"""Read trees in the bracket form of the Penn Treebank: `(S (NP (DT the) (NN dog)) (VP (VBZ runs)))`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformer_jax.data.files import read_lines
from transformer_jax.types import UserError

ROOTS = frozenset({"", "TOP", "ROOT", "S1"})
"""Labels of the bracket around a complete tree."""

MAX_DEPTH = 200
"""Maximum depth of nested brackets, five times that of the Penn Treebank."""


class Tree(NamedTuple):
    """A constituent with children, or a word, whose label is its part of speech."""

    label: str
    children: tuple["Tree", ...] = ()
    word: str = ""

    def leaves(self) -> Iterator["Tree"]:
        """Yield the words from left to right."""
        pending = [self]
        while pending:
            tree = pending.pop()
            if tree.word:
                yield tree
            pending.extend(reversed(tree.children))

    def __str__(self) -> str:
        """Return the tree in bracket form."""
        inside = self.word or " ".join(map(str, self.children))
        return f"({self.label} {inside})"


def parse_trees(lines: list[str], origin: str) -> list[Tree]:
    """Return the trees in lines of bracket form. A tree may extend over several lines.

    >>> [tree] = parse_trees(["( (S (NP (PRP it))", "     (VP (VBZ works))))"], "here")
    >>> tree.children[0].children[1].children
    (Tree(label='VBZ', children=(), word='works'),)

    Raises:
        UserError: Brackets do not match, are nested deeper than MAX_DEPTH, or hold both a word and brackets; the
            message names the line.
    """
    trees: list[Tree] = []
    # Label, children and word of each open bracket.
    open_brackets: list[tuple[str, list[Tree], str]] = []
    before = ""
    tokens = ((n, token) for n, line in enumerate(lines, 1) for token in re.findall(r"[()]|[^\s()]+", line))
    for number, token in tokens:
        where = f"{origin}, line {number}"
        if token == "(":
            if open_brackets and open_brackets[-1][2]:
                raise UserError(f"{where}: a bracket after the word {open_brackets[-1][2]!r}, which needs its own")
            if len(open_brackets) == MAX_DEPTH:
                raise UserError(f"{where}: more than {MAX_DEPTH} brackets within each other")
            open_brackets.append(("", [], ""))
        elif not open_brackets:
            raise UserError(f"{where}: {token!r} outside of all brackets")
        elif token == ")":
            label, children, word = open_brackets.pop()
            if not children and not word:
                raise UserError(f"{where}: the bracket ({label}) is empty")
            (open_brackets[-1][1] if open_brackets else trees).append(Tree(label, tuple(children), word))
        elif before == "(":
            open_brackets[-1] = (token, [], "")
        else:
            label, children, word = open_brackets[-1]
            if word or children:
                raise UserError(f"{where}: the word {token!r} stands in no bracket of its own with its tag")
            open_brackets[-1] = (label, [], token)
        before = token
    if open_brackets:
        raise UserError(f"{origin}: ends with {len(open_brackets)} brackets open")
    return trees


def read_trees(path: Path) -> list[Tree]:
    """Return the trees of a file in bracket form, decompressed if its name ends with .gz, .xz or .zst.

    Raises:
        UserError: The file cannot be read, or does not hold trees; the message names the line.
    """
    return parse_trees(read_lines(path), str(path))


def clean(tree: Tree) -> Tree:
    """Return the tree that parsers learn: under a root TOP, without empty elements and function tags.

    -NONE- and constituents of nothing else are removed. NP-SBJ and NP=2 become NP.

    >>> print(clean(parse_trees(["((S (NP-SBJ (-NONE- *)) (VP (VB go))))"], "here")[0]))
    (TOP (S (VP (VB go))))
    """
    children = tree.children if tree.label in ROOTS else (tree,)
    return Tree("TOP", tuple(kept for child in children for kept in _cleaned(child)))


def _cleaned(tree: Tree) -> list[Tree]:
    if tree.word:
        return [] if tree.label == "-NONE-" else [tree]
    children = tuple(kept for child in tree.children for kept in _cleaned(child))
    label = re.split("[-=]", tree.label, maxsplit=1)[0] or tree.label
    return [Tree(label, children)] if children else []
