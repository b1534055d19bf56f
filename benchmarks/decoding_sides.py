"""Translate with each side of the decoding benchmark, in its own process.

With torch imported in the same process, CTranslate2 would be several times slower. Each side therefore imports in its
own function what it needs.

All of them find in a folder what `prepare` made: the run, its exports `marian` and `ctranslate2`, and `work.json` with
the sentences. A command says which of them: `start`, `batch` sentences a call (the next call takes the next ones),
`beam`; and `units`, the calls. `outputs` asks for the texts of the first sentences instead.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES

Answer = dict[str, Any]
Turn = Callable[[Answer], Answer]
FORCED = 32
"""Tokens of each source and of each output where lengths are forced."""


def prepare(spec: Mapping[str, Any]) -> tuple[Answer, Turn]:
    """Write the files that the sides read.

    Args:
        spec: `folder`; `size` for random weights, words as tokens and EOS impossible, so that every output is as long
            as its limit; or `run` and `lines`, a trained run and its sentences; `formats` to export to.
    """
    from transformer_jax.checkpoint.run_dir import RunDir
    from transformer_jax.interop.convert import export_run

    folder = Path(spec["folder"])
    run, lines = _forced_run(spec, folder) if "size" in spec else (Path(spec["run"]), spec["lines"])
    config = RunDir(run).load_config()
    failed = {}
    for name in spec["formats"]:
        try:
            export_run(run, name, folder / name, warn=lambda message: None)
        except Exception as error:  # one export fails: the parent reports its peer as not measured, the others run
            failed[name] = f"{type(error).__name__}: {error}"
    decoding = {"alpha": config.decoding.alpha if config.decoding.length_penalty != "none" else 0.0}
    decoding |= {"pad_id": config.model.pad_id, "forced": "size" in spec}
    ids = _tokenizers(run).source.encode(lines)
    work = {"run": str(run), "lines": lines, "ids": [[*row, config.model.eos_id] for row in ids], **decoding}
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
    return {"failed": failed, "sentences": len(lines)}, lambda command: {}


def ours(spec: Mapping[str, Any]) -> tuple[Answer, Turn]:
    """`Translator.translate`: text in, text out. `spec`: `folder`, `weights`.

    On real sentences with CTranslate2's rule of when to stop: the paper's exact one goes on longer, for other work.
    """
    from transformer_jax.decoding.translator import Translator

    work = _work(spec)
    rule = {} if work["forced"] else {"stopping": "ctranslate2"}
    base = Translator.load(work["run"], quantization=spec["quantization"], **rule)
    translators: dict[int, Translator] = {}

    def translate(sentences: slice, beam: int) -> list[str]:
        if beam not in translators:
            changes: dict[str, Any] = {"beam_size": beam} | ({"max_length_offset": 0} if work["forced"] else {})
            decoding = dataclasses.replace(base.config.decoding, **changes)
            config = dataclasses.replace(base.config, decoding=decoding)
            translators[beam] = Translator(config, base.params, base.tokenizers)
        return translators[beam].translate(work["lines"][sentences])

    turn = _turn(work, translate, lambda texts: texts)

    def turn_or_limits(command: Answer) -> Answer:
        if command.get("measure") != "limits":
            return turn(command)
        from benchmarks.limits import bandwidth, decoding_work, matrix_rate

        width = {"none": 4, "bfloat16": 2, "int8": 1}[spec["quantization"]]
        dtype = "bfloat16" if spec["quantization"] == "bfloat16" else "float32"
        flops, size = decoding_work(base.config.model, FORCED, command["beam"], command["batch"], width)
        small = base.config.model.d_model < 128  # of a test
        rates = matrix_rate(dtype, 128 * small), bandwidth(1 * small)
        return {"flops_seconds": flops / rates[0], "bytes_seconds": size / rates[1]}

    return {"quantization": spec["quantization"]}, turn_or_limits


def marian(spec: Mapping[str, Any]) -> tuple[Answer, Turn]:
    """`MarianMTModel.generate`. `spec`: `folder`, `dtype`, `device`."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    work, device = _work(spec), "cuda" if spec.get("device") == "gpu" else "cpu"
    model = transformers.MarianMTModel.from_pretrained(Path(spec["folder"]) / "marian", dtype=spec["dtype"])
    model = model.to(device).eval()
    limits = {"max_new_tokens": FORCED, "min_new_tokens": FORCED} if work["forced"] else {"max_new_tokens": 256}

    def translate(sentences: slice, beam: int) -> list[list[int]]:
        rows = work["ids"][sentences]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        results: list[list[int]] = [[]] * len(rows)
        # Of all sentences at once it would pad to the longest: its users sort and batch by themselves.
        size = 128 if device == "cuda" else 32
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            width = len(rows[chosen[0]])
            src = torch.full((len(chosen), width), work["pad_id"])
            for place, index in enumerate(chosen):
                src[place, : len(rows[index])] = torch.tensor(rows[index])
            src = src.to(device)
            found = model.generate(
                input_ids=src, attention_mask=(src != work["pad_id"]).long(), num_beams=beam, do_sample=False,
                length_penalty=work["alpha"], max_length=None, **limits,
            )  # fmt: skip
            for index, row in zip(chosen, found[:, 1:].tolist(), strict=True):
                results[index] = row
        return results

    tokenizer = _tokenizers(work["run"]).target
    info = {"dtype": spec["dtype"], "torch_threads": torch.get_num_threads()}
    return info, _turn(work, translate, tokenizer.decode)


