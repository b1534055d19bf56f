"""Hugging Face's Marian folders, such as those of OPUS-MT: read and written whole, tokenizers included.

What `generate` does that differs here, wherever the model comes from: padding is never generated; at the limit a
hypothesis counts as it is, where `forced_eos_token_id` would put EOS in the place of its last token.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.folder_files import read_json, write_json
from transformer_jax.interop.imported import Activation, Imported, Tying
from transformer_jax.interop.marian_tokenizer_files import read_tokenizers, write_tokenizers
from transformer_jax.interop.marian_weights import marian_tensors, params_from_marian
from transformer_jax.interop.tensor_files import load_torch, read_safetensors, state_dict_arrays, write_safetensors
from transformer_jax.types import Params, UserError

MAX_EXTRA = 128

# Settings that change what is computed, and the only values that mean what is done here. None stands for the default.
_LEGAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("marian",),
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "normalize_before": (False,),
    "normalize_embedding": (False,),
    "add_final_layer_norm": (False,),
    "static_position_embeddings": (True,),
    "force_bos_token_to_be_generated": (False,),
    "encoder_layerdrop": (0,),
    "decoder_layerdrop": (0,),
    "quantization_config": (),
    "do_sample": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "min_length": (0,),
    "min_new_tokens": (0,),
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
    """A folder with `config.json`, `model.safetensors` or `pytorch_model.bin`, `source.spm`, `target.spm` and
    `vocab.json`; `generation_config.json` if there is one.

    The limit of the output differs: there `max_length` tokens whatever the source is, here the source's tokens and
    `decoding.max_length_offset`, which becomes 128, or `max_length` if that is less.

    Raises:
        UserError: files that are missing or damaged, settings that the model here does not know: they are named.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    settings = _Settings(folder)
    pad_id, eos_id, start_id = (settings.number(f"{name}_token_id") for name in ("pad", "eos", "decoder_start"))
    bos_id, start = settings.number("bos_token_id", eos_id), "bos"
    if start_id == pad_id:
        start = "pad"
    elif start_id == eos_id:
        start = "eos"
    else:
        bos_id = start_id  # what the decoder starts from is all that a BOS is for
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
    """Writes a folder that `MarianMTModel.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Args:
        folder: an empty one.
        config: of the run.
        params: of its model.
        tokenizers: of the run.
        warn: called with what `generate` there does in another way.

    Raises:
        UserError: Marian cannot say what the model does; the fields are named.
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
    """`config.json`, over it `generation_config.json`: older folders have all of it in the first."""

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
            raise UserError(f"{self.file} names no model_type; a Marian folder says 'marian'")
        for key, legal in _LEGAL.items():
            if key in self._values and self._values[key] not in legal:
                raise self.error(key, " or ".join(map(repr, legal)) if legal else "no value at all")

    def given(self, key: str, default: Any = None) -> Any:
        """A setting as it stands there."""
        return self._values.get(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number from 0, which must be there if it has no default."""
        value = self._values.get(key, default)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if type(value) is not int or value < 0:
            raise self.error(key, "a whole number from 0")
        return value

    def rate(self, key: str, default: float) -> float:
        """A number from 0."""
        value = self._values.get(key, default)
        if type(value) not in (int, float) or not value >= 0:
            raise self.error(key, "a number from 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def error(self, key: str, legal: str) -> UserError:
        """What to say of a setting that cannot be used."""
        found = repr(self._values[key]) if key in self._values else "missing"
        return UserError(f"{self._origin.get(key, self.file)}: {key} is {found}; the model here can only take {legal}")


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
    longest = settings.number("max_new_tokens", 0) or max(settings.number("max_length", MAX_EXTRA + 1) - 1, 1)
    return DecodingConfig(
        beam_size=settings.number("num_beams", 1),
        alpha=settings.rate("length_penalty", 1.0),
        length_penalty="power",
        stopping="huggingface",
        max_length_offset=min(MAX_EXTRA, longest),
        max_source=model.max_length,
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
            f"decoding.length_penalty is 'gnmt' and generate knows only length^alpha: length_penalty {alpha} is "
            "written, which prefers other lengths"
        )
    if decoding.stopping != "huggingface" and decoding.beam_size > 1:
        warn(f"decoding.stopping is {decoding.stopping!r} and generate stops its beams as 'huggingface' does")
    unnamed = set(range(tokenizers.target.vocab_size, model.vocab_size))
    tree = {
        "max_length": min(decoding.max_source + decoding.max_length_offset + 1, model.max_length),
        "num_beams": decoding.beam_size,
        "length_penalty": alpha,
        "early_stopping": False,
        "renormalize_logits": decoding.renormalize_logits,
        "bad_words_ids": [[model.pad_id]],
    }
    suppressed = sorted(unnamed.union(decoding.forbidden_ids))
    return tree | _special_ids(model) | ({"suppress_tokens": suppressed} if suppressed else {})
