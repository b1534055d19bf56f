"""fairseq's `dict.LANGUAGE.txt`: a piece and its count in each line; four special tokens stand before them."""

from pathlib import Path

from transformer_jax.data.subword import SubwordTokenizer, read_codes
from transformer_jax.data.tokenizer import Tokenizer, WordTokenizer
from transformer_jax.types import UserError

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
SPECIAL_IDS = (1, 0, 2, 3)  # of PAD, BOS, EOS, UNK


def read_dictionary(path: Path, codes: Path | None = None) -> Tokenizer:
    """The tokenizer of a dictionary: for text that is cut into pieces already, or with `codes` for text that is not.

    Raises:
        UserError: no such file, or a line that is not a piece and its count.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a dictionary: {error}") from error
    vocabulary = list(SPECIAL_TOKENS)
    known = set(SPECIAL_TOKENS)
    for number, line in enumerate(lines, 1):
        overwrites = line.endswith(" #fairseq:overwrite")
        line = line.removesuffix(" #fairseq:overwrite")
        piece, separator, count = line.rpartition(" ")
        if not separator or not count.isdecimal():
            raise UserError(f"{path}, line {number}: {line!r} is not a piece and its count")
        if piece in known and not overwrites:
            raise UserError(f"{path}, line {number}: {piece!r} is there already, and nothing says that it overwrites")
        known.add(piece)
        vocabulary.append(piece)
    if codes is None:
        return WordTokenizer("pretokenized", vocabulary, SPECIAL_IDS)
    return SubwordTokenizer(read_codes(codes), vocabulary, SPECIAL_IDS)
