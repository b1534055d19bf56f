"""The public interface: each name with the module that defines it. `__init__.py` imports a name when it is used."""

# Configuration: frozen dataclasses, checked when made.
from .config import Config as Config  # a whole run
from .config import DataConfig as DataConfig  # section 5.1
from .config import DecodingConfig as DecodingConfig  # section 6.1
from .config import ModelConfig as ModelConfig  # section 3; .base(vocab_size), .big(vocab_size)
from .config import Sampling as Sampling  # what tokens are drawn from, in place of a search
from .config import TokenizerConfig as TokenizerConfig
from .config import TrainingConfig as TrainingConfig  # sections 5.3 and 5.4
from .decoding.alignment import align as align  # align(translator, texts, translations): source tokens of target tokens
from .decoding.beam_search import beam_search as beam_search  # over a callback, knows no model
from .decoding.search import SearchSpec as SearchSpec  # what both searches may generate, and when they stop
from .decoding.search import greedy_search as greedy_search

# Decoding and evaluation.
from .decoding.translator import Translator as Translator  # Translator.load(run).translate(texts)
from .evaluation.bleu import score_corpus as score_corpus  # BLEU and chrF with signatures
from .evaluation.evaluate import average as average
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.scoring import (
    score_pairs as score_pairs,  # score_pairs(translator, pairs): log-probabilities of given targets
)
from .interop.convert import export_run as export_run

# To and from other software.
from .interop.convert import import_run as import_run
from .model.attention import MultiHeadAttention as MultiHeadAttention
from .model.attention import attention_weights as attention_weights
from .model.attention import scaled_dot_product_attention as scaled_dot_product_attention
from .model.layers import Decoder as Decoder
from .model.layers import DecoderLayer as DecoderLayer
from .model.layers import Encoder as Encoder
from .model.layers import EncoderLayer as EncoderLayer
from .model.masks import causal_mask as causal_mask
from .model.masks import padding_mask as padding_mask  # masks are True where a query may attend
from .model.masks import segment_mask as segment_mask
from .model.masks import target_mask as target_mask
from .model.positional import sinusoids as sinusoids

# The model: Linen modules and, under them, functions on arrays.
from .model.transformer import Transformer as Transformer
from .model.transformer import attention_maps as attention_maps
from .model.transformer import count_parameters as count_parameters
from .parity.compare import compare as compare  # compare("torch") -> ParityReport
from .presets import preset as preset  # every choice of an implementation by name: preset("fairseq", vocab_size)

# What the commands do.
from .run import train as train
from .training.loss import LossSpec as LossSpec  # constants of the loss: label smoothing, and how many logits to hold
from .training.loss import cross_entropy as cross_entropy  # label smoothing as sums over tokens
from .training.optimizer import make_optimizer as make_optimizer

# Training.
from .training.optimizer import noam_schedule as noam_schedule  # paper eq. 3
from .training.sharding import make_mesh as make_mesh  # devices along data, fsdp and tensor
from .training.step import TrainState as TrainState
from .training.step import init_state as init_state
from .training.step import train_step as train_step  # THE training step, a pure function
from .types import Batch as Batch
from .types import UserError as UserError  # what every failure with a cure raises

# Pictures.
from .visualization.attention import attention_of as attention_of  # attention_of(translator, sentence) -> Attention
from .visualization.attention import draw_attention as draw_attention  # draw_attention(attention, Path("page.html"))
from .visualization.plots import plot as plot  # plot(["runs/one", "runs/other"], Path("plots.png"))

__version__: str
