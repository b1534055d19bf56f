"""Fuzz corpora: every pair is read or counted as left out, or a `UserError` names the file and the line."""

import codecs
import gzip
import random

import numpy as np
import pytest
from garbage import PIECES, lines, texts
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples

from transformer_jax.config import Config, DataConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.batching import BatchPlan, choose_shapes, eval_batches, make_batch
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs, load_cached, load_or_encode
from transformer_jax.data.files import read_lines
from transformer_jax.data.packing import PackedPlan
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.evaluation.scoring import check_lengths
from transformer_jax.types import UserError

MODEL = ModelConfig(vocab_size=300, d_model=16, num_layers=1, num_heads=2, d_ff=32)
CONFIG = Config(model=MODEL, data=DataConfig(max_length=40, batch_tokens=200))


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(CONFIG, Pairs(list(PIECES), list(PIECES), "pieces"))


def data_config(folder, source, **changes):
    columns = {} if source == "text" else {"source_column": "a", "target_column": "b"}
    return DataConfig(source=source, directory=str(folder), **(columns | changes))


file_bytes = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(lines(200)), max_size=6).map(b"\n".join),
    st.lists(texts, max_size=5).map(lambda found: "\n".join(found).encode()),
    st.sampled_from(
        [b"", b"\n", codecs.BOM_UTF8, codecs.BOM_UTF16_LE + "a\n".encode("utf-16-le"), b"a\r\nb\r\n", b"\r"]
    ),
)


@examples(300)
@given(file_bytes)
def test_any_bytes_are_split_at_newlines_only(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    expected = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    try:
        expected = [line.decode("utf-8").removesuffix("\r") for line in expected]
    except UnicodeDecodeError:
        with pytest.raises(UserError, match=r"file, line \d+: not valid UTF-8"):
            read_lines(tmp_path / "file")
        return
    assert read_lines(tmp_path / "file") == expected


@examples(150)
@given(file_bytes, file_bytes)
@example(b"", b"")
@example(b"a\nb\n", b"a\n")
def test_any_parallel_files_load_or_name_the_file(tmp_path, source, target):
    (tmp_path / "train.en").write_bytes(source)
    (tmp_path / "train.de").write_bytes(target)
    try:
        pairs = read_split(data_config(tmp_path, "text"), "train")
    except UserError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  either outcome is right
        return
    assert len(pairs) == len(pairs.source) == len(pairs.target) == source.count(b"\n") + (not source.endswith(b"\n"))


cells = st.one_of(file_bytes, st.sampled_from([b"a\tb", b'{"a": "x", "b": "y"}', b'{"a": 1, "b": "\\ud800"}', b"[]"]))


@pytest.mark.parametrize("source", ["tsv", "jsonl"])
@examples(150)
@given(found=st.lists(cells, max_size=5), packed=st.booleans())
@example(found=[b"[" * 100_000], packed=False)
@example(found=[b'{"a": ' + b"9" * 5000 + b"}"], packed=False)
@example(found=[b'{"translation": {"a": "x\\u2028\\ny", "b": "z"}}'], packed=True)
def test_any_table_loads_or_names_the_file(tmp_path, source, found, packed):
    data = b"\n".join([b"a\tb", *found] if source == "tsv" else found)
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / f"train.{source}{'.gz' if packed else ''}").write_bytes(gzip.compress(data) if packed else data)
    try:
        pairs = read_split(data_config(tmp_path, source), "train")
    except UserError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  either outcome is right
        return
    assert not any("\n" in text for text in (*pairs.source, *pairs.target))


def content(batch):
    """Return the source and target ids of every pair in a batch, sorted."""
    rows = []
    for src, tgt in zip(batch.src, batch.tgt_out, strict=True):
        if tgt.any():
            rows.append(tuple(tuple(side[side != MODEL.pad_id].tolist()[:-1]) for side in (src, tgt)))
    return sorted(rows)


