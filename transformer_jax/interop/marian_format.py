"""Hugging Face's Marian folders, such as those of OPUS-MT, with their tokenizers.

Marian's position tables have all sines before all cosines. The paper's alternate. Both tables have equal columns in
another order, so permuting every d_model axis of the weights converts a model with one into a model with the other.

`generate` differs from this package's search twice. Padding is never generated here, and a hypothesis that reaches the
limit counts as it is, where `forced_eos_token_id` would replace its last token by EOS.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import Imported, ModelFields, Settings, warn_about_penalty, write_json
from transformer_jax.interop.fairseq_format import STACKS
from transformer_jax.interop.mapping import names
from transformer_jax.interop.marian_tokenizers import read_tokenizers, write_tokenizers
from transformer_jax.interop.tables import Format, Row, embeddings, flatten, from_foreign, to_foreign, unflatten
from transformer_jax.interop.tensor_files import read_tensors, write_safetensors
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_json
from transformer_jax.types import Params

MAX_LENGTH_OFFSET = 128
"""Largest `decoding.max_length_offset` of an imported model."""

_SHARED, _LOGITS_BIAS = "model.shared.weight", "final_logits_bias"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_WRITTEN_ONCE = {"all": (_SOURCE, _TARGET, _OUTPUT), "target": (_OUTPUT,), "none": ()}


def _without_shared(tensors: Mapping[str, np.ndarray], origin: str) -> dict[str, np.ndarray]:
    """Drop the shared embedding table if the source and the target have embedding tables of their own."""
    both = {_SOURCE, _TARGET} <= tensors.keys()
    return {name: tensor for name, tensor in tensors.items() if not (both and name == _SHARED)}


MARIAN = Format(
    "marian",
    rows=(
        # transformers writes the first of several names.
        Row((_SHARED,), ("embedding/table",)),
        *embeddings((_SOURCE, _SHARED), (_TARGET, _SHARED), (_OUTPUT,)),
        Row((_LOGITS_BIAS,), ("logits_bias",), leading=1),
        *names(STACKS, "model.{encoder,decoder}.layers.{i}"),
    ),
    ignored=("embed_positions.weight",),
    positions=("embed_positions.weight",),
    legal=lambda model: {
        "norm_position": ("post",),
        "final_norm": (False,),
        "norm_epsilon": (1e-5,),
        "norm_variant": ("standard",),
        "positions": ("interleaved", "halves"),
        "position_exponent": ("paper",),
        "position_offset": (0,),
        "decoder_start": ("bos", "eos", "pad"),
        "source_bos": (False,),
    },
    prepare=_without_shared,
)

# Settings that change the output, and their legal values. A setting without legal values must be absent or null.
# `static_position_embeddings` is not among them: MarianMTModel ignores it and always computes sinusoids.
_LEGAL: dict[str, tuple[object, ...]] = {
    "model_type": ("marian",),
    "is_encoder_decoder": (True,),
    "activation_function": ("relu", "gelu", "swish", "silu"),
    **dict.fromkeys(("is_decoder", "normalize_before", "normalize_embedding", "add_final_layer_norm"), (False,)),
    **dict.fromkeys(("force_bos_token_to_be_generated", "do_sample", "early_stopping"), (False,)),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("num_beam_groups", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("quantization_config", "exponential_decay_length_penalty", "watermarking_config"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_decoder_ids", "force_words_ids", "stop_strings"), ()),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "constraints"), ()),
}

# Settings that are a field of `ModelConfig`, with their type and default.
_FIELDS: dict[str, tuple[str, type[Any], Any]] = {
    "d_model": ("d_model", int, None),
    "dropout": ("residual_dropout", float, 0.1),
    "attention_dropout": ("attention_dropout", float, 0.0),
    "activation_dropout": ("activation_dropout", float, 0.0),
    "activation_function": ("activation", str, "gelu"),
    "scale_embedding": ("scale_embeddings", bool, False),
    "max_position_embeddings": ("max_length", int, 1024),
    "encoder_layers": ("num_layers", int, None),
    "encoder_attention_heads": ("num_heads", int, None),
    "encoder_ffn_dim": ("d_ff", int, None),
    "decoder_layers": ("decoder_num_layers", int, None),
    "decoder_attention_heads": ("decoder_num_heads", int, None),
    "decoder_ffn_dim": ("decoder_d_ff", int, None),
}


def read_marian(folder: Path) -> Imported:
    """Read a Marian folder, whose `generation_config.json` overrides settings of `config.json`.

    `generate` limits the output to `max_length` tokens. This package limits it to the number of source tokens plus
    `decoding.max_length_offset`, which becomes 128, or `max_length` if that is less.
    """
    require(folder.is_dir(), f"{folder}: no such folder")
    file, generation, tokenizer = (
        folder / f"{name}.json" for name in ("config", "generation_config", "tokenizer_config")
    )
    settings = Settings(
        (file, read_json(file)),
        (generation, read_json(generation) if generation.is_file() else {}),
        (tokenizer, {"separate_vocabs": read_json(tokenizer).get("separate_vocabs")} if tokenizer.is_file() else {}),
    )
    require(settings.get("model_type"), f"{file} has no model_type. A Marian folder has model_type 'marian'")
    settings.require(_LEGAL)
    pad_id, eos_id, start_id = (settings.read(f"{name}_token_id", int) for name in ("pad", "eos", "decoder_start"))
    start = {pad_id: "pad", eos_id: "eos"}.get(start_id, "bos")
    # A Marian model uses BOS only as the decoder's start.
    bos_id = start_id if start == "bos" else settings.read("bos_token_id", int, eos_id)
    pair = read_tokenizers(folder, pad_id, bos_id, eos_id)
    weights = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    require(weights, f"{folder} has neither model.safetensors nor pytorch_model.bin")
    tensors = read_tensors(weights[0])
    model = ModelConfig(
        **_model_fields(settings) | {"decoder_start": start},
        norm_epsilon=1e-5,
        attention_bias=True,
        positions="halves",
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=pad_id if pair.source.unk_id is None else pair.source.unk_id,
        logits_bias=_LOGITS_BIAS in tensors,
    )
    joint = model.source_rows == model.vocab_size and not settings.get("separate_vocabs")
    config = Config(
        model=model,
        tokenizer=TokenizerConfig(kind=pair.source.kind, joint=joint),
        decoding=_decoding_config(settings, model),
    )
    return Imported(config, from_foreign(tensors, MARIAN, model, str(folder)), pair)


def write_marian(
    folder: Path, config: Config, params: Params, tokenizers: TokenizerPair, warn: Callable[[str], None]
) -> None:
    """Write a folder that `MarianMTModel.from_pretrained` and `AutoTokenizer.from_pretrained` load."""
    tensors = marian_tensors(params, config.model)
    write_tokenizers(folder, tokenizers, config.model)
    kind = {"architectures": ["MarianMTModel"], "model_type": "marian", "dtype": "float32"}
    write_json(folder / "config.json", kind | marian_settings(config.model))
    write_json(folder / "generation_config.json", _generation_json(config, tokenizers, warn))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def marian_tensors(params: Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a `MarianMTModel` that computes the same function."""
    MARIAN.check(model)
    if model.positions == "interleaved":
        params = in_halves(params, model.d_model)
    tensors = to_foreign(params, MARIAN, model)
    for name in _WRITTEN_ONCE[model.tie_embeddings]:
        del tensors[name]
    tensors.setdefault(_LOGITS_BIAS, np.zeros((1, model.vocab_size)))
    return {name: tensor.astype(np.float32, copy=False) for name, tensor in tensors.items()}


