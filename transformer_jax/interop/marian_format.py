"""Hugging Face's Marian folders, such as those of OPUS-MT, with their tokenizers.

Two habits of `generate` differ from this package's search, wherever the model comes from. Padding is never generated
here. A hypothesis that reaches the limit counts as it is, where `forced_eos_token_id` would replace its last token by
EOS.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import Activation, Imported, Start, Tying, write_json
from transformer_jax.interop.marian_tokenizers import read_tokenizers, write_tokenizers
from transformer_jax.interop.marian_weights import marian_tensors, params_from_marian
from transformer_jax.interop.tensor_files import load_torch, read_safetensors, state_dict_arrays, write_safetensors
from transformer_jax.runtime.files import read_json
from transformer_jax.types import Params, UserError

MAX_LENGTH_OFFSET = 128
"""Largest `decoding.max_length_offset` of an imported model."""

# Settings that change the output, and their legal values. A setting without legal values must be absent or null.
# `static_position_embeddings` is not among them: MarianMTModel ignores it and always computes sinusoids.
_LEGAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("marian",),
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "normalize_before": (False,),
    "normalize_embedding": (False,),
    "add_final_layer_norm": (False,),
    "force_bos_token_to_be_generated": (False,),
    "encoder_layerdrop": (0,),
    "decoder_layerdrop": (0,),
    "quantization_config": (),
    "do_sample": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "constraints": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "watermarking_config": (),
    "stop_strings": (),
}
_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}


def read_marian(folder: Path) -> Imported:
    """Read a Marian folder.

    It has `config.json`, `model.safetensors` or `pytorch_model.bin`, `source.spm`, `target.spm`, `vocab.json`, and
    optionally `generation_config.json`.

    `generate` limits the output to `max_length` tokens. This package limits it to the number of source tokens plus
    `decoding.max_length_offset`, which becomes 128, or `max_length` if that is less.

    Raises:
        UserError: A file is missing or damaged, or a setting is not supported.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    settings = _Settings(folder)
    pad_id, eos_id, start_id = (settings.number(f"{name}_token_id") for name in ("pad", "eos", "decoder_start"))
    starts: dict[int, Start] = {pad_id: "pad", eos_id: "eos"}
    start = starts.get(start_id, "bos")
    # A Marian model uses BOS only as the decoder's start.
    bos_id = start_id if start == "bos" else settings.number("bos_token_id", eos_id)
    pair = read_tokenizers(folder, pad_id, bos_id, eos_id)
    tensors = _read_tensors(folder)
    model = _model_config(
        settings,
        decoder_start=start,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=pad_id if pair.source.unk_id is None else pair.source.unk_id,
        logits_bias="final_logits_bias" in tensors,
    )
    joint = model.source_rows == model.vocab_size and not settings.given("separate_vocabs")
    config = Config(
        model=model,
        tokenizer=TokenizerConfig(kind=pair.source.kind, joint=joint),
        decoding=_decoding_config(settings, model),
    )
    return Imported(config, params_from_marian(tensors, model, str(folder)), pair)


def write_marian(
    folder: Path, config: Config, params: Params, tokenizers: TokenizerPair, warn: Callable[[str], None]
) -> None:
    """Write a folder that `MarianMTModel.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Args:
        folder: Empty folder to write to.
        config: Configuration of the run.
        params: Parameters of its model.
        tokenizers: Tokenizers of the run.
        warn: Called with each difference between the run's decoding and `generate`.

    Raises:
        UserError: Marian cannot express the model. The fields are named.
    """
    tensors = marian_tensors(params, config.model)
    write_tokenizers(folder, tokenizers, config.model)
    for name, tree in (
        ("config.json", _config_json(config.model)),
        ("generation_config.json", _generation_json(config, tokenizers, warn)),
    ):
        write_json(folder / name, tree)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