def ctranslate2(spec: Mapping[str, Any]) -> tuple[Answer, Turn]:
    """`translate_batch`, in that setting of its threads which is the fastest for the work. `spec`: `folder`,
    `compute_type`, `device`."""
    import ctranslate2 as library

    work, folder = _work(spec), Path(spec["folder"]) / "ctranslate2"
    on_gpu = spec.get("device") == "gpu"
    names = _vocabulary(folder, "source")
    tokens = [[names[i] for i in row[:-1]] for row in work["ids"]]  # it adds EOS by itself
    cores = len(os.sched_getaffinity(0))
    settings = [(1, 1)] if on_gpu else sorted({(1, 1), (1, cores), (cores, 1)})
    translators = {
        (inter, intra): library.Translator(
            str(folder),
            device="cuda" if on_gpu else "cpu",
            compute_type=spec["compute_type"],
            inter_threads=inter,
            intra_threads=intra,
        )
        for inter, intra in settings
    }
    limits = {"min_decoding_length": FORCED, "max_decoding_length": FORCED} if work["forced"] else {}
    best: dict[tuple[int, int], tuple[int, int]] = {}

    def run(setting: tuple[int, int], sentences: slice, beam: int) -> list[list[str]]:
        rows = tokens[sentences]
        size = 128 if on_gpu else min(32, max(1, -(-len(rows) // setting[0])))
        found = translators[setting].translate_batch(
            rows, beam_size=beam, length_penalty=work["alpha"], max_batch_size=size, **limits
        )
        return [result.hypotheses[0] for result in found]

    def seconds(setting: tuple[int, int], sentences: slice, beam: int) -> float:
        run(setting, sentences, beam)
        start = time.perf_counter()
        run(setting, sentences, beam)
        return time.perf_counter() - start

    def translate(sentences: slice, beam: int) -> list[list[str]]:
        kind = (beam, sentences.stop - sentences.start)
        if kind not in best:
            best[kind] = min(settings, key=lambda setting: seconds(setting, sentences, beam))
        return run(best[kind], sentences, beam)

    def texts(rows: Sequence[Sequence[str]]) -> list[str]:
        ids = {token: i for i, token in enumerate(_vocabulary(folder, "target"))}
        return _tokenizers(work["run"]).target.decode([[ids[token] for token in row] for row in rows])

    def chosen(command: Answer) -> Answer:
        answer = turn(command)
        inter, intra = best[command["beam"], min(command["batch"], len(tokens))]
        return answer | {"inter_threads": inter, "intra_threads": intra}

    turn = _turn(work, translate, texts)
    return {"compute_type": spec["compute_type"]}, chosen


def _turn(work: Answer, translate: Callable[[slice, int], Any], texts: Callable[[Any], list[str]]) -> Turn:
    """Answers commands with a function from (sentences, beam) to translations, and one from these to text."""
    position = 0

    def turn(command: Answer) -> Answer:
        nonlocal position
        batch = min(command["batch"], len(work["lines"]))
        if command.get("outputs"):
            return {"outputs": texts(translate(slice(0, batch), command["beam"]))}
        translate(slice(0, batch), command["beam"])  # compiled, tuned and warm
        start = time.perf_counter()
        for _ in range(command["units"]):
            position = 0 if position + batch > len(work["lines"]) else position
            translate(slice(position, position + batch), command["beam"])
            position += batch
        return {"seconds": (time.perf_counter() - start) / command["units"]}

    return turn


def _work(spec: Mapping[str, Any]) -> Answer:
    return json.loads((Path(spec["folder"]) / "work.json").read_text(encoding="utf-8"))


def _tokenizers(run: str | Path) -> Any:
    from transformer_jax.data.tokenizer_pair import TokenizerPair

    return TokenizerPair.load(Path(run) / "tokenizer")


def _vocabulary(folder: Path, side: str) -> list[str]:
    shared, own = folder / "shared_vocabulary.json", folder / f"{side}_vocabulary.json"
    return json.loads((shared if shared.is_file() else own).read_text(encoding="utf-8"))


def _forced_run(spec: Mapping[str, Any], folder: Path) -> tuple[Path, list[str]]:
    """A run with random weights and special tokens impossible, and sentences of `FORCED` tokens with EOS."""
    import random

    import jax
    import jax.numpy as jnp

    from transformer_jax.checkpoint.checkpoint import save_params
    from transformer_jax.checkpoint.run_dir import RunDir
    from transformer_jax.config import Config, DecodingConfig, ModelConfig, TokenizerConfig
    from transformer_jax.data.tokenizer import WordTokenizer
    from transformer_jax.data.tokenizer_pair import TokenizerPair
    from transformer_jax.model.transformer import Transformer
    from transformer_jax.types import SPECIAL_TOKENS

    size = SIZES[spec["size"]]
    words = [f"w{i}" for i in range(size.vocab_size - len(SPECIAL_TOKENS))]
    tokenizer = WordTokenizer("word", [*SPECIAL_TOKENS, *words])
    config = Config(
        model=ModelConfig(**size.model(logits_bias=True)),
        tokenizer=TokenizerConfig(kind="word"),
        decoding=DecodingConfig(beam_size=1, alpha=1.0, length_penalty="power", max_length_offset=0),
    )
    tokens = jnp.ones((1, 1), jnp.int32)
    params = jax.jit(Transformer(config.model).init)(jax.random.key(0), tokens, tokens)["params"]
    # Layers that outweigh the residuals: with tied tables the model would else repeat what it has just read.
    bias = params.pop("logits_bias").at[: len(SPECIAL_TOKENS)].set(-1e9)
    params = {
        part: jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, tree) if part.endswith("coder") else tree
        for part, tree in params.items()
    } | {"logits_bias": bias}
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True)
    run.config_file.write_text(config.to_json(), encoding="utf-8")
    TokenizerPair(tokenizer, tokenizer).save(run.tokenizer)
    save_params(run.checkpoints / "0", params)
    rng = random.Random(0)
    return run.path, [" ".join(rng.choices(words, k=FORCED - 1)) for _ in range(spec.get("sentences", 128))]
