"""The tokenizers of a model's two sides: training, files, and checks against the model."""

import base64
import functools
import itertools
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        """Check that special ids agree, and that every id of the tokenizers has a row in the model's tables."""
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
        """Read a folder that `save` wrote, or one tokenizer file for both sides."""
        joint_file = path if path.is_file() else path / "joint.json"
        if joint_file.is_file():
            joint = read_tokenizer(joint_file)
            return cls(joint, joint)
        return cls(read_tokenizer(path / "source.json"), read_tokenizer(path / "target.json"))


def train_tokenizers(config: Config, train: Pairs) -> TokenizerPair:
    """Train the tokenizers of a run on its training split."""
    settings, model = config.tokenizer, config.model
    train_side = functools.partial(train_tokenizer, settings.kind, min_frequency=settings.min_frequency)
    if settings.joint:
        joint = train_side(itertools.chain(train.source, train.target), model.vocab_size)
        return TokenizerPair(joint, joint)
    return TokenizerPair(train_side(train.source, model.source_rows), train_side(train.target, model.vocab_size))


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file that a run holds, or from a `tokenizer.json` of the library `tokenizers`."""
    return tokenizer_from_json(read_text(path), str(path))


def tokenizer_from_json(text: str, origin: str) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.to_json` or a file of the library `tokenizers` describes."""
    try:
        tree = json.loads(text)
        if not isinstance(tree, dict) or not ("kind" in tree or isinstance(tree.get("model"), dict)):
            raise ValueError("neither a tokenizer of a run, nor a tokenizer.json of the library tokenizers")
        match tree.get("kind"):
            case None:
                return HuggingFaceTokenizer(tree)
            case "huggingface":
                return HuggingFaceTokenizer(tree["library"], _special(tree))
            case "bpe":
                return BytePairTokenizer(tree["library"])
            case "word":
                return WordTokenizer("word", _words(tree), _special(tree))
            case "pretokenized" | "presegmented":  # presegmented: the name in runs of format 1
                return WordTokenizer("pretokenized", _words(tree), _special(tree))
            case "subword_nmt":
                return SubwordTokenizer(tree["merges"], _words(tree), _special(tree))
            case "sentencepiece":
                model, special = base64.b64decode(tree["model"], validate=True), tuple(tree["special"])
                return SentencePieceTokenizer(model, tree["vocabulary"], special, tree.get("clean_up", False))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    except Exception as error:  # the Rust library raises plain Exception
        raise UserError(f"{origin}: not a tokenizer: {type(error).__name__}: {error}") from error
    raise UserError(f"{origin}: unknown kind {tree['kind']!r}; legal: {', '.join(typing.get_args(Kind))}")


def _words(tree: Mapping[str, object]) -> list[str]:
    words = tree["vocabulary"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("the vocabulary is not a list of text")
    return words


def _special(tree: dict) -> SpecialIds:
    pad_id, bos_id, eos_id, unk_id = special = tree.get("special", (PAD_ID, BOS_ID, EOS_ID, UNK_ID))
    if not all(type(i) is int for i in (pad_id, bos_id, eos_id)) or type(unk_id) not in (int, type(None)):
        raise ValueError(f"the special ids are {special}; four integers are needed, of which the last may be null")
    return pad_id, bos_id, eos_id, unk_id
