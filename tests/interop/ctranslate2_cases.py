"""Random models of every kind for CTranslate2, and the outputs of its `translate_batch`."""

import dataclasses
import random

import jax
from interop_cases import odd, random_params

from transformer_jax.config import Config, DecodingConfig, TokenizerConfig
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.types import SPECIAL_TOKENS

EXTRA, BEAMS = 5, 3

WORDS = [f"w{i}" for i in range(18)]
OTHER_WORDS = [f"t{i}" for i in range(14)]
# Every value of every field that changes the function, at least once, in both directions.
MODELS = {
    "paper": {},
    "pre": {"norm_position": "pre", "final_norm": True, "activation": "swish", "attention_bias": True},
    "pre without a last norm": {"norm_position": "pre", "scale_embeddings": False, "tie_embeddings": "none"},
    "post with a last norm": {"final_norm": True, "activation": "gelu", "decoder_start": "zeros"},
    "learned": {"positions": "learned", "position_offset": 2, "tie_embeddings": "target", "decoder_start": "eos"},
    "fairseq": {"positions": "halves", "position_exponent": "tensor2tensor", "position_offset": 2},
    "without source EOS": {"source_eos": False, "norm_epsilon": 1e-2, "decoder_start": "pad", "position_offset": 1},
    "source BOS": {"source_bos": True},
    "two vocabularies": {"tie_embeddings": "none", "logits_bias": True, "source_vocab_size": len(WORDS) + 4},
}


def run(name, spare=0, **decoding):
    """Return a configuration, random parameters and word tokenizers."""
    changes = {"num_layers": 1, "decoder_num_layers": 2} | MODELS[name]
    joint = "source_vocab_size" not in changes
    source = WordTokenizer("word", [*SPECIAL_TOKENS, *WORDS])
    pair = TokenizerPair(source, source if joint else WordTokenizer("word", [*SPECIAL_TOKENS, *OTHER_WORDS]))
    settings = {"beam_size": BEAMS, "alpha": 0.7, "length_penalty": "power", "stopping": "ctranslate2"}
    config = Config(
        model=odd(vocab_size=pair.target.vocab_size + spare, max_length=50, **changes),
        tokenizer=TokenizerConfig(kind="word", joint=joint),
        decoding=DecodingConfig(**(settings | {"max_length_offset": EXTRA} | decoding)),
        data=dataclasses.replace(Config().data, max_length=20),
    )
    params = random_params(config.model, seed=1)
    if config.model.logits_bias:
        # Large enough that the output depends on the source, and that some sentences end before the limit.
        params = jax.tree.map(lambda leaf: leaf * (3 if leaf.ndim > 1 else 1), random_params(config.model, seed=2))
        params["logits_bias"][config.model.eos_id] += 2
    return config, params, pair


def only_min_length(message):
    """Fail for a warning other than that of `decoding.min_length`, which is not the 1 of `translate_batch` here."""
    assert "min_decoding_length=0" in message


def sentences():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=length)) for length in (5, 6, 6, 7, 4, 7)]


def translated(ctranslate2, folder, lines, config, n_best=1):
    """Return [(tokens, log-probability)] of each line. Lines are translated one at a time, as their limits differ."""
    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    decoding = config.decoding
    results = []
    for line in lines:
        tokens = line.split()
        found = translator.translate_batch(
            [tokens],
            beam_size=decoding.beam_size,
            num_hypotheses=n_best,
            length_penalty=decoding.alpha,
            return_scores=True,
            min_decoding_length=0,
            max_decoding_length=len(tokens) + 1 + EXTRA,
            suppress_sequences=[["<pad>"]],
            return_end_token=True,
            return_logits_vocab=False,
        )[0]
        lengths = [len(tokens) ** decoding.alpha for tokens in found.hypotheses]
        scores = [score * length for score, length in zip(found.scores, lengths, strict=True)]
        if decoding.beam_size == 1:
            # Greedy search excludes padding after the softmax, so these are the model's own probabilities.
            (hypothesis,) = found.hypotheses
            words = [token for token in hypothesis if token != "</s>"]
            scores = [sum(translator.score_batch([tokens], [words])[0].log_probs[: len(hypothesis)])]
        results.append(list(zip(found.hypotheses, scores, strict=True)))
    return results