@examples(100)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=12))
@example([("", "")])
@example([("  \u2028", "a"), ("\v\f\x85", "\x1c")])
def test_every_pair_is_in_a_batch_or_in_the_filter_report(tokenizers, found):
    pairs = Pairs([source for source, _ in found], [target for _, target in found], "here")
    whole = encode_pairs(pairs, tokenizers, MODEL)
    ids = [
        tuple(map(tuple, sides)) for sides in zip(*map(tokenizers.source.encode, zip(*found, strict=True)), strict=True)
    ]
    shapes = choose_shapes(whole.source_lengths, whole.target_lengths, 200, 4)
    batches = eval_batches(whole, shapes, 200, MODEL)
    assert sorted(row for batch in batches for row in content(batch)) == sorted(ids)

    kept = [row for row, sides in zip(ids, found, strict=True) if all(side.strip() for side in sides)]
    kept = [row for row in kept if max(map(len, row)) < 40]
    kept = [row for row in kept if max(map(len, row)) + 1 <= 9 * (min(map(len, row)) + 1)]
    if not kept:
        with pytest.raises(UserError, match=r"here: no pair is left for training: \d+ pairs: 0 kept"):
            encode_pairs(pairs, tokenizers, MODEL, CONFIG.data)
        return
    encoded = encode_pairs(pairs, tokenizers, MODEL, CONFIG.data)
    assert encoded.report.kept == len(kept)
    lengths = encoded.source_lengths, encoded.target_lengths
    plan = BatchPlan(*lengths, choose_shapes(*lengths, 200, 2), 0)
    epoch = [make_batch(encoded, plan.rows(i), MODEL) for i in range(plan.batches_per_epoch)]
    assert sorted(row for batch in epoch for row in content(batch)) == sorted(kept)
    packed = PackedPlan(*lengths, 64, 200, 0)
    numbers = np.concatenate([packed.rows(i).pairs for i in range(packed.batches_per_epoch)])
    assert sorted(numbers.tolist()) == list(range(len(kept)))


@pytest.mark.parametrize("kind", ["bpe", "word", "pretokenized"])
def test_many_identical_lines_and_one_megabyte_line(kind):
    """Training leaves out and counts the long line. Evaluation leaves nothing out, so it names the line."""
    config = Config(model=MODEL, data=CONFIG.data, tokenizer=TokenizerConfig(kind=kind))
    # A word of a megabyte: the time to train byte pairs must not be quadratic in its length.
    long = "dog " * 250_000 if kind != "bpe" else "".join(random.Random(0).choices("abcdefgh", k=1_000_000))
    pairs = Pairs(["the red dog", *["a dog runs"] * 100_000, long], ["c", *["ein hund"] * 100_000, "z"], "here")
    tokenizers = train_tokenizers(config, pairs)
    encoded = encode_pairs(pairs, tokenizers, MODEL, config.data)
    assert str(encoded.report).startswith("100002 pairs: 100001 kept, 0 empty, 1 longer")
    lengths = encoded.source_lengths, encoded.target_lengths
    plan = BatchPlan(*lengths, choose_shapes(*lengths, 200, 4), 0)
    assert make_batch(encoded, plan.rows(0), MODEL).src.shape[0] > 0
    last = Pairs(pairs.source[-2:], pairs.target[-2:], "here")
    with pytest.raises(UserError, match=r"here, pair 2: \d+ tokens; .*Remove the pair"):
        check_lengths(encode_pairs(last, tokenizers, MODEL), last, MODEL)


@pytest.mark.parametrize("harm", ["emptied", "a flipped bit", "no list", "removed"])
def test_damaged_cache_is_rebuilt(tokenizers, tmp_path, harm):
    pairs = Pairs(["a dog", "dog"], ["a", "a"], "here")
    expected = load_or_encode(CONFIG, "train", tokenizers, tmp_path, pairs).sha256()
    (folder,) = tmp_path.iterdir()
    (tmp_path / ".train-x.1").mkdir()  # an unfinished folder of another process
    for file in sorted(folder.iterdir()):
        data = bytearray(file.read_bytes())
        if harm == "emptied":
            file.write_bytes(b"")
        elif harm == "removed":
            file.unlink()
        elif harm == "no list":
            file.write_bytes(b"[1]")
        elif file.suffix == ".npy":
            data[-1] ^= 1
            file.write_bytes(data)
        assert load_or_encode(CONFIG, "train", tokenizers, tmp_path, pairs).sha256() == expected
        assert load_cached(tmp_path, "train", expected, MODEL) is not None
