"""Random Marian folders written by transformers, and the outputs of its `generate`."""

import io
import json

import numpy as np
from interop_cases import logits, real

from transformer_jax.decoding.translator import Translator

# All of them are padded to one length: one shape is compiled.
LINES = ["the cat sat on the mat", "A dog runs in the park!", "the cats run on the mat", ">>deu<< the dog in the park"]
OTHER = ["die Katze saß auf der Matte", "Ein Hund läuft durch den Park."]
EXTRA = 6


def train_model(texts, vocab_size=60):
    """Return the bytes of a SentencePiece model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return model.getvalue()


def pieces(model):
    """Return the pieces of a SentencePiece model that occur in text."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]


def make_folder(folder, separate=False, std=1.0, **changes):
    """Save a random model and its tokenizer into `folder`, and return the model."""
    import torch
    import transformers

    torch.set_num_threads(1)  # more threads are slower for small matrices
    models = [train_model(LINES), train_model(OTHER)]
    vocabularies = [sorted(pieces(model)) for model in models]
    if not separate:
        vocabularies = [sorted({*vocabularies[0], *vocabularies[1]})] * 2
    first = ["</s>", "<unk>", "<pad>", ">>deu<<"] if separate else ["</s>", "<unk>", ">>deu<<"]
    last = [] if separate else ["<pad>"]
    words = [[*first, *vocabulary, *last] for vocabulary in vocabularies]
    names = ["vocab.json", "target_vocab.json"]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    for name, side in zip(names, words, strict=True):
        (folder / name).write_text(json.dumps({word: i for i, word in enumerate(side)}))
    more = {"separate_vocabs": True, "target_vocab_file": str(folder / names[1])} if separate else {}
    tokenizer = transformers.MarianTokenizer(
        *(str(folder / name) for name in ("source.spm", "target.spm", names[0])), **more
    )
    tokenizer.save_pretrained(folder)
    pad_id = words[0].index("<pad>")
    config = {
        "vocab_size": len(words[0]), "decoder_vocab_size": len(words[1]), "d_model": 12, "encoder_layers": 1,
        "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 20,
        "decoder_ffn_dim": 28, "activation_function": "swish", "scale_embedding": True, "dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64,
        "share_encoder_decoder_embeddings": not separate, "decoder_start_token_id": pad_id, "pad_token_id": pad_id,
        "eos_token_id": 0, "bos_token_id": 0, "forced_eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(2)
    model = transformers.MarianMTModel(transformers.MarianConfig(**(config | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                # Norms, biases and the padding's row too. Small biases, and norms of both signs: or one token is
                # generated again and again.
                parameter.normal_(std=0.1 if name.endswith("bias") else std)
        model.final_logits_bias.normal_(std=0.1)
        model.final_logits_bias[:, 0] += 2.0  # so that some sentences end
    model.generation_config.bad_words_ids = [[pad_id]]
    model.generation_config.num_beams = 4
    model.generation_config.max_length = 50
    model.save_pretrained(folder)
    return model


def with_decoding(imported, **decoding):
    """Return a Translator of an imported model with other settings."""
    config = imported.config.with_changes(decoding={"max_length_offset": EXTRA, **decoding})
    return Translator(config, imported.params, imported.tokenizers)


def generated(model, tokenizer, line, **settings):
    """Return (text, ids without the start token, score) of `generate` with this package's length limit."""
    inputs = tokenizer([line], return_tensors="pt", return_token_type_ids=False)
    limit = inputs.input_ids.shape[1] + EXTRA
    found = model.generate(
        **inputs, max_new_tokens=limit, max_length=None, return_dict_in_generate=True, output_scores=True, **settings
    )
    ids = [int(i) for i in found.sequences[0, 1:]]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    scores = getattr(found, "sequences_scores", None)
    return text, ids, None if scores is None else float(scores[0])


def compare_outputs(translator, model, tokenizer, lines, **settings):
    """Assert equal text, or scores within 1e-4. Return the differing lines and the largest difference."""
    differing, worst = [], 0.0
    translations = translator.translate_n_best(lines, 1)
    lengths = [found.num_tokens for found, *_ in translations]
    assert max(lengths) > 2, lengths  # otherwise nothing is compared
    for line, (found, *_) in zip(lines, translations, strict=True):
        text, _, score = generated(model, tokenizer, line, **settings)
        if score is not None:
            worst = max(worst, abs(found.score - score))
        if found.text != text:
            assert score is not None, (line, found, text)
            assert abs(found.score - score) < 1e-4, (line, found, text, score)
            differing.append(line)
    return differing, worst


def assert_same_logits(config, params, model):
    """Assert that a `MarianMTModel` computes this package's logits for random sentences with padding."""
    import torch

    rng = np.random.default_rng(1)
    rows = (config.source_rows, config.vocab_size)
    words = [[i for i in range(n) if i not in (config.pad_id, config.eos_id)] for n in rows]
    src, tgt = (rng.choice(ids, (3, 7)).astype(np.int32) for ids in words)
    tgt[:, 0] = config.start_id
    for row, length in enumerate((7, 5, 2)):
        src[row, length - 1 :], tgt[row, length:] = config.pad_id, config.pad_id
        src[row, length - 1] = config.eos_id
    at = real(tgt, config.pad_id)
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(src),
            attention_mask=torch.tensor(src != config.pad_id).long(),
            decoder_input_ids=torch.tensor(tgt),
            decoder_attention_mask=torch.tensor(at).long(),
        ).logits
    np.testing.assert_allclose(logits(config, params, src, tgt), expected.numpy()[at], rtol=0, atol=1e-5)
