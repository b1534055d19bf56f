"""fairseq's `transformer`: checkpoints, dictionaries and subword-nmt codes.

A checkpoint holds the settings of its model (`args`, an `argparse.Namespace`, or `cfg["model"]`), from which the
configuration is made. fairseq's position tables have the sines first and the cosines after them, tensor2tensor's
exponent, and start from position pad + 1. The decoder starts from EOS.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from transformer_jax.data.subword import SubwordTokenizer, read_codes
from transformer_jax.data.tokenizer import Tokenizer, WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import Imported, ModelFields, Settings, T, training_length
from transformer_jax.interop.mapping import names
from transformer_jax.interop.tables import Format, Legal, Tensors, embeddings, from_foreign, renamed
from transformer_jax.interop.tensor_files import load_torch, single_file, state_dict_arrays
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_text
from transformer_jax.types import UserError

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""Tokens that precede the tokens listed in a dictionary."""
BOS_ID, PAD_ID, EOS_ID, UNK_ID = range(4)
MAX_POSITIONS = 1024
"""fairseq's default limit of a sentence's length, for models whose position tables have no end."""

STACKS = {
    "{layer}.{self,encoder}_attn.{q,k,v,out}_proj": "{layer}/{self,cross}_attention/{query,key,value,output}",
    "{layer}.{self,encoder}_attn_layer_norm": "{layer}/{self,cross}_attention_norm",
    "{layer}.fc{1,2}": "{layer}/feed_forward/{inner,outer}",
    "{layer}.final_layer_norm": "{layer}/feed_forward_norm",
}
"""Names in a layer, which Hugging Face's models have too."""


def _legal(model: ModelConfig) -> Legal:
    return {
        "norm_variant": ("standard",),
        "norm_epsilon": (1e-5,),
        "final_norm": (model.norm_position == "pre",),
        "logits_bias": (False,),
        "positions": ("halves", "learned"),
        "position_exponent": ("tensor2tensor",) if model.positions == "halves" else ("paper", "tensor2tensor"),
        "position_offset": (model.pad_id + 1,),
        "decoder_start": ("eos",),
        "source_bos": (False,),
        "source_eos": (True,),
    }


# Names of the norms that releases before 0.6 numbered.
_LAYER_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def _new_name(name: str) -> str:
    for i, new in enumerate(_LAYER_NORMS.get(name.partition(".")[0], ())):
        name = name.replace(f".layer_norms.{i}.", f".{new}.")
    return name


def _prepare(tensors: Tensors, origin: str) -> Tensors:
    """Return the tensors under their new names, with a fused query, key and value matrix split in three."""
    separate: dict[str, np.ndarray] = {}
    for name, tensor in renamed(tensors, _new_name, origin).items():
        prefix, separator, kind = name.partition(".in_proj_")
        parts = {name: tensor}
        if separator and kind in ("weight", "bias") and tensor.ndim and len(tensor) % 3 == 0:
            parts = {f"{prefix}.{q}_proj.{kind}": part for q, part in zip("qkv", np.split(tensor, 3), strict=True)}
            duplicates = [part for part in parts if part in tensors]
            if duplicates:
                raise UserError(f"{origin}: {name} and {', '.join(duplicates)} hold the same weights. Remove one")
        separate |= parts
    return separate


FAIRSEQ = Format(
    "fairseq",
    rows=(
        *embeddings(
            ("encoder.embed_tokens.weight",),
            ("decoder.embed_tokens.weight",),
            ("decoder.output_projection.weight", "decoder.embed_out"),
        ),
        *names(
            STACKS
            | {
                "{encoder,decoder}.embed_positions": "{source,target}_positions",
                "{encoder,decoder}.layer_norm": "{encoder,decoder}/final_norm",
            },
            "{encoder,decoder}.layers.{i}",
        ),
    ),
    ignored=("_float_tensor", "encoder.version", "decoder.version"),
    legal=_legal,
    prepare=_prepare,
)


def read_fairseq(path: Path) -> Imported:
    """Read a folder with a checkpoint `*.pt`, two `dict.LANGUAGE.txt` and optionally subword-nmt codes.

    With codes (`bpecodes`, `code` or `codes`) the tokenizers take text, otherwise text that is split into pieces.
    """
    file = single_file(path, ("*.pt",), preferred=("checkpoint_best.pt", "model.pt"))
    checkpoint = load_torch(file, (argparse.Namespace,))
    settings = _settings(checkpoint, file)
    tensors = state_dict_arrays(checkpoint.get("model"), str(file))
    source, target = _languages(settings, file.parent)
    codes = next((file.parent / n for n in ("bpecodes", "code", "codes") if (file.parent / n).is_file()), None)
    dictionaries = [file.parent / f"dict.{language}.txt" for language in (source, target)]
    tokenizers = [read_dictionary(dictionary, codes) for dictionary in dictionaries]
    joint = bool(settings.get("share_all_embeddings"))
    if joint and dictionaries[0].read_bytes() != dictionaries[1].read_bytes():
        raise UserError(f"{dictionaries[0]} and {dictionaries[1]} differ, and the model shares all embeddings")
    pair = TokenizerPair(tokenizers[0], tokenizers[0] if joint else tokenizers[1])
    model = _model_config(settings, pair, tensors)
    config = Config(
        model=model,
        data=DataConfig(source_language=source, target_language=target, max_length=training_length(model)),
        tokenizer=TokenizerConfig(kind="subword_nmt" if codes else "pretokenized", joint=joint),
        training=TrainingConfig(label_smoothing=settings.read("label_smoothing", float, 0.0)),
        decoding=DecodingConfig(
            beam_size=5, length_penalty="power", alpha=1.0, stopping="ctranslate2", max_length_offset=200, min_length=1
        ),
    )
    return Imported(config, from_foreign(tensors, FAIRSEQ, model, str(file)), pair)