def in_halves(params: Params, d_model: int) -> Params:
    """Convert the parameters of a model with interleaved positions for a model with halves that is equal to it."""
    order = np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    for path, leaf in leaves.items():
        if not path.endswith(("logits_bias", "query/bias", "key/bias", "value/bias", "inner/bias")):  # without d_model
            axis = 1 if path.endswith("/table") else -1 if path.endswith(("output/kernel", "outer/kernel")) else 0
            leaves[path] = np.take(leaf, order, axis)
    return unflatten(leaves)


def _model_fields(settings: Settings) -> ModelFields:
    """Return the fields of `ModelConfig` that the settings state, except special ids."""
    fields: ModelFields = {
        field: settings.read(name, kind, default) for name, (field, kind, default) in _FIELDS.items()
    }
    fields["activation"] = {"silu": "swish"}.get(fields["activation"], fields["activation"])
    rows = target_rows = settings.read("vocab_size", int)
    tied = "all"
    if not settings.read("share_encoder_decoder_embeddings", bool, True):
        target_rows, tied = settings.read("decoder_vocab_size", int, rows), "target"
    if not settings.read("tie_word_embeddings", bool, True):
        tied = "none"
    source_rows = None if rows == target_rows else rows
    return fields | {"vocab_size": target_rows, "source_vocab_size": source_rows, "tie_embeddings": tied}


