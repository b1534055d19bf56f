"""The tokenizer files of a Hugging Face Marian folder.

A SentencePiece pair is `source.spm`, `target.spm` and `vocab.json`. Other tokenizers become a `tokenizer.json` of the
library `tokenizers`, and this package's own files in the subfolder `tokenizer/`, which it reads.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.config import ModelConfig
from transformer_jax.data.subword import SentencePieceTokenizer
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import OWN_TOKENIZER, SPECIAL, unique_tokens, write_json
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_json
from transformer_jax.types import UserError

_CANNOT = "marian cannot express this model:"
# White space of str.split().
_WHITE_SPACE = (
    r"\x{09}-\x{0d}\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
)


def read_tokenizers(folder: Path, pad_id: int, bos_id: int, eos_id: int) -> TokenizerPair:
    """Read the tokenizers of a Marian folder, whose model has the given special ids."""
    if (folder / OWN_TOKENIZER).is_dir():
        return TokenizerPair.load(folder / OWN_TOKENIZER)
    missing = [name for name in ("source.spm", "target.spm", "vocab.json") if not (folder / name).is_file()]
    require(not missing, f"{folder}: {', '.join(missing)} missing, which a Marian folder's tokenizers need")
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    options = settings.get("sp_model_kwargs")
    require(not options, f"{settings_file}: sp_model_kwargs is {options!r}, which is not supported")
    clean_up = bool(settings.get("clean_up_tokenization_spaces"))
    unknown = settings.get("unk_token") or "<unk>"
    names = {"source": "vocab.json", "target": "vocab.json"}
    if settings.get("separate_vocabs"):
        names["target"] = "target_vocab.json"
    pair = []
    for side, name in names.items():
        vocabulary = read_json(folder / name)
        # transformers writes added tokens as objects.
        token = unknown.get("content") if isinstance(unknown, dict) else unknown
        if not isinstance(token, str) or token not in vocabulary:
            raise UserError(f"{folder / name} has no {token!r}, the token for unknown words")
        for what, wanted in (("</s>", eos_id), ("<pad>", pad_id)):
            if vocabulary.get(what, wanted) != wanted:
                raise UserError(f"{folder / name}: {what} is {vocabulary[what]!r}, but {wanted} in config.json")
        special = (pad_id, bos_id, eos_id, vocabulary[token])
        try:
            model = (folder / f"{side}.spm").read_bytes()
            pair.append(SentencePieceTokenizer(model, vocabulary, special, clean_up))
        except UserError as error:
            raise UserError(f"{folder}: {side}.spm with {name}: {error}") from error
    return TokenizerPair(*pair)


def write_tokenizers(folder: Path, pair: TokenizerPair, model: ModelConfig) -> None:
    """Write files that `AutoTokenizer` loads."""
    source, target = pair.source, pair.target
    settings: dict[str, object] = {"model_max_length": model.max_length, "clean_up_tokenization_spaces": False}
    if isinstance(source, SentencePieceTokenizer) and isinstance(target, SentencePieceTokenizer):
        require(model.source_eos, f"{_CANNOT} model.source_eos=False, but MarianTokenizer adds EOS")
        separate = source.vocabulary != target.vocabulary
        (folder / "source.spm").write_bytes(source.model)
        (folder / "target.spm").write_bytes(target.model)
        write_json(folder / "vocab.json", source.vocabulary)
        if separate:
            write_json(folder / "target_vocab.json", target.vocabulary)
        names = {f"{n}_token": source.tokens([getattr(source, f"{n}_id")])[0] for n in ("pad", "eos", "unk")}
        settings |= {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate, **names}
        settings["clean_up_tokenization_spaces"] = target.clean_up
    else:
        problem = "a Marian folder has one vocabulary for both sides unless it is a SentencePiece pair"
        require(pair.joint, f"{_CANNOT} tokenizer.joint=False, but {problem}")
        words = unique_tokens(source)
        special = {n: i for n in SPECIAL if (i := getattr(source, f"{n}_id")) is not None}
        write_json(folder / "tokenizer.json", _library_json(source, words, model))
        pair.save(folder / OWN_TOKENIZER)
        # A special token's spelling in the text is ordinary text.
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
        settings |= {f"{name}_token": words[i] for name, i in special.items()}
    write_json(folder / "tokenizer_config.json", settings)


def _library_json(tokenizer: Tokenizer, words: Sequence[str], model: ModelConfig) -> dict[str, object]:
    """Return the content of `tokenizer.json`, which appends EOS to the text if `model.source_eos` is set."""
    tree: dict[str, object] = {"version": "1.0"}
    tree |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    if tokenizer.kind == "bpe":
        tree |= json.loads(tokenizer.to_json())["library"]
    elif tokenizer.kind in ("word", "pretokenized"):
        tree |= _word_level(tokenizer, words)
    else:
        raise UserError(f"{_CANNOT} tokenizer.kind={tokenizer.kind!r} has no equivalent there")
    special = {i: words[i] for name in SPECIAL if (i := getattr(tokenizer, f"{name}_id")) is not None}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tree["added_tokens"] = [{"id": i, "content": special[i], **flags} for i in sorted(special)]
    if model.source_eos:
        end = words[model.eos_id]
        text, mark = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [text, mark],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}, mark],
            "special_tokens": {end: {"id": end, "ids": [model.eos_id], "tokens": [end]}},
        }
    return tree


def _word_level(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, object]:
    if tokenizer.unk_id is None:
        raise UserError(f"{_CANNOT} the vocabulary has no token for unknown words (unk_id)")
    space = _WHITE_SPACE if tokenizer.kind == "word" else " "
    unknown = words[tokenizer.unk_id]
    # A word that is spelled like a special token must become the unknown token, not the special token.
    special = "|".join(_quoted(words[i]) for i in {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id})
    tree: dict[str, object] = {
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": unknown},
        "normalizer": {
            "type": "Replace",
            "pattern": {"Regex": f"(?<![^{space}])(?:{special})(?![^{space}])"},
            "content": unknown,
        },
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": f"[{space}]+"}, "behavior": "Removed", "invert": False},
    }
    if tokenizer.kind == "pretokenized":
        # Join the pieces with spaces (none begins with the "prefix"), then remove the joints.
        joined = {"type": "WordPiece", "prefix": " ", "cleanup": False}
        joints = {"type": "Replace", "pattern": {"Regex": "@@( |$)"}, "content": ""}
        tree["decoder"] = {"type": "Sequence", "decoders": [joined, {"type": "Fuse"}, joints]}
    return tree


def _quoted(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)
