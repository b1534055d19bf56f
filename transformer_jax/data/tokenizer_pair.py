"""The tokenizers of a model's two sides: training, files, and checks against the model."""

import base64
import itertools
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.subword import SentencePieceTokenizer, SubwordTokenizer
from transformer_jax.data.tokenizer import (
    BytePairTokenizer,
    HuggingFaceTokenizer,
    Kind,
    SpecialIds,
    Tokenizer,
    WordTokenizer,
    train_tokenizer,
)
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

    def check_fits(self, model: ModelConfig) -> None:
        """Check that every id of the tokenizers has a row in the model's tables.

        Raises:
            UserError: a vocabulary has more entries than the model's table has rows, or a special id differs.
        """
        source_field = "source_vocab_size" if model.source_vocab_size else "vocab_size"
        for side, tokenizer, field, rows in (
            ("source", self.source, source_field, model.source_rows),
            ("target", self.target, "vocab_size", model.vocab_size),
        ):
            for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
                if getattr(tokenizer, name) not in (getattr(model, name), None):
                    raise UserError(
                        f"model.{name} is {getattr(model, name)}, but the {side} tokenizer's is "
                        f"{getattr(tokenizer, name)}: set model.{name} to that, or use the tokenizer of this model"
                    )
            num_ids = max(tokenizer.vocab_size, 1 + (tokenizer.unk_id or 0))
            if num_ids > rows:
                raise UserError(
                    f"the {side} tokenizer has {num_ids} entries and the model's table {rows} rows: "
                    f"set model.{field} to at least {num_ids}, or use the tokenizer of this model"
                )

    def save(self, directory: Path) -> None:
        """Write `joint.json`, or `source.json` and `target.json`. An existing folder is replaced atomically."""
        files = {"joint": self.source} if self.joint else {"source": self.source, "target": self.target}
        with atomic_dir(directory, replace=True) as unfinished:
            for name, tokenizer in files.items():
                (unfinished / f"{name}.json").write_text(tokenizer.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "TokenizerPair":
        """Read the tokenizers of a run, or of another library.

        Args:
            path: a folder that `save` wrote; a folder with `source.json` and `target.json`, or with `joint.json`, in
                the format of the library `tokenizers`; or one such file for both sides.

        Raises:
            UserError: the folder or a file of it is missing or is not a tokenizer.
        """
        joint_file = path if path.is_file() else path / "joint.json"
        if joint_file.is_file():
            joint = read_tokenizer(joint_file)
            return cls(joint, joint)
        return cls(read_tokenizer(path / "source.json"), read_tokenizer(path / "target.json"))


def train_tokenizers(config: Config, train: Pairs) -> TokenizerPair:
    """Train the tokenizers of a run on its training split.

    Raises:
        UserError: a vocabulary size is too small for the kind of tokenizer.
    """
    kind, min_frequency = config.tokenizer.kind, config.tokenizer.min_frequency
    if config.tokenizer.joint:
        texts = itertools.chain(train.source, train.target)
        joint = train_tokenizer(kind, texts, config.model.vocab_size, min_frequency)
        return TokenizerPair(joint, joint)
    return TokenizerPair(
        train_tokenizer(kind, train.source, config.model.source_rows, min_frequency),
        train_tokenizer(kind, train.target, config.model.vocab_size, min_frequency),
    )


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file that a run holds, or from a `tokenizer.json` of the library `tokenizers`.

    Raises:
        UserError: the file is missing or is not a tokenizer, or its special tokens have no usual names.
    """
    return tokenizer_from_json(read_text(path), str(path))


def tokenizer_from_json(text: str, origin: str) -> Tokenizer:
    """Return the tokenizer that JSON text describes: the reverse of `Tokenizer.to_json`.

    The text may also be a `tokenizer.json` of the library `tokenizers`.

    Args:
        text: the JSON.
        origin: name of the file, for errors.

    Raises:
        UserError: the text is not a tokenizer.
    """
    try:
        tree = json.loads(text)
        kind = tree["kind"] if "kind" in tree else _foreign_kind(tree)
        match kind:
            case "bpe":
                return BytePairTokenizer(tree["library"])
            case "word":
                return WordTokenizer("word", _words(tree), _special(tree))
            case "pretokenized" | "presegmented":  # presegmented: the name in runs of format 1
                return WordTokenizer("pretokenized", _words(tree), _special(tree))
            case "subword_nmt":
                return SubwordTokenizer(tree["merges"], _words(tree), _special(tree))
            case "sentencepiece":
                model = base64.b64decode(tree["model"], validate=True)
                clean_up = tree.get("clean_up", False)
                return SentencePieceTokenizer(model, tree["vocabulary"], tuple(tree["special"]), clean_up)
            case "huggingface" if "library" in tree:
                return HuggingFaceTokenizer(tree["library"], _special(tree))
            case "huggingface":
                return HuggingFaceTokenizer(tree)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    except Exception as error:  # the Rust library raises plain Exception
        raise UserError(f"{origin}: not a tokenizer: {type(error).__name__}: {error}") from error
    raise UserError(f"{origin}: unknown kind {kind!r}; legal: {', '.join(typing.get_args(Kind))}")


def _foreign_kind(tree: dict[str, Any]) -> Kind:
    if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
        return "huggingface"
    raise ValueError("neither a tokenizer of a run, nor a tokenizer.json of the library tokenizers")


def _words(tree: dict[str, Any]) -> list[str]:
    words = tree["vocabulary"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("the vocabulary is not a list of text")
    return words


def _special(tree: dict[str, Any]) -> SpecialIds:
    special = tuple(tree.get("special", [PAD_ID, BOS_ID, EOS_ID, UNK_ID]))
    pad_id, bos_id, eos_id, unk_id = special
    if not all(type(i) is int for i in (pad_id, bos_id, eos_id)) or type(unk_id) not in (int, type(None)):
        raise ValueError(f"the special ids are {special}; four integers are needed, of which the last may be null")
    return pad_id, bos_id, eos_id, unk_id