def read_dictionary(path: Path, codes: Path | None = None) -> Tokenizer:
    """Read a `dict.LANGUAGE.txt`, which has a piece and its count on each line, and optionally subword-nmt codes."""
    vocabulary, known = list(SPECIAL_TOKENS), set(SPECIAL_TOKENS)
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        overwrites = line.endswith(" #fairseq:overwrite")
        piece, separator, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not separator or not count.isdecimal():
            raise UserError(f"{path}, line {number}: {line!r} is not a piece and its count")
        if piece in known and not overwrites:
            raise UserError(f"{path}, line {number}: {piece!r} is listed twice and not marked as overwriting")
        known.add(piece)
        vocabulary.append(piece)
    ids = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
    if codes is None:
        return WordTokenizer("pretokenized", vocabulary, ids)
    return SubwordTokenizer(read_codes(codes), vocabulary, ids)


def _settings(checkpoint: object, file: Path) -> Settings:
    """Return the settings of the model, with the languages and the smoothing that later releases keep elsewhere."""
    if not isinstance(checkpoint, Mapping):
        raise UserError(f"{file} holds {type(checkpoint).__name__}, not a fairseq checkpoint")

    def plain(settings: object) -> dict[str, object]:
        settings = vars(settings) if isinstance(settings, argparse.Namespace) else settings
        return dict(settings) if isinstance(settings, Mapping) else {}

    cfg = plain(checkpoint.get("cfg"))
    args = plain(checkpoint.get("args")) or plain(cfg.get("model"))
    require(args, f"{file} is not a fairseq checkpoint: it has no settings of a model (args, or cfg with model)")
    nested = ", ".join(name for name in ("encoder", "decoder") if plain(args.get(name)))
    supported = "Only the architecture `transformer` can be imported"
    require(not nested, f"{file}: the settings {nested} are tables. {supported}")
    task, criterion = plain(cfg.get("task")), plain(cfg.get("criterion"))
    later = {name: task.get(name) for name in ("source_lang", "target_lang")}
    return Settings((file, later | {"label_smoothing": criterion.get("label_smoothing")}), (file, args))


def _languages(settings: Settings, folder: Path) -> tuple[str, str]:
    source, target = (settings.read(f"{side}_lang", str, "") for side in ("source", "target"))
    if not source or not target:
        found = ", ".join(sorted(file.name for file in folder.glob("dict.*.txt"))) or "none"
        problem = "the checkpoint's settings name no source_lang and target_lang"
        raise UserError(f"{folder}: {problem}, so it is not known which dictionary ({found}) belongs to which side")
    for language in (source, target):
        problem = f"the checkpoint's settings name the language {language!r:.80}, which may not be part of a file name"
        require(re.fullmatch(r"[\w.-]+", language), f"{folder}: {problem}")
    return source, target


# Settings that change the function, with the values that can be imported.
_LEGAL_SETTINGS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("no_token_positional_embeddings", "layernorm_embedding", "no_decoder_final_norm"), (False,)),
    **dict.fromkeys(("adaptive_input", "tie_adaptive_weights"), (False,)),
    **dict.fromkeys(("cross_self_attention", "no_cross_attention"), (False,)),
    "adaptive_softmax_cutoff": (),
    "activation_fn": ("relu", "gelu", "swish"),
}


def _model_config(settings: Settings, pair: TokenizerPair, tensors: Tensors) -> ModelConfig:
    settings.require(_LEGAL_SETTINGS)
    read = settings.read

    def shared(name: str, kind: type[T], default: T) -> T:
        """Return a setting that the encoder and the decoder must share."""
        value = read(f"encoder_{name}", kind, default)
        if read(f"decoder_{name}", kind, default) != value:
            raise settings.error(f"decoder_{name}", f"the value of encoder_{name}, {value},")
        return value

    pre, learned = shared("normalize_before", bool, False), shared("learned_pos", bool, False)
    tied = "target" if read("share_decoder_input_output_embed", bool, False) else "none"
    table = tensors.get("encoder.embed_positions.weight") if learned else None
    fields: ModelFields = {
        "activation": read("activation_fn", str, "relu"),
        "tie_embeddings": "all" if read("share_all_embeddings", bool, False) else tied,
    }
    for stack, prefix in (("encoder", ""), ("decoder", "decoder_")):
        fields[f"{prefix}num_layers"] = read(f"{stack}_layers", int, 6)
        fields[f"{prefix}num_heads"] = read(f"{stack}_attention_heads", int)
        fields[f"{prefix}d_ff"] = read(f"{stack}_ffn_embed_dim", int, 2048)
    return ModelConfig(
        vocab_size=pair.target.vocab_size,
        source_vocab_size=None if pair.joint else pair.source.vocab_size,
        d_model=shared("embed_dim", int, 512),
        **fields,
        norm_position="pre" if pre else "post",
        final_norm=pre,
        norm_epsilon=1e-5,
        attention_bias=True,
        residual_dropout=read("dropout", float, 0.1),
        attention_dropout=read("attention_dropout", float, 0.0),
        activation_dropout=read("activation_dropout", float, 0.0) or read("relu_dropout", float, 0.0),
        positions="learned" if learned else "halves",
        position_exponent="tensor2tensor",
        position_offset=PAD_ID + 1,
        max_length=MAX_POSITIONS if table is None else len(table),
        scale_embeddings=not read("no_scale_embedding", bool, False),
        decoder_start="eos",
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        initialization="torch_fused",
    )
