"""Read trees in the bracket form of the Penn Treebank, and convert them to sequences of tokens and back.

    (S (NP (DT the) (NN dog)) (VP (VBZ runs)))    becomes    (S (NP DT NN )NP (VP VBZ )VP )S

The tokens are those of Vinyals et al. (2015), whom the paper follows in section 6.3. Words are left out, because they
are the source; the i-th tag belongs to the i-th word. The output of a model need not be a tree: `delinearize` builds a
tree from any tokens and reports whether it repaired them.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

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
        if self.word:
            yield self
        for child in self.children:
            yield from child.leaves()

    def __str__(self) -> str:
        """Return the tree in bracket form."""
        inside = self.word or " ".join(map(str, self.children))
        return f"({self.label} {inside})"


def parse_trees(lines: list[str], origin: str) -> list[Tree]:
    """Return the trees in lines of bracket form. A tree may extend over several lines.

    >>> [tree] = parse_trees(["( (S (NP (PRP it))", "     (VP (VBZ works))))"], "here")
    >>> tree.children[0].children[1].children
    (Tree(label='VBZ', children=(), word='works'),)
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
                raise UserError(f"{where}: a bracket follows the word {open_brackets[-1][2]!r}, which needs its own")
            if len(open_brackets) == MAX_DEPTH:
                raise UserError(f"{where}: more than {MAX_DEPTH} nested brackets")
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
                raise UserError(f"{where}: the word {token!r} needs its own bracket with a tag, such as (NN dog)")
            open_brackets[-1] = (label, [], token)
        before = token
    if open_brackets:
        raise UserError(f"{origin}: ends with {len(open_brackets)} brackets open")
    return trees


def read_trees(path: Path) -> list[Tree]:
    """Return the trees of a file in bracket form, decompressed if its name ends with .gz, .xz or .zst."""
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


State = Literal["whole", "repaired", "failed"]


class Read(NamedTuple):
    """Result of `delinearize`."""

    tree: Tree
    """Tree under a root TOP with exactly the words of the sentence."""
    state: State
    """whole: tokens needed no repair. repaired: brackets or tags were added or dropped. failed: no constituent."""


def linearize(tree: Tree) -> list[str]:
    """Return the tokens of a tree without its root TOP."""
    if tree.word:
        return [tree.label]
    inside = [token for child in tree.children for token in linearize(child)]
    return inside if tree.label == "TOP" else [f"({tree.label}", *inside, f"){tree.label}"]


def delinearize(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str] | None = None) -> Read:
    """Return the tree that tokens describe over the words of a sentence.

    Tokens that are not a tree are repaired:

    - A closing bracket also closes all brackets opened after its match. It is dropped if no bracket with its label
      is open. Brackets still open at the end are closed.
    - Constituents without words, constituents nested in MAX_DEPTH others, and tags after the last word are dropped.
    - Words without a tag become the last children of the last constituent below the root.

    `tags` are the parts of speech of the words; None takes them from the tokens.

    >>> delinearize("(S (NP PRP )NP VBZ )S".split(), ["it", "works"]).state
    'whole'
    >>> print(delinearize("(S (NP DT NN".split(), ["the", "dog", "runs"], ["DT", "NN", "VBZ"]).tree)
    (TOP (S (NP (DT the) (NN dog)) (VBZ runs)))
    """
    stack: list[tuple[str, list[Tree]]] = [("TOP", [])]
    count, is_whole = 0, True

    def close() -> bool:
        label, children = stack.pop()
        if children:
            stack[-1][1].append(Tree(label, tuple(children)))
        return bool(children)

    for token in tokens:
        if len(token) > 1 and token[0] == "(":
            if len(stack) < MAX_DEPTH:
                stack.append((token[1:], []))
            else:
                is_whole = False
        elif len(token) > 1 and token[0] == ")":
            label = token[1:]
            is_whole &= stack[-1][0] == label and len(stack) > 1
            if label in [name for name, _ in stack[1:]]:
                while stack[-1][0] != label:
                    close()
                is_whole &= close()
        elif count < len(words):
            stack[-1][1].append(Tree(tags[count] if tags else token, word=words[count]))
            count += 1
        else:
            is_whole = False
    is_whole &= len(stack) == 1 and count == len(words)
    while len(stack) > 1:
        close()
    children = stack[0][1]
    found_any = any(child.children for child in children)
    rest = [Tree(tags[i] if tags else "XX", word=words[i]) for i in range(count, len(words))]
    if rest and children and children[-1].children:
        children[-1] = children[-1]._replace(children=(*children[-1].children, *rest))
    else:
        children += rest
    return Read(Tree("TOP", tuple(children)), "failed" if not found_any else "whole" if is_whole else "repaired")
