"""Prepare a treebank as a corpus of sentence pairs, and score a run's parses: `transformer-jax parsing`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.data.corpus import read_split
from transformer_jax.decoding.translator import Translator
from transformer_jax.experiments.parsing.bracketing import score_brackets
from transformer_jax.experiments.parsing.trees import Tree, clean, delinearize, linearize, read_trees
from transformer_jax.runtime.files import check_writable, write_atomically, write_errors
from transformer_jax.types import UserError

WORDS, TREE = "words", "tree"
"""Languages of a parsing corpus: each line of STEM.words is a sentence, and that of STEM.tree its linearized tree."""


def prepare(splits: dict[str, Sequence[Path]], output: Path, log: Callable[[str], None] = print) -> None:
    """Write STEM.words and STEM.tree into a folder for `data.source` text, from files of trees by stem (`train`)."""
    for stem, files in splits.items():
        trees = [clean(tree) for file in files for tree in read_trees(file)]
        kept = [tree for tree in trees if tree.children]
        if not kept:
            raise UserError(f"{', '.join(map(str, files))}: no tree with a word in it")
        sides = {WORDS: [_words(tree) for tree in kept], TREE: [linearize(tree) for tree in kept]}
        with write_errors(output):
            output.mkdir(parents=True, exist_ok=True)
        for language, rows in sides.items():
            write_atomically(output / f"{stem}.{language}", "".join(" ".join(row) + "\n" for row in rows))
        longest = {language: max(map(len, rows)) for language, rows in sides.items()}
        symbols = len({token for row in sides[TREE] for token in row})
        log(
            f"{output / stem}.{WORDS} and .{TREE}: {len(kept)} trees, {len(trees) - len(kept)} without words left out; "
            f"at most {longest[WORDS]} words and {longest[TREE]} tokens of a tree, {symbols} different ones"
        )


def score(run: Path, stem: str = "valid", output: Path | None = None, **decoding: Any) -> dict[str, object]:
    """Return the labeled bracketing F1 of a run's parses of a split, and write the parses to `output`, one per line.

    The parses get the gold trees' tags. Output that is not a tree is repaired by `delinearize` and counted as repaired.
    A parse without a constituent counts as failed, and misses every bracket of the gold tree.
    """
    if output is not None:
        check_writable(output)
    translator = Translator.load(run, **decoding)
    pairs = read_split(dataclasses.replace(translator.config.data, test=stem), "test")
    assert pairs is not None  # the stem has a name
    rows = zip(pairs.source, pairs.target, strict=True)
    gold = [_gold_tree(words, tree, f"{pairs.origin}, line {number}") for number, (words, tree) in enumerate(rows, 1)]
    reads = [
        delinearize(parse.split(), _words(tree), [leaf.label for leaf in tree.leaves()])
        for parse, tree in zip(translator.translate(list(pairs.source)), gold, strict=True)
    ]
    if output is not None:
        write_atomically(output, "".join(f"{read.tree}\n" for read in reads))
    scores = score_brackets(zip(gold, (read.tree for read in reads), strict=True))
    states = Counter(read.state for read in reads)
    return {
        "run": str(run),
        "checkpoint": translator.config.decoding.checkpoint,
        "split": stem,
        **dataclasses.asdict(scores),
        **{state: states[state] for state in ("whole", "repaired", "failed")},
    }


def render(result: Mapping[str, object]) -> str:
    """Return a result of `score` as text. The last line is, for example, `F1 88.12`."""
    return (
        "{run}, checkpoint {checkpoint}, {split}\n"
        "{num_sentences} parses: {whole} whole trees, {repaired} repaired, {failed} failed; {complete_match:.2f} % "
        "equal the gold tree\n"
        "precision {precision:.2f}, recall {recall:.2f} (EVALB: labeled brackets, without punctuation and the root, "
        "ADVP = PRT)\n"
        "F1 {f1:.2f}"
    ).format_map(result)


def _words(tree: Tree) -> list[str]:
    return [leaf.word for leaf in tree.leaves()]


def _gold_tree(words: str, tree: str, where: str) -> Tree:
    gold = delinearize(tree.split(), words.split()).tree
    if linearize(gold) != tree.split():
        raise UserError(
            f"{where}: not a tree over the words of its sentence; `transformer-jax parsing prepare` makes both"
        )
    return gold
