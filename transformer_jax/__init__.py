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
    "draw_attention": "visualization.attention",  # draw_attention(attention, Path("page.html"))
    "plot": "visualization.plots",  # plot(["runs/one", "runs/other"], Path("plots.png"))
    # To and from other software.
    "import_run": "interop.convert",
    "export_run": "interop.convert",
    "compare": "parity.compare",  # compare("torch") -> ParityReport
}

__all__ = ["API", "__version__", *API]

if TYPE_CHECKING:  # `as` marks a name as exported for type checkers in strict mode
    from transformer_jax.config import Config as Config
    from transformer_jax.config import DataConfig as DataConfig
    from transformer_jax.config import DecodingConfig as DecodingConfig
    from transformer_jax.config import ModelConfig as ModelConfig
    from transformer_jax.config import Sampling as Sampling
    from transformer_jax.config import TokenizerConfig as TokenizerConfig
    from transformer_jax.config import TrainingConfig as TrainingConfig
    from transformer_jax.decoding.alignment import align as align
    from transformer_jax.decoding.beam_search import beam_search as beam_search
    from transformer_jax.decoding.search import SearchSpec as SearchSpec
    from transformer_jax.decoding.search import greedy_search as greedy_search
    from transformer_jax.decoding.translator import Translator as Translator
    from transformer_jax.evaluation.bleu import score_corpus as score_corpus
    from transformer_jax.evaluation.evaluate import average as average
    from transformer_jax.evaluation.evaluate import evaluate as evaluate
    from transformer_jax.evaluation.scoring import score_pairs as score_pairs
    from transformer_jax.interop.convert import export_run as export_run
    from transformer_jax.interop.convert import import_run as import_run
    from transformer_jax.model.attention import MultiHeadAttention as MultiHeadAttention
    from transformer_jax.model.attention import attention_weights as attention_weights
    from transformer_jax.model.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from transformer_jax.model.layers import Decoder as Decoder
    from transformer_jax.model.layers import DecoderLayer as DecoderLayer
    from transformer_jax.model.layers import Encoder as Encoder
    from transformer_jax.model.layers import EncoderLayer as EncoderLayer
    from transformer_jax.model.masks import causal_mask as causal_mask
    from transformer_jax.model.masks import padding_mask as padding_mask
    from transformer_jax.model.masks import segment_mask as segment_mask
    from transformer_jax.model.masks import target_mask as target_mask
    from transformer_jax.model.positional import sinusoids as sinusoids
    from transformer_jax.model.transformer import Transformer as Transformer
    from transformer_jax.model.transformer import attention_maps as attention_maps
    from transformer_jax.model.transformer import count_parameters as count_parameters
    from transformer_jax.parity.compare import compare as compare
    from transformer_jax.presets import preset as preset
    from transformer_jax.run import train as train
    from transformer_jax.training.loss import LossSpec as LossSpec
    from transformer_jax.training.loss import cross_entropy as cross_entropy
    from transformer_jax.training.optimizer import make_optimizer as make_optimizer
    from transformer_jax.training.optimizer import noam_schedule as noam_schedule
    from transformer_jax.training.sharding import make_mesh as make_mesh
    from transformer_jax.training.step import TrainState as TrainState
    from transformer_jax.training.step import init_state as init_state
    from transformer_jax.training.step import train_step as train_step
    from transformer_jax.types import Batch as Batch
    from transformer_jax.types import UserError as UserError
    from transformer_jax.visualization.attention import attention_of as attention_of
    from transformer_jax.visualization.attention import draw_attention as draw_attention
    from transformer_jax.visualization.plots import plot as plot


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module 'transformer_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"transformer_jax.{API[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
