"""Fuzz `translate`: each input line gives one output line, the same in a batch as alone."""

import importlib.util
import io
import re
import sys
import types
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from garbage import PIECES, lines

from transformer_jax import cli
from transformer_jax.config import Config, DecodingConfig, ModelConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.decoding import translator as module
from transformer_jax.decoding.search import SearchResult
from transformer_jax.decoding.translator import Hypothesis, Translator
from transformer_jax.model.transformer import Transformer


@pytest.fixture(scope="module")
def translator():
    """Return a translator with byte pairs and random parameters that are large enough for translations to differ."""
    model = ModelConfig(vocab_size=300, d_model=16, num_layers=1, num_heads=2, d_ff=32)
    config = Config(model=model, decoding=DecodingConfig(beam_size=1, max_length_offset=4, max_source=30))
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(Transformer(model).init)(jax.random.key(0), tokens, tokens)["params"]
    params = jax.tree.map(lambda leaf: leaf * 3, params)
    return Translator(config, params, train_tokenizers(config, Pairs(list(PIECES), list(PIECES), "pieces")))


@pytest.fixture
def translate(translator, monkeypatch):
    """Return `translate(b"...")`, which returns the bytes that the command writes and its text on stderr."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(Translator, "load", lambda *_, **__: translator)

    def call(stdin):
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        for name, stream in (
            ("stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False)),
            ("stdout", out),
            ("stderr", err),
        ):
            monkeypatch.setattr(sys, name, stream)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            status = cli.main(["translate", "run"])
        assert status == 0, err.getvalue()
        return out.buffer.getvalue(), err.getvalue()

    return call


class Serial:
    """A pool without threads."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    map = staticmethod(map)


@pytest.fixture(scope="module")
def plain():
    """Import the translator's module again without shape checks, so that ten thousand calls are fast."""
    spec = importlib.util.spec_from_file_location("plain_translator", module.__file__)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    plain.ThreadPoolExecutor = Serial
    return plain


@pytest.fixture
def said_back(monkeypatch, plain):
    """Replace the search by one that returns the source's ids in reverse order."""

    def search(prepared, src, spec, **_):
        tokens = np.zeros((len(src), 1, spec.max_length), np.int32)
        for row, (ids, limit) in enumerate(zip(np.asarray(src), np.asarray(spec.max_lengths), strict=True)):
            back = ids[ids > 3][::-1][: int(limit)]
            tokens[row, 0, : len(back)] = back
        counts = (tokens > 0).sum(2).astype(np.int32)
        return SearchResult(tokens, np.zeros(counts.shape, np.float32), counts, np.zeros(counts.shape, np.float32))

    for one in (module, plain):
        monkeypatch.setattr(one, "search", search)


def test_ten_thousand_lines_equal_each_line_alone(translate, translator, plain, said_back):
    found, alone = lines(10_000), plain.Translator(translator.config, translator.params, translator.tokenizers)
    out, err = translate(b"\n".join(found))
    assert out.count(b"\n") == 10_000
    together = out.decode("utf-8").split("\n")[:-1]
    assert len(set(together)) > 5_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about truncated lines
        for number, (line, expected) in enumerate(zip(found, together, strict=True), 1):
            text = line.decode("utf-8", "replace").removesuffix("\r")
            text = text.removeprefix("\ufeff") if number == 1 else text
            assert alone.translate([text]) == [expected], number
    broken = {int(number) for number in re.findall(r"line (\d+) is not UTF-8", err)}
    assert broken == {n for n, line in enumerate(found, 1) if "\ufffd" in line.decode("utf-8", "replace")}
    cut = {int(number) for number in re.findall(r"line (\d+) has \d+ tokens; it is truncated to 29 tokens", err)}
    texts = [line.decode("utf-8", "replace").removesuffix("\r") for line in found]
    lengths = [len(ids) for ids in translator.tokenizers.source.encode(texts)]
    assert cut == {n for n, length in enumerate(lengths, 1) if length > 29 and texts[n - 1].strip()}
    assert cut


def test_hundreds_of_lines_through_the_model_equal_each_line_alone(translate, translator):
    found = [line[:12] for line in lines(300, seed=1, longest=5)]
    out, _ = translate(b"\n".join(found) + b"\n")
    together = out.decode("utf-8").split("\n")[:-1]
    assert len(together) == 300
    assert len(set(together)) > 100, "a model that gives the same translation for every line would prove nothing"
    for line, expected in zip(found, together, strict=True):
        assert translator.translate([line.decode("utf-8", "replace").removesuffix("\r")]) == [expected]
        assert line.decode("utf-8", "replace").strip() or expected == ""


@pytest.mark.parametrize(
    ("stdin", "count"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"\n\n", 2),
        (b"a", 1),
        (b"a\n\nb", 3),
        (b"\xef\xbb\xbf", 0),
        (b"\xef\xbb\xbf\n", 1),
        ("a\u2028b\u2029c\x85d\ve\ff\x1cg".encode(), 1),
        (b"a\rb\r\nc\r\n", 2),
        (b"\0\n\0", 2),
        (b"\xff\n\xfe\n", 2),
    ],
)
def test_output_lines_equal_input_newlines(translate, said_back, stdin, count):
    assert translate(stdin)[0].count(b"\n") == count


def test_megabyte_lines_are_truncated_and_kept(translate, said_back):
    out, err = translate(b"a\n" + b"dog " * 250_000 + b"\nb\n" + "\u0301".encode() * 500_000 + b"\n" + b" " * 10**6)
    assert out.count(b"\n") == 5
    assert out.split(b"\n")[4] == b""
    warning = r"line (\d+) has \d+ tokens; it is truncated to 29 tokens \(decoding.max_source\)"
    assert [int(n) for n in re.findall(warning, err)] == [2, 4]


def test_line_ends_in_a_translation_become_spaces(translator, said_back):
    """Check that newline and carriage return become spaces, and that other line separators stay."""
    assert translator.translate(["c\nb\ra", "a\v\f\x1cb"]) == ["a b c", "b\x1c\f\va"]


def test_half_surrogate_pair_is_read_as_replacement_character(translator, said_back):
    for text in ("\ud800", "a\udfffb", "\udc80"):
        expected = re.sub("[\ud800-\udfff]", "\ufffd", text)
        assert translator.translate([text]) == translator.translate([expected])
    assert translator.translate(["\ud83c\udf89"]) == translator.translate(["🎉"]), (
        "both halves together are one character"
    )


def test_translation_with_half_surrogate_pair_is_written(monkeypatch, translate):
    found = [[Hypothesis(text, 0.0, 0.0, 1)] for text in ("\ud800", "b")]
    fake = types.SimpleNamespace(translate_n_best=lambda *_, **__: found)
    monkeypatch.setattr(Translator, "load", lambda *_, **__: fake)
    assert translate(b"a\nb\n")[0] == b"?\nb\n"
