"""Convert trees to sequences of tokens and back (Vinyals et al. 2015, whom the paper follows in section 6.3).

    (S (NP (DT the) (NN dog)) (VP (VBZ runs)))    becomes    (S (NP DT NN )NP (VP VBZ )VP )S

Words are left out, because they are the source; the i-th tag belongs to the i-th word. The output of a model need not
be a tree: `delinearize` builds a tree from any tokens and reports whether it repaired them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from transformer_jax.experiments.parsing.trees import MAX_DEPTH, Tree

State = Literal["whole", "repaired", "failed"]


class Read(NamedTuple):
    """Result of `delinearize`."""

    tree: Tree
    """Tree under a root TOP with exactly the words of the sentence."""
    state: State
    """whole: the tokens are the tree. repaired: brackets or tags were added or left out. failed: no constituent."""


def linearize(tree: Tree) -> list[str]:
    """Return the tokens of a tree without its root TOP."""
    if tree.word:
        return [tree.label]
    inside = [token for child in tree.children for token in linearize(child)]
    return inside if tree.label == "TOP" else [f"({tree.label}", *inside, f"){tree.label}"]


def delinearize(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str] | None = None) -> Read:
    """Return the tree that tokens describe over the words of a sentence.

    Tokens that are not a tree are repaired:

    - A closing bracket also closes the brackets that are open inside its own. It is left out if no bracket of its
      label is open. At the end all brackets are closed.
    - Constituents without a word, constituents inside MAX_DEPTH others, and tags after the last word are left out.
    - Words without a tag become the last children of the last constituent below the root.

    Args:
        tokens: Opening brackets `(NP`, closing brackets `)NP`, and tags.
        words: Words of the sentence.
        tags: Parts of speech of the words. None takes them from the tokens.

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