class _Settings:
    """The settings of `config.json`, overridden by those of `generation_config.json`, which older folders lack."""

    def __init__(self, folder: Path) -> None:
        self._origin: dict[str, Path] = {}
        self._values: dict[str, Any] = {}
        self.file = folder / "config.json"
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            if name != "config.json" and not (folder / name).is_file():
                continue
            for key, value in read_json(folder / name).items():
                if value is not None and (name != "tokenizer_config.json" or key == "separate_vocabs"):
                    self._values[key], self._origin[key] = value, folder / name
        if "model_type" not in self._values:
            raise UserError(f"{self.file} has no model_type. A Marian folder has model_type 'marian'")
        for key, legal in _LEGAL.items():
            if key in self._values and self._values[key] not in legal:
                raise self.error(key, " or ".join(map(repr, legal)) if legal else "null")

    def given(self, key: str, default: Any = None) -> Any:
        """Return a setting without checking its type."""
        return self._values.get(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        """Return a setting that is an integer of at least 0, and that must exist unless it has a default."""
        value = self._values.get(key, default)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if type(value) is not int or value < 0:
            raise self.error(key, "an integer of at least 0")
        return value

    def rate(self, key: str, default: float) -> float:
        """Return a setting that is a number of at least 0."""
        value = self._values.get(key, default)
        if type(value) not in (int, float) or not value >= 0:
            raise self.error(key, "a number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def error(self, key: str, legal: str) -> UserError:
        """Return an error about a setting that cannot be used."""
        value = repr(self._values[key]) if key in self._values else "missing"
        return UserError(f"{self._origin.get(key, self.file)}: {key} is {value}; only {legal} is supported")


def _read_tensors(folder: Path) -> Mapping[str, np.ndarray]:
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        path = folder / "pytorch_model.bin"
        return state_dict_arrays(load_torch(path), str(path))
    raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _model_config(settings: _Settings, **known: Any) -> ModelConfig:
    activation = settings.given("activation_function", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise settings.error("activation_function", ", ".join(_ACTIVATIONS))
    rows = settings.number("vocab_size")
    target_rows = rows
    tied: Tying = "all"
    if not settings.flag("share_encoder_decoder_embeddings", True):
        target_rows, tied = settings.number("decoder_vocab_size", rows), "target"
    if not settings.flag("tie_word_embeddings", True):
        tied = "none"
    stacks = ("encoder", "decoder")
    layers, heads, inner = (
        [settings.number(f"{stack}_{name}") for stack in stacks] for name in ("layers", "attention_heads", "ffn_dim")
    )
    return ModelConfig(
        vocab_size=target_rows,
        source_vocab_size=None if rows == target_rows else rows,
        d_model=settings.number("d_model"),
        num_layers=layers[0],
        decoder_num_layers=layers[1],
        num_heads=heads[0],
        decoder_num_heads=heads[1],
        d_ff=inner[0],
        decoder_d_ff=inner[1],
        norm_epsilon=1e-5,
        activation=_ACTIVATIONS[activation],
        attention_bias=True,
        residual_dropout=settings.rate("dropout", 0.1),
        attention_dropout=settings.rate("attention_dropout", 0.0),
        activation_dropout=settings.rate("activation_dropout", 0.0),
        positions="halves",
        max_length=settings.number("max_position_embeddings", 1024),
        tie_embeddings=tied,
        scale_embeddings=settings.flag("scale_embedding", False),
        **known,
    )


def _decoding_config(settings: _Settings, model: ModelConfig) -> DecodingConfig:
    if settings.given("forced_eos_token_id", model.eos_id) not in (model.eos_id, [model.eos_id]):
        raise settings.error("forced_eos_token_id", f"eos_token_id, {model.eos_id}")
    bad_words = settings.given("bad_words_ids", [])
    if not isinstance(bad_words, list) or not all(_is_ids(ids) and len(ids) == 1 for ids in bad_words):
        raise settings.error("bad_words_ids", "lists of one id")
    suppressed = settings.given("suppress_tokens", [])
    if not _is_ids(suppressed):
        raise settings.error("suppress_tokens", "a list of ids")
    forbidden = {ids[0] for ids in bad_words} - {model.eos_id} | set(suppressed)
    longest = settings.number("max_new_tokens", 0) or max(settings.number("max_length", MAX_LENGTH_OFFSET + 1) - 1, 1)
    # `min_new_tokens` replaces `min_length`, which counts the start token too.
    shortest = settings.number("min_new_tokens", max(settings.number("min_length", 0) - 1, 0))
    return DecodingConfig(
        beam_size=settings.number("num_beams", 1),
        alpha=settings.rate("length_penalty", 1.0),
        length_penalty="power",
        stopping="huggingface",
        max_length_offset=min(MAX_LENGTH_OFFSET, longest),
        max_source=model.max_length,
        min_length=shortest,
        forbidden_ids=tuple(sorted(forbidden - {model.pad_id})),
        renormalize_logits=settings.flag("renormalize_logits", False),
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _config_json(model: ModelConfig) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "dtype": "float32",
        "vocab_size": model.source_rows,
        "decoder_vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "dropout": model.residual_dropout,
        "attention_dropout": model.attention_dropout,
        "activation_dropout": model.activation_dropout,
        "activation_function": model.activation,
        "scale_embedding": model.scale_embeddings,
        "share_encoder_decoder_embeddings": model.tie_embeddings == "all",
        "tie_word_embeddings": model.tie_embeddings != "none",
        "max_position_embeddings": model.max_length,
    }
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        tree |= {
            f"{name}_layers": stack.num_layers,
            f"{name}_attention_heads": stack.num_heads,
            f"{name}_ffn_dim": stack.d_ff,
            f"{name}_layerdrop": 0.0,
        }
    return tree | _special_ids(model)


def _special_ids(model: ModelConfig) -> dict[str, Any]:
    ids = {f"{name}_token_id": getattr(model, f"{name}_id") for name in ("pad", "bos", "eos")}
    return ids | {"decoder_start_token_id": model.start_id, "forced_eos_token_id": None}


def _generation_json(config: Config, tokenizers: TokenizerPair, warn: Callable[[str], None]) -> dict[str, Any]:
    model, decoding = config.model, config.decoding
    alpha = decoding.alpha if decoding.length_penalty != "none" else 0.0
    if decoding.length_penalty == "gnmt" and decoding.beam_size > 1:
        warn(
            f"decoding.length_penalty='gnmt', but generate has only length^alpha: its length_penalty={alpha} prefers "
            "other lengths"
        )
    if decoding.stopping != "huggingface" and decoding.beam_size > 1:
        warn(f"decoding.stopping={decoding.stopping!r}, but generate stops its beams by the rule 'huggingface'")
    unnamed = set(range(tokenizers.target.vocab_size, model.vocab_size))
    tree: dict[str, Any] = {
        "max_length": min(decoding.max_source + decoding.max_length_offset + 1, model.max_length),
        "num_beams": decoding.beam_size,
        "length_penalty": alpha,
        "early_stopping": False,
        "renormalize_logits": decoding.renormalize_logits,
        "bad_words_ids": [[model.pad_id]],
    }
    if decoding.min_length:
        tree["min_new_tokens"] = decoding.min_length
    suppressed = sorted(unnamed.union(decoding.forbidden_ids))
    return tree | _special_ids(model) | ({"suppress_tokens": suppressed} if suppressed else {})
