"""Moses' tokens, for scores of tokenised text: the only file that knows sacremoses."""

import re
from collections.abc import Sequence
from importlib.metadata import version

from sacremoses import MosesDetokenizer, MosesTokenizer

_QUOTES = str.maketrans("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a\u201b", '"' * 6 + "'" * 4)
VERSION = f"sacremoses {version('sacremoses')}"


def plain_quotes(text: str) -> str:
    """Typographic quotation marks and escaped ones as plain ones.

    >>> print(plain_quotes("&quot; \u201eso\u201c isn &apos;t"))
    " "so" isn 't
    """
    return text.translate(_QUOTES).replace("&quot;", '"').replace("&apos;", "'")


class Moses:
    """The tokenizer and the detokenizer of one language.

    >>> moses = Moses("en")
    >>> moses.tokenize(["It's a test, isn't it?"])
    ['It &apos;s a test , isn &apos;t it ?']
    >>> moses.detokenize(["It &apos;s a test , isn &apos;t it ?"])
    ["It's a test, isn't it?"]
    """

    def __init__(self, language: str) -> None:
        """Takes a two-letter code; of a language that Moses has no rules for, English's are used."""
        self._tokenizer, self._detokenizer = MosesTokenizer(language), MosesDetokenizer(language)

    def tokenize(self, texts: Sequence[str]) -> list[str]:
        """Tokens with spaces between them; `&`, quotes and brackets escaped, as the original script does."""
        return [self._tokenizer.tokenize(text, return_str=True) for text in texts]

    def detokenize(self, texts: Sequence[str]) -> list[str]:
        """The reverse, as well as it can be known."""
        return [self._detokenizer.detokenize(text.split()) for text in texts]


def split_compounds(text: str) -> str:
    """Hyphens between letters as tokens of their own, as in the scores of the paper's time.

    >>> split_compounds("rich-text format - that")
    'rich ##AT##-##AT## text format - that'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)
