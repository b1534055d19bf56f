"""Tiny models that together cover every choice of ModelConfig, with random parameters and sentences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import Transformer, abstract_params


def tiny(**changes) -> ModelConfig:
    """Return the config of a model of two small layers."""
    sizes = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12, "max_length": 16}
    return ModelConfig(**(sizes | changes))


CONFIGS = {
    "paper": tiny(),
    "pre": tiny(norm_position="pre"),
    "pre, final norm": tiny(norm_position="pre", final_norm=True),
    "post, final norm": tiny(final_norm=True),
    "unbiased std": tiny(norm_variant="unbiased_std"),
    "large epsilon": tiny(norm_epsilon=0.3),
    "large epsilon, unbiased std": tiny(norm_epsilon=0.3, norm_variant="unbiased_std", norm_position="pre"),
    "gelu": tiny(activation="gelu"),
    "swish": tiny(activation="swish"),
    "attention bias": tiny(attention_bias=True),
    "logits bias": tiny(logits_bias=True),
    "d_k 3, d_v 5": tiny(d_k=3, d_v=5),
    "one head": tiny(num_heads=1),
    "decoder's own sizes": tiny(
        decoder_num_layers=1, decoder_num_heads=4, decoder_d_ff=10, decoder_d_k=3, decoder_d_v=5, attention_bias=True
    ),
    "decoder's own heads": tiny(decoder_num_heads=4, decoder_num_layers=3),
    "interleaved, offset": tiny(position_offset=2),
    "interleaved, tensor2tensor": tiny(position_exponent="tensor2tensor"),
    "halves": tiny(positions="halves"),
    "halves, tensor2tensor, offset": tiny(positions="halves", position_exponent="tensor2tensor", position_offset=1),
    "learned": tiny(positions="learned"),
    "learned, offset": tiny(positions="learned", position_offset=3),
    "odd d_model": tiny(positions="learned", d_model=9, num_heads=3),
    "tied on the target side": tiny(tie_embeddings="target", source_vocab_size=13),
    "not tied": tiny(tie_embeddings="none", source_vocab_size=7, logits_bias=True),
    "not scaled": tiny(scale_embeddings=False),
    "from EOS": tiny(decoder_start="eos"),
    "from PAD": tiny(decoder_start="pad"),
    "from zeros": tiny(decoder_start="zeros"),
    "no source EOS": tiny(source_eos=False),
    "other ids": tiny(pad_id=6, bos_id=0, eos_id=4, unk_id=1),
    "torch": tiny(final_norm=True, norm_epsilon=1e-5, attention_bias=True, initialization="torch_fused"),
    "tensor2tensor": tiny(
        norm_position="pre",
        final_norm=True,
        positions="halves",
        position_exponent="tensor2tensor",
        decoder_start="zeros",
        initialization="xavier_uniform",
    ),
    "marian": tiny(positions="halves", logits_bias=True, activation="swish", decoder_start="pad", attention_bias=True),
    "everything else": tiny(
        norm_position="pre",
        norm_variant="unbiased_std",
        activation="gelu",
        positions="learned",
        position_offset=2,
        tie_embeddings="none",
        source_vocab_size=9,
        scale_embeddings=False,
        decoder_start="eos",
        decoder_num_layers=1,
        d_k=5,
        d_v=2,
    ),
}

every_config = {"argvalues": list(CONFIGS), "ids": [name.replace(" ", "_").replace(",", "") for name in CONFIGS]}


@functools.cache
def random_params(config: ModelConfig, seed: int = 0):
    """Return random NumPy float64 parameters, in which biases are not 0 and scales are not 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        values = rng.normal(size=leaf.shape)
        if name == "scale":
            return 1 + 0.3 * values
        if name in ("kernel", "table"):
            return values * config.d_model**-0.5
        assert name in ("bias", "logits_bias"), name
        return 0.3 * values

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def as_float32(tree):
    return jax.tree.map(np.float32, tree)


def sentences(config: ModelConfig, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return `src` `[4, 5]` and `tgt_in` `[4, 4]`: a full row, a padded row, an empty source, and an empty row."""
    rng = np.random.default_rng(seed)
    special = {config.pad_id, config.bos_id, config.eos_id}

    def words(rows, shape):
        return rng.choice([i for i in range(rows) if i not in special], size=shape).astype(np.int32)

    src, tgt_in = words(config.source_rows, (4, 5)), words(config.vocab_size, (4, 4))
    if config.source_eos:
        src[0, 4] = src[1, 2] = config.eos_id
    src[1, 3:] = src[2:] = config.pad_id
    tgt_in[:, 0] = config.start_id
    tgt_in[1, 2:] = tgt_in[3] = config.pad_id
    return src, tgt_in


@functools.cache
def model_and_inputs(name: str):
    """Return (config, model, params in float32, src, tgt_in) of one of the CONFIGS."""
    config = CONFIGS[name]
    return config, Transformer(config), as_float32(random_params(config)), *sentences(config)


def apply(module, params, *inputs, **options):
    """Call `module.apply` with NumPy arrays converted to JAX arrays, which the model's annotations require."""
    return module.apply({"params": to_jax(params)}, *to_jax(inputs), **to_jax(options))


def to_jax(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
