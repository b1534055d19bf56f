"""Files of the library `tokenizers`, trained with the library, against the ids that it returns."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from transformer_jax.config import ModelConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair, read_tokenizer
from transformer_jax.types import UserError

TEXTS = ["The cat sat on the mat.", "Die Katze saß auf der Matte!", "a dog, two dogs"] * 3
UNSEEN = ["the CAT zq", "", "  two  spaces ", "\u05e9\u05dc", "a\nb"]
BRACKETS = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]


def word_level():
    """Return the tokenizer of the well-known teaching code on opus_books."""
    library = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=BRACKETS, min_frequency=2))
    return library


def word_piece():
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    library.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special))
    return library


def byte_pairs():
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    library.train_from_iterator(TEXTS, trainer)
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    library.enable_padding(pad_id=1, pad_token="<pad>", length=40)
    library.enable_truncation(3)
    return library


def unigram():
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    library.train_from_iterator(TEXTS, trainer)
    return library


LIBRARIES = {"WordLevel": word_level(), "WordPiece": word_piece(), "BPE": byte_pairs(), "Unigram": unigram()}
SPECIAL_IDS = {"WordLevel": (1, 2, 3, 0), "WordPiece": (0, 2, 3, 1), "BPE": (1, 0, 2, 3), "Unigram": (0, 0, 1, 2)}


@pytest.fixture(params=LIBRARIES)
def name(request):
    return request.param


@pytest.fixture
def file(tmp_path, name):
    LIBRARIES[name].save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_ids_and_text_equal_the_library(file, name):
    tokenizer, library = read_tokenizer(file), tokenizers.Tokenizer.from_file(str(file))
    library.no_padding()
    library.no_truncation()
    assert tokenizer.special_ids == SPECIAL_IDS[name]
    assert tokenizer.vocab_size == library.get_vocab_size()
    rows = tokenizer.encode([*TEXTS, *UNSEEN])
    assert rows == [library.encode(text, add_special_tokens=False).ids for text in [*TEXTS, *UNSEEN]]
    assert tokenizer.decode(rows) == [library.decode(row) for row in rows]
    eos = [tokenizer.eos_id, tokenizer.pad_id, -1, 10**6]
    assert tokenizer.decode([row + eos for row in rows]) == tokenizer.decode(rows)
    assert tokenizer.tokens(rows[0]) == library.encode(TEXTS[0], add_special_tokens=False).tokens


def test_special_tokens_in_text_are_text(file, name):
    tokenizer = read_tokenizer(file)
    special = tokenizer.tokens(tokenizer.special_ids[:3])
    rows = tokenizer.encode([f"the {token} cat{token}" for token in special])
    assert not set(tokenizer.special_ids[:3]) & {i for row in rows for i in row}


def test_special_word_between_spaces_is_unknown(tmp_path):
    library = word_level()
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode(["[EOS] [PAD] [SOS] [UNK]"]) == [[tokenizer.unk_id] * 4]


def test_run_folder_round_trip(file, tmp_path, name):
    pair = TokenizerPair.load(file)
    assert pair.joint
    pad_id, bos_id, eos_id, unk_id = SPECIAL_IDS[name]
    pair.check_fits(ModelConfig(500, pad_id=pad_id, bos_id=bos_id, eos_id=eos_id, unk_id=unk_id))
    pair.save(tmp_path / "run")
    again = TokenizerPair.load(tmp_path / "run")
    assert again == pair
    assert again.source.encode(UNSEEN) == pair.source.encode(UNSEEN)
    assert again.source.special_ids == pair.source.special_ids


def test_folder_with_a_file_for_each_side(tmp_path):
    LIBRARIES["WordLevel"].save(str(tmp_path / "source.json"))
    LIBRARIES["BPE"].save(str(tmp_path / "target.json"))
    pair = TokenizerPair.load(tmp_path)
    assert (pair.source.special_ids, pair.target.special_ids) == (SPECIAL_IDS["WordLevel"], SPECIAL_IDS["BPE"])
    assert pair != TokenizerPair(pair.target, pair.source)


def test_byte_level_pieces_are_shown_as_text(tmp_path):
    LIBRARIES["BPE"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    (row,) = tokenizer.encode([" the"])
    assert "".join(tokenizer.pieces([0, *row])) == "<s>\u2581the"


def test_missing_special_tokens_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    tree = json.loads(LIBRARIES["WordLevel"].to_str())
    path.write_text(json.dumps(tree).replace("[PAD]", "[FILL]"))
    with pytest.raises(UserError, match=r"tokenizer\.json: .*no PAD token under a usual name \(<pad>, .*'\[FILL\]'"):
        read_tokenizer(path)
    path.write_text(json.dumps(tree).replace("[EOS]", "[LAST]"))
    with pytest.raises(UserError, match=r"no EOS token under a usual name .*Rename the token"):
        read_tokenizer(path)


def test_unknown_word_without_unk_is_an_error(tmp_path):
    tree = json.loads(LIBRARIES["WordLevel"].to_str().replace("[UNK]", "[OTHER]"))
    tree["model"]["unk_token"] = "[ABSENT]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.unk_id is None
    with pytest.raises(UserError, match=r"cannot encode the text: .*UNK"):
        tokenizer.encode(["zebra"])


@pytest.mark.parametrize("content", ['{"model": {}}', '{"model": {"type": "BPE"}, "version": "9"}', "[]", '{"a": 1}'])
def test_damaged_file_is_rejected(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: (not a tokenizer|neither)"):
        read_tokenizer(tmp_path / "tokenizer.json")
