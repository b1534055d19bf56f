"""The configuration of a run: frozen dataclasses that are checked when they are made, and their JSON form.

The docstring below a field is its text in `--help`. Defaults are the paper's values where the paper states one.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from transformer_jax.runtime.fields import (
    Bounds,
    Checked,
    Count,
    CountOrZero,
    NonNegativeFloat,
    PositiveFloat,
    Probability,
    from_tree,
    require,
)
from transformer_jax.runtime.files import parse_json, read_text
from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, UNK_ID, UserError

FloatType = Literal["float32", "bfloat16", "float64"]


class StackSize(NamedTuple):
    """The sizes of the encoder or the decoder, with all defaults resolved."""

    num_layers: int
    num_heads: int
    d_ff: int
    d_k: int
    d_v: int


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The choices that decide which function the model computes and the shapes of its parameters (paper section 3).

    Raises:
        UserError: A value is not legal, or two values contradict each other.
    """

    vocab_size: Count = 37_000
    """Exact number of rows of the target embedding table. A tokenizer may have fewer entries, never more."""
    source_vocab_size: Count | None = None
    """Number of rows of the source embedding table. None uses vocab_size, which tie_embeddings all requires."""
    d_model: Count = 512
    """Width of the input and output of every layer."""
    num_layers: Count = 6
    """Number of layers of the encoder, and of the decoder (N in the paper)."""
    num_heads: Count = 8
    """Number of attention heads per layer (h in the paper)."""
    d_ff: Count = 2048
    """Inner width of the feed-forward networks."""
    d_k: Count | None = None
    """Width of the queries and keys of one head. None uses d_model / num_heads."""
    d_v: Count | None = None
    """Width of the values of one head. None uses d_model / num_heads."""
    decoder_num_layers: Count | None = None
    """Number of decoder layers. None uses num_layers."""
    decoder_num_heads: Count | None = None
    """Number of attention heads per decoder layer. None uses num_heads."""
    decoder_d_ff: Count | None = None
    """Inner width of the decoder's feed-forward networks. None uses d_ff."""
    decoder_d_k: Count | None = None
    """Width of the queries and keys of one decoder head. None uses d_k, or d_model / decoder_num_heads."""
    decoder_d_v: Count | None = None
    """Width of the values of one decoder head. None uses d_v, or d_model / decoder_num_heads."""

    norm_position: Literal["post", "pre"] = "post"
    """Place of layer normalization. post: LayerNorm(x + Sublayer(x)), as in the paper. pre: x + Sublayer(LayerNorm(x)),
    as in tensor2tensor since October 2017."""
    final_norm: bool = False
    """Whether each stack ends with one more LayerNorm, as in torch.nn.Transformer. Usual with norm_position pre."""
    norm_epsilon: NonNegativeFloat = 1e-6
    """Epsilon of LayerNorm: 1e-6 in the paper's released code, 1e-5 in PyTorch and Marian."""
    norm_variant: Literal["standard", "unbiased_std"] = "standard"
    """Formula of LayerNorm. standard: (x - mean) / sqrt(variance + epsilon). unbiased_std: (x - mean) / (std +
    epsilon), where std divides by n - 1."""
    activation: Literal["relu", "gelu", "swish"] = "relu"
    """Activation of the feed-forward networks. gelu is the exact form, x * Phi(x)."""
    attention_bias: bool = False
    """Whether the projections of attention have biases, as in the first released code. The paper has none."""
    logits_bias: bool = False
    """Whether a bias is added to the logits."""

    residual_dropout: Probability = 0.1
    """Dropout rate of sub-layer outputs and of the sums of embeddings and positions (P_drop, paper section 5.4)."""
    attention_dropout: Probability = 0.0
    """Dropout rate of the attention weights: 0 in the paper and its first code, 0.1 in later code."""
    activation_dropout: Probability = 0.0
    """Dropout rate after the feed-forward activation: 0 in the paper and its first code, 0.1 in later code."""

    positions: Literal["interleaved", "halves", "learned"] = "interleaved"
    """Positional encoding. interleaved: alternating sines and cosines (paper). halves: sines, then cosines. learned: a
    table of parameters."""
    position_exponent: Literal["paper", "tensor2tensor"] = "paper"
    """Wavelength of the i-th sinusoid. paper: 10000^(2i / d_model). tensor2tensor: 10000^(i / (d_model / 2 - 1)), as in
    tensor2tensor and fairseq."""
    position_offset: CountOrZero = 0
    """Number of the first position: 0 in the paper, 1 in OpenNMT-tf, the padding id + 1 in fairseq."""
    max_length: Count = 1024
    """Number of rows of each learned position table. Sinusoidal positions have no maximum."""
    tie_embeddings: Literal["all", "target", "none"] = "all"
    """Tables that share parameters. all: source, target and logits (paper section 3.4). target: target, logits."""
    scale_embeddings: bool = True
    """Whether embeddings are multiplied by sqrt(d_model) (paper section 3.4)."""

    decoder_start: Literal["bos", "eos", "pad", "zeros"] = "bos"
    """First input of the decoder: the embedding of BOS, EOS (fairseq) or PAD (Marian), or zeros (released code)."""
    source_bos: bool = False
    """Whether the source starts with BOS, as in annotated-transformer's batches and in PyTorch's tutorials."""
    source_eos: bool = True
    """Whether the source ends with EOS."""
    pad_id: CountOrZero = PAD_ID
    """Token id of padding."""
    bos_id: CountOrZero = BOS_ID
    """Token id of the beginning of a sentence."""
    eos_id: CountOrZero = EOS_ID
    """Token id of the end of a sentence."""
    unk_id: CountOrZero = UNK_ID
    """Token id of text that the tokenizer does not know."""

    initialization: Literal["tensor2tensor", "xavier_uniform", "torch_fused"] = "tensor2tensor"
    """Distribution of the initial parameters. tensor2tensor: N(0, 1 / d_model) for embeddings, Xavier uniform
    elsewhere. xavier_uniform: Xavier uniform everywhere. torch_fused: tensor2tensor, with query, key and value
    initialized as one matrix, as in torch.nn.MultiheadAttention."""
    dtype: FloatType = "float32"
    """Data type of the computation. Softmax, LayerNorm and logits use at least float32."""
    param_dtype: FloatType = "float32"
    """Data type of the parameters."""
    attention_kernel: Literal["auto", "xla"] = "auto"
    """Implementation of attention. xla: three operations. auto: cuDNN's fused kernel where it applies (NVIDIA GPUs
    since Ampere, dtype bfloat16, attention_dropout 0), xla elsewhere."""
    remat: Literal["none", "layers", "dots"] = "none"
    """Values that the backward pass recomputes to save memory. layers: each layer, for a third more work. dots: all but
    the products with parameters, for little more work. On CPUs it needs scan_layers."""
    scan_layers: bool = False
    """Whether the layers of a stack are one loop, which compiles faster, runs slower, and has identical parameters."""

    def __post_init__(self) -> None:
        """Replace data types by their names, and check the fields."""
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, _dtype_name(getattr(self, name)))
        super().__post_init__()

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the checks that involve several fields."""
        for prefix, heads in (("", self.num_heads), ("decoder_", self.decoder_num_heads or self.num_heads)):
            heads_name = "decoder_num_heads" if prefix and self.decoder_num_heads else "num_heads"
            for width in ("d_k", "d_v"):
                is_set = getattr(self, prefix + width) or getattr(self, width)
                yield (
                    is_set or self.d_model % heads == 0,
                    f"model.{heads_name} does not divide model.d_model. Change one of them, or set "
                    f"--model.{(prefix + width).replace('_', '-')}",
                )
        if self.positions == "learned":
            yield self.position_offset < self.max_length, "model.position_offset must be below model.max_length"
        else:
            yield self.d_model % 2 == 0, "model.positions needs an even model.d_model"
            if self.position_exponent == "tensor2tensor":
                yield self.d_model >= 4, "model.position_exponent needs model.d_model of at least 4"
        if self.tie_embeddings == "all":
            yield (
                self.source_rows == self.vocab_size,
                "model.source_vocab_size differs from model.vocab_size, and model.tie_embeddings needs equal sizes. "
                "Set --model.tie-embeddings to target or none, or make the sizes equal",
            )
        if self.norm_variant == "unbiased_std":
            yield self.d_model >= 2, "model.norm_variant needs model.d_model of at least 2"
        yield self.pad_id != self.eos_id, "model.pad_id and model.eos_id must differ"
        yield (
            not self.source_bos or self.pad_id != self.bos_id,
            "model.source_bos needs model.bos_id to differ from model.pad_id, or the source's BOS would be masked as "
            "padding: change --model.bos-id",
        )
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            # UNK needs a row only in the source table: a target vocabulary may have no UNK.
            rows = self.source_rows if name == "unk_id" else min(self.vocab_size, self.source_rows)
            yield getattr(self, name) < rows, f"model.{name} must be below {rows}, the rows of the table"

    @property
    def source_rows(self) -> int:
        """Number of rows of the source embedding table."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def encoder(self) -> StackSize:
        """Sizes of the encoder, with all defaults resolved."""
        width = self.d_model // self.num_heads
        return StackSize(self.num_layers, self.num_heads, self.d_ff, self.d_k or width, self.d_v or width)

    @property
    def decoder(self) -> StackSize:
        """Sizes of the decoder, with all defaults resolved."""
        num_heads = self.decoder_num_heads or self.num_heads
        width = self.d_model // num_heads
        return StackSize(
            self.decoder_num_layers or self.num_layers,
            num_heads,
            self.decoder_d_ff or self.d_ff,
            self.decoder_d_k or self.d_k or width,
            self.decoder_d_v or self.d_v or width,
        )

    @property
    def start_id(self) -> int:
        """Token id at the first position of `tgt_in`. Its embedding is not used if `decoder_start` is "zeros"."""
        return {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id, "zeros": self.bos_id}[self.decoder_start]

    @classmethod
    def base(cls, vocab_size: int, **changes: Any) -> Self:
        """Return the base model of Table 3: N 6, d_model 512, d_ff 2048, h 8, d_k = d_v = 64, P_drop 0.1.

        >>> ModelConfig.base(37_000).encoder
        StackSize(num_layers=6, num_heads=8, d_ff=2048, d_k=64, d_v=64)
        """
        return cls(vocab_size=vocab_size, **changes)

    @classmethod
    def big(cls, vocab_size: int, **changes: Any) -> Self:
        """Return the big model of Table 3: d_model 1024, d_ff 4096, h 16, P_drop 0.3 (0.1 for English to French).

        >>> ModelConfig.big(37_000, residual_dropout=0.1).decoder
        StackSize(num_layers=6, num_heads=16, d_ff=4096, d_k=64, d_v=64)
        """
        sizes: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "residual_dropout": 0.3}
        return cls(vocab_size=vocab_size, **(sizes | changes))


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where sentence pairs come from and how they are grouped into batches (paper section 5.1).

    Raises:
        UserError: A value is not legal, or two values contradict each other.
    """

    source: Literal["numbers", "copy", "text", "tsv", "jsonl", "huggingface", "tfds"] = "numbers"
    """Kind of corpus. numbers: generated spelled-out numbers. copy: generated symbols to repeat. text: two parallel
    files per split. tsv, jsonl: one file per split, a column per side. huggingface, tfds: a library's dataset."""
    directory: str = ""
    """Folder of the corpus. text, tsv, jsonl: the folder of the files. huggingface: a folder written by save_to_disk.
    tfds: the data_dir."""
    name: str = ""
    """huggingface, tfds: name of the dataset, such as wmt14 or wmt14_translate/de-en."""
    subset: str = ""
    """huggingface: name of the dataset's configuration, such as de-en."""
    train: str = "train"
    """Training split: the name of the split, or the stem of its files. Text files are STEM.LANGUAGE, optionally with
    .gz, .xz or .zst; the others are STEM.tsv and STEM.jsonl."""
    valid: str = "valid"
    """Validation split. Empty disables validation."""
    test: str = "test"
    """Test split. Empty disables the test."""
    source_language: str = "en"
    """Language of the source: ending of its text file, and name of its column unless source_column is set."""
    target_language: str = "de"
    """Language of the target: ending of its text file, and name of its column unless target_column is set."""
    source_column: str = ""
    """tsv, jsonl, huggingface, tfds: column of the source. tsv: a name in the first line, or a number from 1."""
    target_column: str = ""
    """tsv, jsonl, huggingface, tfds: column of the target. tsv: a name in the first line, or a number from 1."""
    synthetic_train_size: Count = 40_000
    """numbers, copy: number of generated training pairs."""
    synthetic_valid_size: CountOrZero = 500
    """numbers, copy: number of generated validation pairs, none of which is a training pair."""
    synthetic_test_size: CountOrZero = 2_000
    """numbers, copy: number of generated test pairs, none of which is a training or validation pair."""

    max_length: Count = 256
    """Maximum length of a training sentence in tokens, EOS included. Longer pairs are left out and logged."""
    max_length_ratio: Annotated[float, Bounds("at least 1", 1)] = 9.0
    """Maximum ratio of the lengths of a training pair's sides. Pairs with a larger ratio are left out and logged."""
    batch_tokens: Count = 25_000
    """Maximum number of tokens per batch on each side, padding included, over all devices."""
    max_shapes: Count = 12
    """Maximum number of different batch shapes. Each shape is compiled once."""
    batching: Literal["bucketed", "packed"] = "bucketed"
    """Content of a row. bucketed: one pair; a batch has pairs of similar length. packed: several pairs, which do not
    attend to each other; all batches have one shape."""
    packed_length: Count = 256
    """packed: number of tokens of a row on each side. It must be at least max_length."""
    prefetch: Count = 8
    """Number of batches prepared ahead of the training step."""

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the checks that involve several fields."""
        if self.source in ("text", "tsv", "jsonl"):
            yield self.directory, "data.source needs a folder: set --data.directory"
        elif self.source == "huggingface":
            has_one = bool(self.name) != bool(self.directory)
            yield has_one, "data.source needs either data.name or data.directory, not both or none"
        elif self.source == "tfds":
            yield self.name, "data.source needs a dataset: set --data.name"
        yield self.train, "data.train names no split: set --data.train"
        size = self.synthetic_train_size + self.synthetic_valid_size + self.synthetic_test_size
        yield size <= 1_000_000, f"data.synthetic_*_size add up to {size}; at most 1000000 is legal"
        yield (
            self.batch_tokens >= self.max_length,
            "data.batch_tokens is less than data.max_length: the longest pair would not fit into a batch",
        )
        if self.batching == "packed":
            fits = self.max_length <= self.packed_length <= self.batch_tokens
            yield fits, "data.batching needs data.packed_length from data.max_length to data.batch_tokens"


@dataclass(frozen=True)
class TokenizerConfig(Checked):
    """How text becomes token ids. The vocabulary sizes are model.vocab_size and model.source_vocab_size.

    Raises:
        UserError: A value is not legal.
    """

    kind: Literal["bpe", "word", "pretokenized", "sentencepiece", "subword_nmt", "huggingface"] = "bpe"
    """Kind of tokenizer. bpe: byte pairs; any text round-trips. word: words between spaces. pretokenized: text split by
    subword-nmt, with '@@ ' inside words; output is joined again. sentencepiece, subword_nmt, huggingface (a
    tokenizer.json): tokenizers of imported models, which cannot be trained here."""
    joint: bool = True
    """Whether both sides share one vocabulary. Required by tie_embeddings all."""
    min_frequency: Count = 1
    """Minimum number of occurrences of a word in the vocabulary (word, pretokenized), or of a merged pair (bpe)."""


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """The training recipe (paper sections 5.3 and 5.4) and what the run writes while it trains.

    Raises:
        UserError: A value is not legal, or two values contradict each other.
    """

    num_steps: Count = 100_000
    """Number of training steps (updates) of the run."""
    seed: CountOrZero = 0
    """Seed of the initial parameters, of the order of the data and of dropout."""
    schedule: Literal["noam", "inverse_sqrt", "constant"] = "noam"
    """Learning rate. noam: scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), as in the paper. inverse_sqrt,
    constant: linear to peak_learning_rate during warmup_steps, then proportional to step^-0.5, or constant."""
    warmup_steps: Count = 4000
    """Number of steps until the learning rate reaches its peak. It may exceed num_steps."""
    learning_rate_scale: PositiveFloat = 1.0
    """noam: factor of the learning rate, 1 in the paper and 2 in later code."""
    peak_learning_rate: PositiveFloat = 7e-4
    """inverse_sqrt, constant: maximum learning rate."""
    adam_beta1: Probability = 0.9
    """Adam's beta_1."""
    adam_beta2: Probability = 0.98
    """Adam's beta_2."""
    adam_epsilon: PositiveFloat = 1e-9
    """Adam's epsilon."""
    clip_norm: PositiveFloat | None = None
    """Maximum global norm of the gradient; larger gradients are scaled down to it. None disables clipping."""
    label_smoothing: Probability = 0.1
    """Probability that is taken from the correct token and spread over other tokens (epsilon_ls)."""
    label_smoothing_over: Literal["non_target", "all", "non_target_non_pad"] = "non_target"
    """Tokens that receive the smoothing probability. non_target: the V - 1 other tokens (released code, fairseq). all:
    all V tokens (PyTorch, optax). non_target_non_pad: the V - 2 tokens that are neither correct nor padding
    (annotated-transformer, joeynmt)."""
    accumulate: Count = 1
    """Number of parts of each batch, to save memory. Their gradients are summed; only dropout depends on it."""
    dropout_generator: Literal["hash", "threefry"] = "hash"
    """Random number generator of dropout. hash: a fast hash of the element's index. threefry: JAX's default generator,
    several times slower."""
    loss_chunk_mb: Count = 256
    """Maximum size of the logits in memory, in MB of float32 per device. Larger batches are computed in chunks."""
    mesh_data: int = -1
    """Number of devices along the mesh axis data, over which batches are split. -1 uses all remaining devices."""
    mesh_fsdp: Count = 1
    """Number of devices along the mesh axis fsdp, over which batches, parameters and optimizer state are split."""
    mesh_tensor: Count = 1
    """Number of devices along the mesh axis tensor, over which heads and inner widths are split."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """Reaction to a step whose loss or gradient is not finite, which changes no parameter. stop: end the run. skip:
    continue, and end the run after 10 consecutive such steps."""
    init_from: str = ""
    """Folder of a run whose weights and tokenizer this run starts from (fine-tuning). Empty: random weights."""

    log_every: Count = 50
    """Number of steps between rows of metrics."""
    validate_every: Count = 1000
    """Number of steps between validations. The last step is always followed by one."""
    valid_sentences: CountOrZero = 500
    """Number of validation sentences to translate for BLEU. 0 disables BLEU."""
    num_samples: CountOrZero = 4
    """Number of sample translations to log at each validation. 0 disables samples."""
    checkpoint_every: Count = 1000
    """Number of steps between checkpoints. Each validation and the last step also write one."""
    checkpoint_seconds: PositiveFloat = 600.0
    """Maximum number of seconds between checkpoints. The paper wrote one every 10 minutes."""
    keep_checkpoints: Count = 5
    """Number of most recent checkpoints to keep. The best one is always kept."""
    keep_every: CountOrZero = 0
    """Interval in steps of checkpoints to keep forever. 0 keeps none forever."""
    best_by: Literal["valid_loss", "valid_bleu"] = "valid_loss"
    """Metric that decides which checkpoint is the best."""
    patience: CountOrZero = 0
    """Maximum number of consecutive validations without improvement in best_by. 0 disables early stopping."""
    ema_decay: Probability = 0.0
    """Decay of an exponential moving average of the parameters, which validation and decoding use. 0 disables it."""
    average_last: CountOrZero = 0
    """Number of last checkpoints to average after the last step (paper section 6.1: 5). 0 disables averaging."""

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the checks that involve several fields."""
        is_legal = self.mesh_data == -1 or self.mesh_data >= 1
        yield is_legal, "training.mesh_data must be at least 1, or -1 for all devices"
        is_legal = self.average_last <= self.keep_checkpoints
        yield is_legal, "training.average_last is more than training.keep_checkpoints"


