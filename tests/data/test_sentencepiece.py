"""Compare SentencePiece tokenizers with transformers' MarianTokenizer; no text gives a special id."""

import io
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import ModelConfig
from transformer_jax.data.subword import SentencePieceTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair, tokenizer_from_json
from transformer_jax.types import UserError

TEXTS = ["the cat sat on the mat", "A dog runs in the park, quickly!", "the parks of the cats", "no. 42 (ﬁne)"] * 5
OTHER = ["die Katze saß auf der Matte", "Ein Hund läuft durch den Park."] * 8
# No line contains the name of a special token: transformers would return its id, and this package does not.
LINES = [
    *TEXTS,
    "",
    " ",
    "  two   spaces ",
    "unseen: ж ∞ 漢字",
    ">>deu<< the cat",
    ">>deu<<",
    ">>xyz<< the cat",
    ">> the << cat",
    "the >>deu<< cat",
    "\uff46\uff55\uff4c\uff4c\u00a0width e\u0301",
    "tab\tand ▁ underline",
]


@pytest.fixture(scope="module")
def models(optional_package):
    sentencepiece = optional_package("sentencepiece")

    def train(texts):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=70,
            hard_vocab_limit=False,
            minloglevel=3,
        )
        return model.getvalue()

    return train(TEXTS), train(OTHER)


@pytest.fixture(scope="module")
def vocabulary(models):
    import sentencepiece

    pieces = set()
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces |= {processor.id_to_piece(i) for i in range(3, processor.get_piece_size())}
    # A piece that the model knows and the vocabulary does not.
    pieces.discard("▁the")
    return {piece: i for i, piece in enumerate(["</s>", "<unk>", ">>deu<<", *sorted(pieces), "<pad>"])}


@pytest.fixture(scope="module")
def tokenizer(models, vocabulary):
    return SentencePieceTokenizer(models[0], vocabulary, (vocabulary["<pad>"], 0, 0, 1))


@pytest.fixture(scope="module")
def marian(models, vocabulary, tmp_path_factory, optional_package):
    transformers = optional_package("transformers")
    optional_package("sacremoses")
    folder = tmp_path_factory.mktemp("marian")
    for name, model in zip(("source", "target"), models, strict=True):
        (folder / f"{name}.spm").write_bytes(model)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return transformers.MarianTokenizer(
        str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json")
    )


def test_source_ids_equal_transformers(tokenizer, marian):
    expected = [ids[:-1] for ids in marian(LINES).input_ids]  # without EOS
    assert tokenizer.encode(LINES) == expected
    assert tokenizer.encode([">>deu<< the cat"])[0][0] == 2
    assert tokenizer.encode([">>xyz<<"]) == [[1]]
    assert any(1 in row for row in expected)


def test_target_ids_equal_transformers(models, vocabulary, marian):
    target = SentencePieceTokenizer(models[1], vocabulary, (vocabulary["<pad>"], 0, 0, 1))
    assert target.encode(OTHER) == [ids[:-1] for ids in marian(text_target=OTHER).input_ids]


def test_decoded_text_equals_transformers(tokenizer, marian, vocabulary):
    pad = vocabulary["<pad>"]
    rows = [
        *tokenizer.encode(LINES),
        [],
        [0],
        [pad, 5, 0, 6, 1, 7, pad, pad],
        [1, 1],
        [2, 8, 9],
        *[[i] for i in range(pad)],
    ]
    assert tokenizer.decode(rows) == [marian.decode(row, skip_special_tokens=True) for row in rows]
    assert tokenizer.decode(tokenizer.encode(["a dog runs in  parks"])) == ["a dog runs in parks"]


