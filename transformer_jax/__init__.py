"""The encoder-decoder Transformer of 'Attention Is All You Need' in JAX.

`API` below is the public interface, each name with the module it lives in. Importing the package imports nothing else:
a name is looked up when it is first used, so that the command line starts fast and jax can be configured before it.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Not etils' lazy_api_imports: it patches `builtins.__import__`, breaks importlib.reload and doubles the import time.
API = {
    # Configuration: frozen dataclasses, checked when made.
    "Config": "config",  # a whole run
    "ModelConfig": "config",  # section 3; .base(vocab_size), .big(vocab_size)
    "DataConfig": "config",  # section 5.1
    "TokenizerConfig": "config",
    "TrainingConfig": "config",  # sections 5.3 and 5.4
    "DecodingConfig": "config",  # section 6.1
    "preset": "presets",  # every choice of an implementation by name: preset("fairseq", vocab_size)
    "UserError": "types",  # what every failure with a cure raises
    # The model: Linen modules and, under them, functions on arrays.
    "Transformer": "model.transformer",
    "attention_maps": "model.transformer",
    "count_parameters": "model.transformer",
    "Encoder": "model.layers",
    "Decoder": "model.layers",
    "EncoderLayer": "model.layers",
    "DecoderLayer": "model.layers",
    "MultiHeadAttention": "model.attention",
    "attention_weights": "model.attention",
    "scaled_dot_product_attention": "model.attention",
    "sinusoids": "model.positional",
    "padding_mask": "model.masks",  # masks are True where a query may attend
    "causal_mask": "model.masks",
    "target_mask": "model.masks",
    "segment_mask": "model.masks",
    # Training.
    "noam_schedule": "training.optimizer",  # paper eq. 3
    "make_optimizer": "training.optimizer",
    "cross_entropy": "training.loss",  # label smoothing as sums over tokens
    "LossSpec": "training.loss",  # constants of the loss: label smoothing, and how many logits to hold
    "train_step": "training.step",  # THE training step, a pure function
    "TrainState": "training.step",
    "init_state": "training.step",
    "make_mesh": "training.sharding",  # devices along data, fsdp and tensor
    "Batch": "types",
    # Decoding and evaluation.
    "Translator": "decoding.translator",  # Translator.load(run).translate(texts)
    "beam_search": "decoding.beam_search",  # over a callback, knows no model
    "greedy_search": "decoding.search",
    "SearchSpec": "decoding.search",  # what both searches may generate, and when they stop
    "Sampling": "config",  # what tokens are drawn from, in place of a search
    "align": "decoding.alignment",  # align(translator, texts, translations): source tokens of target tokens
    "score_pairs": "evaluation.scoring",  # score_pairs(translator, pairs): log-probabilities of given targets
    "score_corpus": "evaluation.bleu",  # BLEU and chrF with signatures
    # What the commands do.
    "train": "run",
    "evaluate": "evaluation.evaluate",
    "average": "evaluation.evaluate",
    # Pictures.
    "attention_of": "visualization.attention",  # attention_of(translator, sentence) -> Attention
    "draw_attention": "visualization.attention_drawing",  # draw_attention(attention, Path("page.html"))
    "plot": "visualization.plots",  # plot(["runs/one", "runs/other"], Path("plots.png"))
    # To and from other software.
    "import_run": "interop.convert",
    "export_run": "interop.convert",
    "compare": "parity.compare",  # compare("torch") -> ParityReport
}

__all__ = ["API", "__version__", *API]

if TYPE_CHECKING:
    from transformer_jax.config import (
        Config,
        DataConfig,
        DecodingConfig,
        ModelConfig,
        Sampling,
        TokenizerConfig,
        TrainingConfig,
    )
    from transformer_jax.decoding.alignment import align
    from transformer_jax.decoding.beam_search import beam_search
    from transformer_jax.decoding.search import SearchSpec, greedy_search
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.evaluation.bleu import score_corpus
    from transformer_jax.evaluation.evaluate import average, evaluate
    from transformer_jax.evaluation.scoring import score_pairs
    from transformer_jax.interop.convert import export_run, import_run
    from transformer_jax.model.attention import MultiHeadAttention, attention_weights, scaled_dot_product_attention
    from transformer_jax.model.layers import Decoder, DecoderLayer, Encoder, EncoderLayer
    from transformer_jax.model.masks import causal_mask, padding_mask, segment_mask, target_mask
    from transformer_jax.model.positional import sinusoids
    from transformer_jax.model.transformer import Transformer, attention_maps, count_parameters
    from transformer_jax.parity.compare import compare
    from transformer_jax.presets import preset
    from transformer_jax.run import train
    from transformer_jax.training.loss import LossSpec, cross_entropy
    from transformer_jax.training.optimizer import make_optimizer, noam_schedule
    from transformer_jax.training.sharding import make_mesh
    from transformer_jax.training.step import TrainState, init_state, train_step
    from transformer_jax.types import Batch, UserError
    from transformer_jax.visualization.attention import attention_of
    from transformer_jax.visualization.attention_drawing import draw_attention
    from transformer_jax.visualization.plots import plot


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module 'transformer_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"transformer_jax.{API[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
