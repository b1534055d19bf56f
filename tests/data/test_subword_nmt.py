"""Compare byte pairs with subword-nmt."""

import io

import pytest

from transformer_jax.data.subword import SubwordTokenizer, read_codes
from transformer_jax.data.tokenizer_pair import tokenizer_from_json
from transformer_jax.types import UserError

TEXT = """the lower lowest newer newest wider widest rivers flow slower where the willows grow
a flower grows slowly below the tower and the tower throws its shadow over the lower meadow"""
SPECIAL = (1, 0, 2, 3)


@pytest.fixture(scope="module")
def codes(optional_package):
    learn = optional_package("subword_nmt.learn_bpe")
    out = io.StringIO()
    learn.learn_bpe(io.StringIO(TEXT), out, 40)
    return out.getvalue()


def test_pieces_equal_subword_nmt(codes, tmp_path, optional_package):
    theirs = optional_package("subword_nmt.apply_bpe").BPE(io.StringIO(codes))
    (tmp_path / "codes").write_text(codes)
    merges = read_codes(tmp_path / "codes")
    other = "unknown words, slowest flowers; ö\u0301 llll xx lololow"
    lines = [*TEXT.split("\n"), other]
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *sorted({p for t in lines for p in theirs.process_line(t).split()})]
    ours = SubwordTokenizer(merges, vocabulary, SPECIAL)
    for line in lines:
        (ids,) = ours.encode([line])
        assert " ".join(ours.tokens(ids)) == theirs.process_line(line)
        assert ours.decode([ids]) == [line]
    assert ours.plain(" the  tower ") == "the tower"


def test_json_round_trip(codes, tmp_path):
    (tmp_path / "codes").write_text(codes)
    ours = SubwordTokenizer(read_codes(tmp_path / "codes"), ["<s>", "<pad>", "</s>", "<unk>", "lo@@", "w"], SPECIAL)
    back = tokenizer_from_json(ours.to_json(), "x")
    assert back.encode(["low zz"]) == ours.encode(["low zz"])
    assert (back.pad_id, back.bos_id, back.eos_id, back.unk_id) == SPECIAL
    assert back.to_json() == ours.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#version: 0.1\na b\n", "line 1: codes of version 0.1"),
        ("#version: 0.2\na b\nabc\n", r"line 3: 'abc' is not a pair"),
        ("a b 3\nc d 2\n", "no piece ends with </w>"),
    ],
)
def test_invalid_codes_files_are_rejected(text, message, tmp_path):
    (tmp_path / "codes").write_text(text)
    with pytest.raises(UserError, match=message):
        read_codes(tmp_path / "codes")
