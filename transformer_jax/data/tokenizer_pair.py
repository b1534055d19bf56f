"""The two tokenizers of a model, which are one if the vocabulary is joint: training, saving, checking."""

import base64
import itertools
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.subword import SentencePieceTokenizer, SubwordTokenizer
from transformer_jax.data.tokenizer import BytePairTokenizer, Kind, Tokenizer, WordTokenizer, train_tokenizer
from transformer_jax.runtime.files import atomic_dir, read_text
from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, UNK_ID, UserError


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of source and target; the same object if the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    def is_like(self, other: "TokenizerPair") -> bool:
        """Whether both sides give the same ids as the other's."""
        mine, others = ((pair.source.to_json(), pair.target.to_json()) for pair in (self, other))
        return mine == others

    def check_fits(self, model: ModelConfig) -> None:
        """Raises UserError unless every id has a row in the model's tables and the special ids are the model's."""
        for side, tokenizer, field, rows in (
            (
                "source",
                self.source,
                "source_vocab_size" if model.source_vocab_size else "vocab_size",
                model.source_rows,
            ),
            ("target", self.target, "vocab_size", model.vocab_size),
        ):
            if tokenizer.vocab_size > rows:
                raise UserError(
                    f"the {side} tokenizer has {tokenizer.vocab_size} entries and the model's table {rows} rows: "
                    f"set model.{field} to at least {tokenizer.vocab_size}, or use the tokenizer of this model"
                )
            for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
                if getattr(tokenizer, name) not in (getattr(model, name), None):
                    raise UserError(
                        f"model.{name} is {getattr(model, name)}, but the {side} tokenizer's is "
                        f"{getattr(tokenizer, name)}: set model.{name} to that, or use the tokenizer of this model"
                    )

    def save(self, directory: Path) -> None:
        """Writes `joint.json`, or `source.json` and `target.json`. The folder appears whole or not at all."""
        files = {"joint": self.source} if self.joint else {"source": self.source, "target": self.target}
        with atomic_dir(directory, replace=True) as unfinished:
            for name, tokenizer in files.items():
                (unfinished / f"{name}.json").write_text(tokenizer.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "TokenizerPair":
        """The reverse of `save`.

        Raises:
            UserError: the folder or a file of it is missing or is no tokenizer.
        """
        if (directory / "joint.json").is_file():
            joint = _load(directory / "joint.json")
            return cls(joint, joint)
        return cls(_load(directory / "source.json"), _load(directory / "target.json"))


def train_tokenizers(config: Config, train: Pairs) -> TokenizerPair:
    """The tokenizers of a run, trained on the training split.

    Raises:
        UserError: a vocabulary size too small for the kind of tokenizer.
    """
    kind, least = config.tokenizer.kind, config.tokenizer.min_frequency
    if config.tokenizer.joint:
        texts = itertools.chain(train.source, train.target)
        joint = train_tokenizer(kind, texts, config.model.vocab_size, least)
        return TokenizerPair(joint, joint)
    return TokenizerPair(
        train_tokenizer(kind, train.source, config.model.source_rows, least),
        train_tokenizer(kind, train.target, config.model.vocab_size, least),
    )


def _load(path: Path) -> Tokenizer:
    return tokenizer_from_json(read_text(path), str(path))


def tokenizer_from_json(text: str, origin: str) -> Tokenizer:
    """The reverse of `Tokenizer.to_json`.

    Raises:
        UserError: the text is something else; `origin` is named.
    """
    try:
        tree = json.loads(text)
        if tree["kind"] == "bpe":
            return BytePairTokenizer(tree["library"])
        if tree["kind"] in ("word", "pretokenized", "presegmented"):  # presegmented: the name in runs of format 1
            kind: Literal["word", "pretokenized"] = "word" if tree["kind"] == "word" else "pretokenized"
            return WordTokenizer(kind, *_words_and_special(tree))
        if tree["kind"] == "subword_nmt":
            return SubwordTokenizer(tree["merges"], *_words_and_special(tree))
        if tree["kind"] == "sentencepiece":
            model = base64.b64decode(tree["model"], validate=True)
            clean_up = tree.get("clean_up", False)
            return SentencePieceTokenizer(model, tree["vocabulary"], tuple(tree["special"]), clean_up)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    except Exception as error:  # the Rust library raises plain Exception
        raise UserError(f"{origin}: not a tokenizer: {type(error).__name__}: {error}") from error
    legal = ", ".join(typing.get_args(Kind))
    raise UserError(f"{origin}: unknown kind {tree['kind']!r}; legal: {legal}")


def _words_and_special(tree: dict[str, Any]) -> tuple[list[str], tuple[int, int, int, int | None]]:
    words, special = tree["vocabulary"], tuple(tree.get("special", [PAD_ID, BOS_ID, EOS_ID, UNK_ID]))
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("the vocabulary is no list of text")
    pad_id, bos_id, eos_id, unk_id = special
    if not all(type(i) is int for i in (pad_id, bos_id, eos_id)) or type(unk_id) not in (int, type(None)):
        raise ValueError(f"the special ids are {special}; four whole numbers are needed, the last may be null")
    return words, (pad_id, bos_id, eos_id, unk_id)