def test_clean_up_equals_transformers(marian, models, vocabulary):
    """Check that spaces before punctuation are removed in the same order as by transformers."""
    special = (vocabulary["<pad>"], 0, 0, 1)
    marks = [".", "?", "!", ",", "'", "n't", "'m", "'s", "'ve", "'re", "x"]
    extended = vocabulary | {f"▁{mark}": 500 + i for i, mark in enumerate(marks)}
    tokenizer = SentencePieceTokenizer(models[0], extended, special, clean_up=True)
    rows = [[510, *row, 510] for row in ([i] for i in range(500, 511))]
    rows += [[510, 500, 500, 504, 504, 510], [504, 507, 505, 510], [500]]
    plain = SentencePieceTokenizer(models[0], extended, special).decode(rows)
    assert tokenizer.decode(rows) == [marian.clean_up_tokenization(text) for text in plain]
    assert "x. x" not in plain[0]
    again = tokenizer_from_json(tokenizer.to_json(), "here")
    assert again.decode(rows) == tokenizer.decode(rows)


def test_ids_outside_the_vocabulary_give_no_text(tokenizer, vocabulary):
    ids = tokenizer.encode(["cats"])[0]
    assert tokenizer.decode([[5000, -1, *ids, 5000]]) == tokenizer.decode([ids])
    assert tokenizer.tokens([0, vocabulary["<pad>"], 5000]) == ["</s>", "<pad>", "<5000>"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["</s>", "<pad>", "<unk>", "<s>", " ", "the", ">>deu<<", "ж"]), max_size=6))
def test_no_text_gives_a_special_id(tokenizer, vocabulary, parts):
    assert not {0, vocabulary["<pad>"]} & set(tokenizer.encode(["".join(parts)])[0])


def test_sentencepiece_save_and_load(tokenizer, models, vocabulary, tmp_path):
    loaded = tokenizer_from_json(tokenizer.to_json(), "here")
    assert loaded.kind == "sentencepiece"
    assert loaded.model == models[0]
    assert loaded.encode(LINES) == tokenizer.encode(LINES)
    assert loaded.to_json() == tokenizer.to_json()
    target = SentencePieceTokenizer(models[1], vocabulary, (vocabulary["<pad>"], 0, 0, 1))
    pair = TokenizerPair(tokenizer, target)
    pair.save(tmp_path / "tokenizer")
    pair = TokenizerPair.load(tmp_path / "tokenizer")
    assert pair.target.encode(OTHER) == target.encode(OTHER)
    size = len(vocabulary)
    pair.check_fits(ModelConfig(vocab_size=size, pad_id=size - 1, bos_id=0, eos_id=0, unk_id=1))


class Executed:
    """An object whose pickle makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_damaged_sentencepiece_files_are_rejected(tokenizer, models, tmp_path):
    special = (3, 0, 0, 1)
    harmful = pickle.dumps(Executed(tmp_path / "made"))
    for model in (b"", b"abc", models[0][:100], harmful):
        with pytest.raises(UserError, match="not a SentencePiece model"):
            SentencePieceTokenizer(model, {"a": 0}, special)
    assert not (tmp_path / "made").exists()
    for vocabulary, message in (
        ({}, "ids must be numbers from 0"),
        ({"a": -1}, "ids must be numbers from 0; found {'a': -1}"),
        ({"a": "0"}, "ids must be numbers from 0"),
        ({"a": 0, "b": 0}, r"ids of other pieces: \['a'\]"),
    ):
        with pytest.raises(UserError, match=message):
            SentencePieceTokenizer(models[0], vocabulary, special)
    with pytest.raises(UserError, match="unk_id is None; it must be a number"):
        SentencePieceTokenizer(models[0], {"a": 0}, (3, 0, 0, None))
    tree = json.loads(tokenizer.to_json())
    for change in ({"model": "%%"}, {"model": "YWJj"}, {"vocabulary": []}, {"special": [0]}, {"vocabulary": None}):
        with pytest.raises(UserError, match=r"^joint\.json: "):
            tokenizer_from_json(json.dumps(tree | change), "joint.json")


def test_missing_library_names_the_extra(models, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'transformer-jax\[interop\]'"):
        SentencePieceTokenizer(models[0], {"a": 0}, (3, 0, 0, 1))