def shared_settings(model: ModelConfig) -> dict[str, object]:
    """Return the settings that transformers gives one name in all its translation models."""
    settings = {name: getattr(model, field) for name, (field, _, _) in _FIELDS.items()}
    for name, value in settings.items():
        if value is None:  # a field of the decoder that is equal to the encoder's
            settings[name] = settings[name.replace("decoder", "encoder")]
    return settings | _special_ids(model)


def marian_settings(model: ModelConfig) -> dict[str, object]:
    """Return the settings of a `MarianMTModel`."""
    return {
        "vocab_size": model.source_rows,
        "decoder_vocab_size": model.vocab_size,
        **shared_settings(model),
        "share_encoder_decoder_embeddings": model.tie_embeddings == "all",
        "tie_word_embeddings": model.tie_embeddings != "none",
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    }


def _special_ids(model: ModelConfig) -> dict[str, object]:
    ids = {f"{name}_token_id": getattr(model, f"{name}_id") for name in ("pad", "bos", "eos")}
    return ids | {"decoder_start_token_id": model.start_id, "forced_eos_token_id": None}


def _decoding_config(settings: Settings, model: ModelConfig) -> DecodingConfig:
    read = settings.read
    if settings.get("forced_eos_token_id", model.eos_id) not in (model.eos_id, [model.eos_id]):
        raise settings.error("forced_eos_token_id", f"eos_token_id, {model.eos_id}")
    bad_words: Any = settings.get("bad_words_ids", [])
    if not isinstance(bad_words, list) or not all(_is_ids(ids) and len(ids) == 1 for ids in bad_words):
        raise settings.error("bad_words_ids", "lists of one id")
    suppressed: Any = settings.get("suppress_tokens", [])
    if not _is_ids(suppressed):
        raise settings.error("suppress_tokens", "a list of ids")
    forbidden = {ids[0] for ids in bad_words} - {model.eos_id} | set(suppressed)
    longest = read("max_new_tokens", int, 0) or max(read("max_length", int, MAX_LENGTH_OFFSET + 1) - 1, 1)
    # `min_new_tokens` replaces `min_length`, which counts the start token too.
    shortest = read("min_new_tokens", int, max(read("min_length", int, 0) - 1, 0))
    return DecodingConfig(
        beam_size=read("num_beams", int, 1),
        alpha=read("length_penalty", float, 1.0),
        length_penalty="power",
        stopping="huggingface",
        max_length_offset=min(MAX_LENGTH_OFFSET, longest),
        max_source=model.max_length,
        min_length=shortest,
        forbidden_ids=tuple(sorted(forbidden - {model.pad_id})),
        renormalize_logits=read("renormalize_logits", bool, False),
    )


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _generation_json(config: Config, tokenizers: TokenizerPair, warn: Callable[[str], None]) -> dict[str, object]:
    model, decoding = config.model, config.decoding
    alpha = decoding.alpha if decoding.length_penalty != "none" else 0.0
    warn_about_penalty(decoding, "generate", warn)
    if decoding.stopping != "huggingface" and decoding.beam_size > 1:
        warn(f"decoding.stopping={decoding.stopping!r}, but generate stops its beams by the rule 'huggingface'")
    suppressed = sorted({*range(tokenizers.target.vocab_size, model.vocab_size), *decoding.forbidden_ids})
    return {
        "max_length": min(decoding.max_source + decoding.max_length_offset + 1, model.max_length),
        "num_beams": decoding.beam_size,
        "length_penalty": alpha,
        "early_stopping": False,
        "renormalize_logits": decoding.renormalize_logits,
        "bad_words_ids": [[model.pad_id]],
        **({"min_new_tokens": decoding.min_length} if decoding.min_length else {}),
        **_special_ids(model),
        **({"suppress_tokens": suppressed} if suppressed else {}),
    }