@dataclass(frozen=True)
class DecodingConfig(Checked):
    """How translations are searched for (paper section 6.1).

    Raises:
        UserError: A value is not legal.
    """

    beam_size: Count = 4
    """Number of hypotheses kept per sentence (k). 1 is greedy search."""
    alpha: NonNegativeFloat = 0.6
    """Exponent of the length penalty."""
    length_penalty: Literal["gnmt", "power", "none"] = "gnmt"
    """Divisor of a hypothesis's log-probability. gnmt: ((5 + length) / 6)^alpha. power: length^alpha. none: 1."""
    stopping: Literal["paper", "huggingface", "ctranslate2"] = "paper"
    """Rule that ends the search for a sentence. paper: no live hypothesis can win. Others: as in that library."""
    max_length_offset: CountOrZero = 50
    """Maximum length of a translation in tokens beyond the length of its source, EOS included on both sides."""
    min_length: CountOrZero = 0
    """Minimum number of tokens before EOS. 0 allows an empty output, as in the paper; fairseq and CTranslate2 use 1."""
    forbidden_ids: tuple[int, ...] = ()
    """Token ids that are never generated, in addition to padding and to ids that the tokenizer does not have."""
    renormalize_logits: bool = False
    """Whether ids that are never generated are excluded before the softmax, so that all other probabilities add up to 1
    (Hugging Face's renormalize_logits). Stopping ctranslate2 always excludes them before, except for padding."""
    checkpoint: str = "last"
    """Parameters to use: last, best, average, or the number of a step."""
    max_source: Count = 1024
    """Maximum number of source tokens. Longer sources are truncated with a warning."""
    batch_tokens: Count = 8_192
    """Maximum number of source tokens per batch, padding included. On a CPU at most 512 are used, or 1,024 for greedy
    search with more than 100 MB of weights, and several batches run at the same time."""
    quantization: Literal["none", "bfloat16", "int8"] = "none"
    """Precision of the weights. none: as trained. bfloat16: 16 bits, for the computation too. int8: matrices of 8 bits
    with a scale per output, which is faster on CPUs."""

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the check of the text of `checkpoint`."""
        is_legal = re.fullmatch(r"last|best|average|\d{1,18}", self.checkpoint)
        yield is_legal, "decoding.checkpoint must be last, best, average or the number of a step"


@dataclass(frozen=True)
class Sampling(Checked):
    """Distribution from which tokens are drawn: softmax(logits / temperature), cut to the top k, then to the top p.

    Raises:
        UserError: A value is not legal.
    """

    temperature: Annotated[float, Bounds("at least 1e-6 (for 0, use beam_size 1 without sampling)", 1e-6)] = 1.0
    """Divisor of the logits. Values below 1 favor probable tokens. 1 keeps the model's own probabilities."""
    top_k: CountOrZero = 0
    """Number of most probable tokens to draw from (Fan et al. 2018). 0 draws from all tokens."""
    top_p: Annotated[float, Bounds("more than 0 and at most 1", 0, math.nextafter(1, 2), low_is_legal=False)] = 1.0
    """Probability of the smallest set of most probable tokens to draw from (Holtzman et al. 2020). 1 uses all."""


