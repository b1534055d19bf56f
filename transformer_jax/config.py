"""The configuration of a run: frozen dataclasses, checked when made, and their JSON form.

The docstring under a field is its `--help`. A default is the paper's value where the paper has one.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, UNK_ID, UserError

FloatType = Literal["float32", "bfloat16", "float64"]


class StackSize(NamedTuple):
    """The sizes of one stack (encoder or decoder), every default resolved."""

    num_layers: int
    num_heads: int
    d_ff: int
    d_k: int
    d_v: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the function the model computes and the shapes of its parameters (paper section 3)."""

    vocab_size: int = 37_000
    """Rows of the (target) embedding table, exactly. A tokenizer may have fewer entries, never more."""
    source_vocab_size: int | None = None
    """Rows of the source embedding table; None: as vocab_size. May differ unless all embeddings are tied."""
    d_model: int = 512
    """Width of every layer's input and output."""
    num_layers: int = 6
    """N: layers of each stack."""
    num_heads: int = 8
    """h: attention heads of every layer."""
    d_ff: int = 2048
    """Inner width of the feed-forward networks."""
    d_k: int | None = None
    """Width of a head's queries and keys; None: d_model / num_heads."""
    d_v: int | None = None
    """Width of a head's values; None: d_model / num_heads."""
    decoder_num_layers: int | None = None
    """Layers of the decoder; None: num_layers."""
    decoder_num_heads: int | None = None
    """Heads of the decoder's layers; None: num_heads."""
    decoder_d_ff: int | None = None
    """Inner width of the decoder's feed-forward networks; None: d_ff."""
    decoder_d_k: int | None = None
    """d_k of the decoder; None: d_k if that is given, else d_model / decoder_num_heads."""
    decoder_d_v: int | None = None
    """d_v of the decoder; None: d_v if that is given, else d_model / decoder_num_heads."""

    norm_position: Literal["post", "pre"] = "post"
    """post: LayerNorm(x + Sublayer(x)), the paper. pre: x + Sublayer(LayerNorm(x)), tensor2tensor since 2017-10."""
    final_norm: bool = False
    """One more LayerNorm after the last layer of each stack (torch.nn.Transformer; usual with norm_position pre)."""
    norm_epsilon: float = 1e-6
    """LayerNorm's epsilon: 1e-6 in the released code, 1e-5 in PyTorch and Marian."""
    norm_variant: Literal["standard", "unbiased_std"] = "standard"
    """standard: (x - mean) / sqrt(variance + epsilon). unbiased_std: (x - mean) / (std with n - 1, + epsilon)."""
    activation: Literal["relu", "gelu", "swish"] = "relu"
    """Between the two products of the feed-forward network; gelu is the exact one, x * Phi(x)."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections: not in the formula, in the first released code."""
    logits_bias: bool = False
    """A bias on the logits."""

    residual_dropout: float = 0.1
    """P_drop: on every sub-layer's output and on the sums of embeddings and positions (paper section 5.4)."""
    attention_dropout: float = 0.0
    """On the attention weights: 0 in the paper and its first code, 0.1 in later code."""
    activation_dropout: float = 0.0
    """After the feed-forward activation: 0 in the paper and its first code, 0.1 in later code."""

    positions: Literal["interleaved", "halves", "learned"] = "interleaved"
    """interleaved: sine and cosine in turn, the paper. halves: all sines, then all cosines. learned: a table."""
    position_exponent: Literal["paper", "tensor2tensor"] = "paper"
    """Wavelength of the i-th pair: 10000^(2i / d_model), or 10000^(i / (d_model / 2 - 1)) in tensor2tensor, fairseq."""
    position_offset: int = 0
    """Number of the first position: 0 in the paper, 1 in OpenNMT, padding index + 1 in fairseq."""
    max_length: int = 1024
    """Rows of the learned position tables; sinusoids have no end."""
    tie_embeddings: Literal["all", "target", "none"] = "all"
    """all: one table for source, target and logits (paper section 3.4). target: target and logits share. none."""
    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(d_model) (paper section 3.4)."""

    decoder_start: Literal["bos", "eos", "pad", "zeros"] = "bos"
    """What the decoder reads first: the embedding of BOS, EOS (fairseq) or PAD (Marian), or zeros (released code)."""
    source_bos: bool = False
    """Whether the source starts with BOS, as in annotated-transformer's own batches and in PyTorch's tutorials."""
    source_eos: bool = True
    """Whether the source ends with EOS."""
    pad_id: int = PAD_ID
    """Id of the padding."""
    bos_id: int = BOS_ID
    """Id of the beginning of a sentence."""
    eos_id: int = EOS_ID
    """Id of the end of a sentence."""
    unk_id: int = UNK_ID
    """Id of what the tokenizer does not know."""

    initialization: Literal["tensor2tensor", "xavier_uniform", "torch_fused"] = "tensor2tensor"
    """tensor2tensor: embeddings N(0, 1 / d_model), Xavier uniform elsewhere. xavier_uniform: embeddings too.
    torch_fused: as tensor2tensor, but query, key and value drawn as one matrix, as torch.nn.MultiheadAttention."""
    dtype: FloatType = "float32"
    """Of the computation. Softmax, LayerNorm and logits are computed in at least float32."""
    param_dtype: FloatType = "float32"
    """Of the parameters."""
    attention_kernel: Literal["auto", "xla"] = "auto"
    """What computes attention. xla: three operations. auto: cuDNN's fused kernel where it can serve, on NVIDIA GPUs
    since Ampere, with dtype bfloat16 and without attention_dropout; xla elsewhere."""
    remat: Literal["none", "layers", "dots"] = "none"
    """layers: the backward pass computes each layer again: less memory, a third more work. dots: it keeps what the
    products with parameters give and computes the rest again: hardly more work. On CPUs they need scan_layers."""
    scan_layers: bool = False
    """Compile a stack's layers as one loop: compiles faster, runs slower. The parameters are the same."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "max_length"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("source_vocab_size", "d_k", "d_v", *(f"decoder_{n}" for n in StackSize._fields)):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"model.{name} is {value}; it must be at least 1")
        for name in ("residual_dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"model.{name} is {value}; a dropout rate is at least 0 and below 1")
        _require(self.norm_epsilon >= 0, f"model.norm_epsilon is {self.norm_epsilon}; it must not be negative")
        _require(self.position_offset >= 0, f"model.position_offset is {self.position_offset}; it must not be negative")
        for prefix, heads in (("", self.num_heads), ("decoder_", self.decoder_num_heads or self.num_heads)):
            for width in ("d_k", "d_v"):
                given = getattr(self, prefix + width) or getattr(self, width)
                _require(
                    given is not None or self.d_model % heads == 0,
                    f"model.d_model {self.d_model} is not divisible by model.{prefix}num_heads {heads}: "
                    f"change one of them, or give model.{prefix}{width}",
                )
        _require(
            self.positions == "learned" or self.d_model % 2 == 0,
            f"model.d_model is {self.d_model} and model.positions {self.positions!r}: sinusoids need an even d_model",
        )
        _require(
            self.positions == "learned" or self.position_exponent == "paper" or self.d_model >= 4,
            f"model.d_model is {self.d_model} and model.position_exponent {self.position_exponent!r}: "
            "that exponent needs a d_model of at least 4",
        )
        _require(
            self.positions != "learned" or self.position_offset < self.max_length,
            f"model.position_offset {self.position_offset} leaves no row of the model.max_length {self.max_length}",
        )
        _require(
            self.tie_embeddings != "all" or self.source_vocab_size in (None, self.vocab_size),
            f"model.source_vocab_size {self.source_vocab_size} differs from model.vocab_size {self.vocab_size}: "
            "with model.tie_embeddings 'all' they must be equal (use 'target' or 'none')",
        )
        _require(
            self.norm_variant == "standard" or self.d_model >= 2,
            f"model.norm_variant is {self.norm_variant!r} and model.d_model {self.d_model}: it needs at least 2",
        )
        ids = {name: getattr(self, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
        for name, value in ids.items():
            # An unknown word needs a row where it is read; a target vocabulary may be without.
            rows = self.source_rows if name == "unk_id" else min(self.vocab_size, self.source_rows)
            _require(0 <= value < rows, f"model.{name} is {value}; it must lie in a vocabulary of {rows} rows")
        _require(self.pad_id != self.eos_id, f"model.pad_id {self.pad_id} and model.eos_id {self.eos_id} must differ")
        _require(
            not self.source_bos or self.pad_id != self.bos_id,
            f"model.source_bos is True and model.bos_id {self.bos_id} is model.pad_id: the source's BOS would be "
            "masked as padding. Set model.bos_id to another id",
        )

    @property
    def source_rows(self) -> int:
        """Rows of the source embedding table."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def encoder(self) -> StackSize:
        """Sizes of the encoder, defaults resolved."""
        width = self.d_model // self.num_heads
        return StackSize(self.num_layers, self.num_heads, self.d_ff, self.d_k or width, self.d_v or width)

    @property
    def decoder(self) -> StackSize:
        """Sizes of the decoder, defaults resolved."""
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
        """The id that stands first in `tgt_in`. With zeros its embedding is not looked at."""
        return {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id, "zeros": self.bos_id}[self.decoder_start]

    @classmethod
    def base(cls, vocab_size: int, **changes: Any) -> "ModelConfig":
        """The base model of Table 3: N 6, d_model 512, d_ff 2048, h 8, d_k = d_v = 64, P_drop 0.1.

        >>> ModelConfig.base(37_000).encoder
        StackSize(num_layers=6, num_heads=8, d_ff=2048, d_k=64, d_v=64)
        """
        return cls(vocab_size=vocab_size, **changes)

    @classmethod
    def big(cls, vocab_size: int, **changes: Any) -> "ModelConfig":
        """The big model of Table 3: d_model 1024, d_ff 4096, h 16, P_drop 0.3 (0.1 for English to French).

        >>> ModelConfig.big(37_000, residual_dropout=0.1).decoder
        StackSize(num_layers=6, num_heads=16, d_ff=4096, d_k=64, d_v=64)
        """
        sizes: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "residual_dropout": 0.3}
        return cls(vocab_size=vocab_size, **(sizes | changes))


@dataclass(frozen=True)
class DataConfig:
    """Where sentence pairs come from and how they are put into batches (paper section 5.1)."""

    source: Literal["numbers", "copy", "text", "tsv", "jsonl", "huggingface", "tfds"] = "numbers"
    """numbers, copy: made here, no file: spelled-out numbers, symbols to repeat. text: two parallel files a split. tsv,
    jsonl: one file a split, a column for each side. huggingface, tfds: a dataset of theirs, by name or from disk."""
    directory: str = ""
    """text, tsv, jsonl: the folder of the files. huggingface: a folder written by save_to_disk. tfds: its data_dir."""
    name: str = ""
    """huggingface, tfds: name of the dataset, such as wmt14 or wmt14_translate/de-en."""
    subset: str = ""
    """huggingface: name of the dataset's configuration, such as de-en."""
    train: str = "train"
    """The training split: the split's name, or for text, tsv and jsonl the file name's stem. The text files of a stem
    are STEM.LANGUAGE, with .gz, .xz or .zst if packed; the others STEM.tsv or STEM.jsonl."""
    valid: str = "valid"
    """The validation split; empty: none."""
    test: str = "test"
    """The test split; empty: none."""
    source_language: str = "en"
    """Language of the source; also ending of its text file, and its column's name unless source_column is given."""
    target_language: str = "de"
    """Language of the target; also ending of its text file, and its column's name unless target_column is given."""
    source_column: str = ""
    """tsv, jsonl, huggingface, tfds: the source's column. For tsv a name in the first line, or a number from 1."""
    target_column: str = ""
    """The same for the target."""
    synthetic_train_size: int = 40_000
    """numbers, copy: how many numbers below one million, or rows of symbols, are trained on."""
    synthetic_valid_size: int = 500
    """numbers, copy: how many others are for validation."""
    synthetic_test_size: int = 2_000
    """numbers, copy: how many others are held out for the test."""

    max_length: int = 256
    """Training pairs with more tokens than this on a side (EOS counted) are left out, and counted in the log."""
    max_length_ratio: float = 9.0
    """Training pairs of which one side has more than this times the other's tokens are left out (EOS counted), and
    counted in the log."""
    batch_tokens: int = 25_000
    """Tokens of a batch, padding counted, on the source side and on the target side each, over all devices. Empty rows
    are added where devices do not divide the rows."""
    max_shapes: int = 12
    """Batches have at most this many different shapes: each is compiled once."""
    batching: Literal["bucketed", "packed"] = "bucketed"
    """bucketed: a row is a pair, and pairs of about one length share a batch. packed: rows of packed_length tokens on
    each side hold several pairs, which do not see each other; there is one shape."""
    packed_length: int = 256
    """packed: tokens of a row on each side; at least max_length."""
    prefetch: int = 8
    """Batches made ahead of the training step."""

    def __post_init__(self) -> None:
        if self.source in ("text", "tsv", "jsonl"):
            _require(bool(self.directory), f"data.source is {self.source!r} and data.directory {self.directory!r}")
        if self.source == "huggingface":
            _require(
                bool(self.name) != bool(self.directory),
                f"data.source is 'huggingface', data.name {self.name!r} and data.directory {self.directory!r}: "
                "give the name of a dataset or the folder of one, not both",
            )
        if self.source == "tfds":
            _require(bool(self.name), f"data.source is 'tfds' and data.name {self.name!r}: name the dataset")
        _require(bool(self.train), f"data.train is {self.train!r}; name the training split")
        for name in ("synthetic_train_size", "max_length", "batch_tokens", "max_shapes", "prefetch", "packed_length"):
            _require(getattr(self, name) >= 1, f"data.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("synthetic_valid_size", "synthetic_test_size"):
            _require(getattr(self, name) >= 0, f"data.{name} is {getattr(self, name)}; it must not be negative")
        wanted = self.synthetic_train_size + self.synthetic_valid_size + self.synthetic_test_size
        _require(wanted <= 1_000_000, f"data.numbers_* ask for {wanted} numbers; there are 1000000 below one million")
        _require(self.max_length_ratio >= 1, f"data.max_length_ratio is {self.max_length_ratio}; at least 1 is legal")
        _require(
            self.batch_tokens >= self.max_length,
            f"data.batch_tokens {self.batch_tokens} is less than data.max_length {self.max_length}: "
            "the longest pair would fit no batch",
        )
        _require(
            self.batching != "packed" or self.max_length <= self.packed_length <= self.batch_tokens,
            f"data.packed_length is {self.packed_length}; with data.batching 'packed' it must be from data.max_length "
            f"{self.max_length} to data.batch_tokens {self.batch_tokens}",
        )


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes token ids. The sizes come from model.vocab_size and model.source_vocab_size."""

    kind: Literal["bpe", "word", "pretokenized", "sentencepiece", "subword_nmt"] = "bpe"
    """bpe: byte pairs, any text round-trips. word: words between spaces. pretokenized: text that subword-nmt has cut
    already, with '@@ ' inside words; output is joined again. sentencepiece, subword_nmt: those of an imported model;
    they are not trained here."""
    joint: bool = True
    """One vocabulary for both sides; needed where embeddings are tied three ways."""
    min_frequency: int = 1
    """word, pretokenized: rarer words become the unknown token. bpe: rarer pairs are not merged."""

    def __post_init__(self) -> None:
        _require(self.min_frequency >= 1, f"tokenizer.min_frequency is {self.min_frequency}; at least 1 is legal")


@dataclass(frozen=True)
class TrainingConfig:
    """The training recipe (paper sections 5.3 and 5.4) and what the run writes while it trains."""

    num_steps: int = 100_000
    """Training steps (updates) of the whole run."""
    seed: int = 0
    """Of the initial parameters, the order of the data and the dropout."""
    schedule: Literal["noam", "inverse_sqrt", "constant"] = "noam"
    """noam: scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), the paper. inverse_sqrt: linear to
    peak_learning_rate in warmup_steps, then with step^-0.5. constant: linear to the peak, then level."""
    warmup_steps: int = 4000
    """Steps until the peak of the learning rate; a run may be shorter."""
    learning_rate_scale: float = 1.0
    """noam: factor on the learning rate; 1 in the paper, 2 in later code."""
    peak_learning_rate: float = 7e-4
    """inverse_sqrt, constant: the highest learning rate."""
    adam_beta1: float = 0.9
    """Adam's beta_1."""
    adam_beta2: float = 0.98
    """Adam's beta_2."""
    adam_epsilon: float = 1e-9
    """Adam's epsilon."""
    clip_norm: float | None = None
    """Scale gradients whose global norm is larger than this down to it; None: never."""
    label_smoothing: float = 0.1
    """epsilon_ls: probability taken from the right token and spread over others."""
    label_smoothing_over: Literal["non_target", "all", "non_target_non_pad"] = "non_target"
    """Over which tokens it is spread: the V - 1 others (released code, fairseq), all V (PyTorch, optax), or the
    V - 2 that are neither right nor padding (annotated-transformer, joeynmt)."""
    accumulate: int = 1
    """Split each batch into this many parts, one after the other, to save memory; but for the dropout bits the update
    is the same."""
    dropout_generator: Literal["hash", "threefry"] = "hash"
    """Where dropout's random bits come from. hash: a hash of the element's number, a dozen instructions each. threefry:
    JAX's own generator, several times as many."""
    loss_chunk_mb: int = 256
    """Logits that may exist at a time, in millions of bytes of float32 on a device: where a batch has more, the loss
    and its gradient, for which two or three such arrays are needed, are computed in parts, with the same result."""
    mesh_data: int = -1
    """Devices along the mesh axis 'data' (batches split); -1: all that the other axes leave."""
    mesh_fsdp: int = 1
    """Devices along 'fsdp' (batches split, parameters and optimizer split too)."""
    mesh_tensor: int = 1
    """Devices along 'tensor' (heads and inner width split)."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """After a step whose loss or gradient is not finite, which changes nothing: stop, or skip it (10 in a row stop)."""
    init_from: str = ""
    """A run whose weights and tokenizer this one starts from, with a fresh optimizer (fine-tuning)."""

    log_every: int = 50
    """Steps between two logged ones."""
    validate_every: int = 1000
    """Steps between validations; there is one after the last step too."""
    valid_sentences: int = 500
    """So many of the validation split's sentences are translated for BLEU at each validation; 0: none."""
    num_samples: int = 4
    """Sample translations shown and written at each validation."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; there is one at each validation and after the last step too."""
    checkpoint_seconds: float = 600.0
    """Seconds after which a checkpoint is due in any case (the paper wrote one every 10 minutes)."""
    keep_checkpoints: int = 5
    """So many of the last checkpoints are kept, and the best one."""
    keep_every: int = 0
    """Checkpoints of steps that are a multiple of this are kept too; 0: none."""
    best_by: Literal["valid_loss", "valid_bleu"] = "valid_loss"
    """The figure that decides which checkpoint is the best."""
    patience: int = 0
    """After so many validations in a row without a better best_by the training ends; 0: never before num_steps."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the parameters, which then is what validations, the test, translations
    and averages use; 0: none."""
    average_last: int = 0
    """After the last step, average so many of the last checkpoints (paper section 6.1: 5) into the checkpoint
    'average'; 0: none."""

    def __post_init__(self) -> None:
        for name in (
            *("num_steps", "warmup_steps", "accumulate", "log_every", "validate_every", "checkpoint_every"),
            *("keep_checkpoints", "mesh_fsdp", "mesh_tensor", "loss_chunk_mb"),
        ):
            _require(getattr(self, name) >= 1, f"training.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("valid_sentences", "num_samples", "average_last", "seed", "keep_every", "patience"):
            _require(getattr(self, name) >= 0, f"training.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("learning_rate_scale", "peak_learning_rate", "adam_epsilon", "checkpoint_seconds"):
            _require(getattr(self, name) > 0, f"training.{name} is {getattr(self, name)}; it must be more than 0")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing", "ema_decay"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"training.{name} is {value}; it must be at least 0 and below 1")
        _require(self.clip_norm is None or self.clip_norm > 0, f"training.clip_norm is {self.clip_norm}; more than 0")
        _require(self.mesh_data == -1 or self.mesh_data >= 1, f"training.mesh_data is {self.mesh_data}; -1 or more")
        _require(
            self.average_last <= self.keep_checkpoints,
            f"training.average_last is {self.average_last} and training.keep_checkpoints {self.keep_checkpoints}: "
            "only kept checkpoints can be averaged",
        )


@dataclass(frozen=True)
class DecodingConfig:
    """How translations are searched for (paper section 6.1)."""

    beam_size: int = 4
    """k: hypotheses kept for each sentence; 1 is greedy search."""
    alpha: float = 0.6
    """Exponent of the length penalty."""
    length_penalty: Literal["gnmt", "power", "none"] = "gnmt"
    """What a hypothesis's log-probability is divided by: ((5 + length) / 6)^alpha, length^alpha, or nothing."""
    stopping: Literal["paper", "huggingface", "ctranslate2"] = "paper"
    """paper: when no live hypothesis can still win. huggingface, ctranslate2: as those do."""
    max_length_offset: int = 50
    """Longest output: the source's tokens plus this, EOS counted on both sides."""
    forbidden_ids: tuple[int, ...] = ()
    """Ids that are never generated, besides padding and ids that the tokenizer does not have."""
    renormalize_logits: bool = False
    """Ids that are never generated leave the softmax, so that the others' probabilities add up to 1 (Hugging Face's
    renormalize_logits), rather than being struck out after it. Stopping ctranslate2 does so but for padding."""
    checkpoint: str = "last"
    """Which parameters: last, best, average, or the number of a step."""
    max_source: int = 1024
    """Longer sources, in tokens, are cut there, with a warning."""
    batch_tokens: int = 8_192
    """Source tokens of a batch, padding counted and beams not; at most 512 on a CPU, 1,024 for greedy search with more
    than 100 MB of weights, and several batches at a time there."""
    weights: Literal["model", "bfloat16", "int8"] = "model"
    """Of the decoding: model: as they were trained. bfloat16: rounded to 16 bits, and computed with. int8: the matrices
    rounded to 8 bits with a scale for each output, which is faster on CPUs."""

    def __post_init__(self) -> None:
        for name in ("beam_size", "max_source", "batch_tokens"):
            _require(getattr(self, name) >= 1, f"decoding.{name} is {getattr(self, name)}; it must be at least 1")
        _require(
            self.max_length_offset >= 0,
            f"decoding.max_length_offset is {self.max_length_offset}; it must not be negative",
        )
        _require(self.alpha >= 0, f"decoding.alpha is {self.alpha}; it must not be negative")
        _require(
            re.fullmatch(r"last|best|average|\d{1,18}", self.checkpoint) is not None,
            f"decoding.checkpoint is {self.checkpoint!r}; it must be last, best, average or the number of a step",
        )


@dataclass(frozen=True)
class Sampling:
    """What tokens are drawn from: softmax(logits / temperature), cut to the top k, and that to the nucleus of top p.

    Raises:
        UserError: a value that is not legal.
    """

    temperature: float = 1.0
    """Below 1: closer to the most probable token. 1: the model's own probabilities."""
    top_k: int = 0
    """Only the k most probable tokens (Fan et al. 2018); 0: all."""
    top_p: float = 1.0
    """Only the fewest most probable tokens whose probabilities reach p together (Holtzman et al. 2020); 1: all."""

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}; it must be at least 1e-6 (for 0: beam_size 1, no sampling)"
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class Config:
    """A whole run: model, data, tokenizer, training and decoding."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        check_numbers(self.flat())
        _require(
            self.tokenizer.joint or self.model.tie_embeddings != "all",
            f"tokenizer.joint is {self.tokenizer.joint} and model.tie_embeddings {self.model.tie_embeddings!r}: "
            "one table for both sides needs one vocabulary",
        )
        _require(
            not self.tokenizer.joint or self.model.source_rows == self.model.vocab_size,
            f"tokenizer.joint is {self.tokenizer.joint} and model.source_vocab_size {self.model.source_vocab_size} "
            f"differs from model.vocab_size {self.model.vocab_size}: a joint vocabulary has one size",
        )
        _require(
            self.model.positions != "learned"
            or self.data.max_length + self.model.position_offset <= self.model.max_length,
            f"data.max_length {self.data.max_length} (plus model.position_offset {self.model.position_offset}) is more "
            f"than model.max_length {self.model.max_length}, the rows of the learned position table",
        )

        legal = set(range(self.model.vocab_size)) - {self.model.eos_id} if self.decoding.forbidden_ids else set()
        _require(
            legal.issuperset(self.decoding.forbidden_ids),
            f"decoding.forbidden_ids is {self.decoding.forbidden_ids}; legal: ids below model.vocab_size "
            f"{self.model.vocab_size} but for model.eos_id {self.model.eos_id}",
        )
        _require(
            self.training.patience == 0 or bool(self.data.valid),
            f"training.patience is {self.training.patience} and data.valid {self.data.valid!r}: it counts validations",
        )
        _require(
            self.decoding.checkpoint != "best" or bool(self.data.valid),
            f"decoding.checkpoint is 'best' and data.valid {self.data.valid!r}: without validation there is no best",
        )
        _require(
            self.training.best_by != "valid_bleu" or self.training.valid_sentences > 0,
            f"training.best_by is 'valid_bleu' and training.valid_sentences {self.training.valid_sentences}: "
            "BLEU needs sentences",
        )

    def to_json(self) -> str:
        """All fields as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "config.json") -> "Config":
        """The reverse of `to_json`; a field that is not in the text keeps its default.

        Raises:
            UserError: the text is no JSON object, or has a field or value that is not known; `origin` is named.
        """
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: not JSON: {error}") from error
        return from_tree(cls, _with_current_names(tree), origin)

    def flat(self) -> dict[str, Any]:
        """{"model.vocab_size": ..., ...}: every field under its full name."""
        return {
            f"{section.name}.{item.name}": getattr(getattr(self, section.name), item.name)
            for section in dataclasses.fields(Config)  # a subclass may have more
            for item in dataclasses.fields(getattr(self, section.name))
        }


RENAMED_FIELDS = {
    "data": {
        "numbers_train": "synthetic_train_size",
        "numbers_valid": "synthetic_valid_size",
        "numbers_test": "synthetic_test_size",
    },
    "training": {"smoothing_mass": "label_smoothing_over", "logits_megabytes": "loss_chunk_mb"},
    "decoding": {"max_extra": "max_length_offset", "renormalise": "renormalize_logits"},
}
"""Names of fields in runs of format 1, and their names now."""
RENAMED_VALUES = {
    ("tokenizer", "kind"): {"presegmented": "pretokenized"},
    ("training", "label_smoothing_over"): {"others": "non_target", "others_without_pad": "non_target_non_pad"},
}


def _with_current_names(tree: Any) -> Any:
    """Return the JSON tree of a configuration with the fields and values of earlier formats renamed."""
    if not isinstance(tree, dict):
        return tree
    renamed = {}
    for section, fields in tree.items():
        if isinstance(fields, dict):
            names = RENAMED_FIELDS.get(section, {})
            fields = {names.get(name, name): value for name, value in fields.items()}
            for name, value in fields.items():
                values = RENAMED_VALUES.get((section, name), {})
                if isinstance(value, str):
                    fields[name] = values.get(value, value)
        renamed[section] = fields
    return renamed


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Raises UserError for a number that is not finite, which JSON cannot say, or that needs more than 64 bits."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{name} has {value.bit_length()} bits; it must fit into 64")


def from_tree(cls: Any, tree: Any, origin: str, prefix: str = "") -> Any:
    """The dataclass that a tree of JSON objects describes; a field that is not there keeps its default.

    Args:
        cls: a dataclass of scalars, Literals, tuples and such dataclasses.
        tree: what `json.loads` gave.
        origin: the file, for errors.
        prefix: where in it this tree stands, such as `model.`.

    Raises:
        UserError: a field or a value that is not known.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: {prefix or 'the whole'} is {tree!r:.200}; a JSON object is needed")
    kinds = typing.get_type_hints(cls)
    for name in tree:
        if name not in kinds:
            raise UserError(f"{origin}: unknown field {prefix}{name:.100}; known: {', '.join(kinds)}")
    values = {}
    for name, value in tree.items():
        if dataclasses.is_dataclass(kinds[name]):
            values[name] = from_tree(kinds[name], value, origin, f"{prefix}{name}.")
        else:
            values[name] = _checked(kinds[name], value, f"{origin}: {prefix}{name}")
    return cls(**values)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of the annotated type (a scalar, Literal, one of them or None, or a tuple), else UserError."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r:.200}; it must be a list")
        return tuple(_checked(options[0], item, where) for item in value)
    if typing.get_origin(kind) is Literal:
        if value not in options or isinstance(value, bool):
            raise UserError(f"{where} is {value!r:.200}; legal: {', '.join(map(str, options))}")
        return value
    kinds = options or (kind,)
    if float in kinds and type(value) is int and abs(value) < 2**63:
        return float(value)
    if type(value) not in kinds:
        names = " or ".join("None" if item is type(None) else item.__name__ for item in kinds)
        raise UserError(f"{where} is {value!r:.200}; it must be {names}")
    return value
