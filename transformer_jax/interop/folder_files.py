"""What the folders of Marian and CTranslate2 have in common: JSON, and vocabularies in which each piece is one name."""

import json
from pathlib import Path
from typing import Any

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import UserError

OWN_TOKENIZER = "tokenizer"
"""Where an exported folder keeps the tokenizers as a run has them; other software does not look there."""
SPECIAL = ("pad", "bos", "eos", "unk")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: no such file, or something else in it.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a JSON object is needed, not {type(tree).__name__}")
    return tree


def write_json(path: Path, tree: Any) -> None:
    """Writes a file that people may read too."""
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """The piece of each id. A special token whose name is also a word of the text gets another name."""
    words = tokenizer.tokens(range(tokenizer.vocab_size))
    for name in SPECIAL:
        i = getattr(tokenizer, f"{name}_id")
        while i is not None and i < len(words) and words.count(words[i]) > 1:
            words[i] = f"{words[i][:-1]}_>"
    return words