@dataclass(frozen=True)
class Config:
    """The configuration of a run: model, data, tokenizer, training and decoding.

    Raises:
        UserError: Values of two sections contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        """Check the sections together."""
        for is_legal, message in self._rules():
            require(is_legal, message, *vars(self).values())

    def _rules(self) -> Iterator[tuple[object, str]]:
        model, training, decoding = self.model, self.training, self.decoding
        if self.tokenizer.joint:
            is_equal = model.source_rows == model.vocab_size
            yield is_equal, "tokenizer.joint needs model.source_vocab_size to equal model.vocab_size"
        else:
            is_legal = model.tie_embeddings != "all"
            yield is_legal, "model.tie_embeddings needs a joint vocabulary, not tokenizer.joint"
        if model.positions == "learned":
            fits = self.data.max_length + model.position_offset <= model.max_length
            yield fits, "model.max_length is too short for data.max_length plus model.position_offset"
        yield (
            all(0 <= i < model.vocab_size and i != model.eos_id for i in decoding.forbidden_ids),
            "decoding.forbidden_ids must be below model.vocab_size and must not contain model.eos_id",
        )
        if not self.data.valid:
            yield not training.patience, "training.patience needs a validation split: set --data.valid"
            yield decoding.checkpoint != "best", "decoding.checkpoint needs a validation split: set --data.valid"
        if training.best_by == "valid_bleu":
            yield training.valid_sentences, "training.best_by needs training.valid_sentences of at least 1"

    def with_changes(self, **sections: Mapping[str, object]) -> Self:
        """Return a copy with other values of some fields, by section.

        >>> Config().with_changes(model={"d_ff": 1024}, training={"num_steps": 500}).model.d_ff
        1024
        """
        changed = {name: dataclasses.replace(getattr(self, name), **changes) for name, changes in sections.items()}
        return dataclasses.replace(self, **changed)

    def to_json(self) -> str:
        """Return all fields as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "config.json") -> Self:
        """Read what `to_json` of this or an earlier version wrote. Missing fields keep their defaults.

        Raises:
            UserError: The text is not a JSON object, or a field or value in it is not legal. The message starts with
                `origin`.
        """
        tree = parse_json(text, origin)
        try:
            return from_tree(cls, _with_current_names(tree))
        except UserError as error:
            raise UserError(f"{origin}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that holds `to_json`, such as the `config.json` of a run. Errors are those of `from_json`."""
        return cls.from_json(read_text(path), str(path))

    def flat(self) -> dict[str, Any]:
        """Return every field under its full name: {"model.vocab_size": ..., ...}."""
        return {
            f"{section.name}.{item.name}": getattr(getattr(self, section.name), item.name)
            for section in dataclasses.fields(self)
            for item in dataclasses.fields(getattr(self, section.name))
        }


RENAMED_FIELDS = {
    "data": {
        "numbers_train": "synthetic_train_size",
        "numbers_valid": "synthetic_valid_size",
        "numbers_test": "synthetic_test_size",
    },
    "training": {"smoothing_mass": "label_smoothing_over", "logits_megabytes": "loss_chunk_mb"},
    "decoding": {
        "max_extra": "max_length_offset",
        "renormalise": "renormalize_logits",
        "weights": "quantization",
    },
}
"""{section: {name in runs of format 1: name now}}. The command line answers old flags from this table too."""
RENAMED_VALUES = {
    ("tokenizer", "kind"): {"presegmented": "pretokenized"},
    ("training", "label_smoothing_over"): {"others": "non_target", "others_without_pad": "non_target_non_pad"},
    ("decoding", "quantization"): {"model": "none"},
}
"""{(section, name now): {value in runs of format 1: value now}}."""


def _with_current_names(tree: object) -> object:
    """Return the JSON tree of a configuration with the fields and values of earlier formats renamed."""
    if not isinstance(tree, dict):
        return tree
    renamed = {}
    for section, fields in tree.items():
        if isinstance(fields, dict):
            names = RENAMED_FIELDS.get(section, {})
            fields = {names.get(name, name): value for name, value in fields.items()}
            for name, value in fields.items():
                if isinstance(value, str):
                    fields[name] = RENAMED_VALUES.get((section, name), {}).get(value, value)
        renamed[section] = fields
    return renamed


def _dtype_name(dtype: Any) -> Any:
    """Return the name of a data type such as `jnp.bfloat16` or `np.dtype("float32")`; other values stay."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name if isinstance(name, str) else dtype
