"""Translating against transformers' MarianMTModel.generate and CTranslate2, with the same weights, in turn.

python -m benchmarks.decoding --sizes small,base                     random weights, every output 32 tokens long
python -m benchmarks.decoding --run RUN --source FILE                a trained run on real sentences
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Output, Side, SideError, comma_list, comparison, parser, take_turns
from benchmarks.sizes import SIZES

MODULE = "benchmarks.decoding_sides"
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "ours": ("ours", {"quantization": "none"}),
    "ours_bfloat16": ("ours", {"quantization": "bfloat16"}),
    "ours_int8": ("ours", {"quantization": "int8"}),
    "marian": ("marian", {"dtype": "float32"}),
    "marian_bfloat16": ("marian", {"dtype": "bfloat16"}),
    "ctranslate2_float32": ("ctranslate2", {"compute_type": "float32"}),
    "ctranslate2_int8": ("ctranslate2", {"compute_type": "int8"}),
    "ctranslate2_float16": ("ctranslate2", {"compute_type": "float16"}),
}
PAIRS = {
    "cpu": ("ours:marian", "ours:ctranslate2_float32", "ours_int8:ctranslate2_int8", "ours_int8:ours"),
    "gpu": ("ours_bfloat16:marian_bfloat16", "ours_bfloat16:ctranslate2_float16"),
}


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each size, beam, batch and pair of sides."""
    flags = parser(__doc__.splitlines()[0], rounds=7)
    flags.add_argument("--sizes", type=comma_list, default=["small", "base"], help=", ".join(SIZES))
    flags.add_argument("--pairs", type=comma_list, help=f"OURS:PEER of {', '.join(SIDES)}")
    flags.add_argument("--beams", type=comma_list, default=["1", "4"])
    flags.add_argument("--batches", type=comma_list, help="sentences of a call (default 1,32; on a gpu 64,128)")
    flags.add_argument("--run", type=Path, help="a trained run, instead of random weights")
    flags.add_argument("--source", type=Path, help="with --run: sentences, one a line")
    flags.add_argument("--reference", type=Path, help="with --run: their translations, for BLEU")
    options = flags.parse_args(arguments)
    options.pairs = [tuple(pair.split(":")) for pair in options.pairs or PAIRS[options.device]]
    for value in {name for pair in options.pairs for name in pair} - SIDES.keys():
        flags.error(f"--pairs names {value}: legal: {', '.join(SIDES)}")
    for value in set(options.sizes) - SIZES.keys():
        flags.error(f"--sizes names {value}: legal: {', '.join(SIZES)}")
    if bool(options.run) != bool(options.source):
        flags.error("--run and --source belong together")
    output = Output(options.output)
    if options.run:
        lines = [line for line in options.source.read_text(encoding="utf-8").splitlines() if line.strip()]
        # All sentences in one call: each side sorts and batches them by itself.
        work = {"run": str(options.run.resolve()), "lines": lines}
        options.batches = [str(len(lines))]
        return 0 if _measure(options.run.name, work, options, output) else 1
    options.batches = options.batches or (["1", "32"] if options.device == "cpu" else ["64", "128"])
    found = [_measure(size, {"size": size}, options, output) for size in options.sizes]
    return 0 if all(found) else 1


def _measure(label: str, work: dict[str, Any], options: argparse.Namespace, output: Output) -> bool:
    """Measure one model in every requested setting; return False if one of our sides failed."""
    good = True
    with tempfile.TemporaryDirectory(prefix="benchmark-decoding-") as folder, ExitStack() as stack:
        # The allocator's setting costs decoding a little and is the command line's for training.
        common = {"folder": folder, "device": options.device, "malloc": False}
        wanted = {name for pair in options.pairs for name in pair}
        formats = sorted({SIDES[name][0] for name in wanted} - {"ours"})
        try:
            with Side(f"{MODULE}:prepare", {**common, **work, "device": "cpu", "formats": formats}) as maker:
                failed = dict(maker.info["failed"])
        except SideError as error:
            output.skip("decoding", label, error)
            return False
        sides: dict[str, Side] = {}
        for name in sorted(wanted):
            kind, spec = SIDES[name]
            try:
                if kind in failed:
                    raise SideError(f"no export to {kind}: {failed[kind]}")
                side = stack.enter_context(Side(f"{MODULE}:{kind}", {**common, **spec}))
                assert side.info is not None  # it is ready
                sides[name] = side
            except SideError as error:
                output.skip("decoding", f"{label} {name}", error)
                good = good and not name.startswith("ours")
        for beam in map(int, options.beams):
            for batch in map(int, options.batches):
                try:
                    _turns(label, sides, beam, batch, options, output)
                except SideError as error:
                    output.skip("decoding", f"{label} beam {beam} batch {batch}", error)
                    good = False
    return good


def _turns(
    label: str, sides: dict[str, Side], beam: int, batch: int, options: argparse.Namespace, output: Output
) -> None:
    """Measure all sides in alternation on equal calls; print a line for each pair."""
    command = {"beam": beam, "batch": batch}
    first = {name: side.ask(**command, outputs=True) for name, side in sides.items()}
    seconds = take_turns(sides, options.rounds, options.turn_seconds, **command)
    own = sorted({ours for ours, _ in options.pairs} & sides.keys()) if options.run is None else []
    limits = {name: sides[name].ask(**command, measure="limits") for name in own}
    for ours, peer in options.pairs:
        if ours not in sides or peer not in sides:
            continue
        texts = [first[name]["outputs"] for name in (ours, peer)]
        equal = sum(one == other for one, other in zip(*texts, strict=True))
        median = sorted(seconds[ours])[len(seconds[ours]) // 2]
        tokens = sum(len(text.split()) for text in texts[0])
        figures: dict[str, Any] = {
            "size": label, "beam": beam, "batch": batch, "device": options.device, "ours": ours, "peer": peer,
            "forced_length": options.run is None, **comparison(seconds[ours], seconds[peer]),
            "sentences_per_second": float(f"{batch / median:.4g}"),
            "words_per_second": float(f"{tokens / median:.4g}"),
            "equal_outputs": f"{equal} of {len(texts[0])}", "malloc_tuned": False,
            "ours_info": sides[ours].info,
            "peer_info": sides[peer].info | {k: v for k, v in first[peer].items() if k != "outputs"},
        }  # fmt: skip
        if ours in limits:
            # The limit is the larger of the two: weights have to be read, and multiplied with.
            least = max(limits[ours].values())
            figures |= {"limits": limits[ours], "share_of_limit": round(least / median, 4)}
        if options.reference:
            figures["bleu"] = {"ours": _bleu(texts[0], options), "peer": _bleu(texts[1], options)}
        name = f"{label} {'greedy' if beam == 1 else f'beam {beam}'} batch {batch} {ours} vs {peer}"
        output.write("decoding", name, figures)


def _bleu(texts: list[str], options: argparse.Namespace) -> float:
    from transformer_jax.evaluation.bleu import score_corpus

    pairs = zip(*(path.read_text(encoding="utf-8").splitlines() for path in (options.source, options.reference)),
                strict=True)  # fmt: skip
    references = [reference for source, reference in pairs if source.strip()]
    return round(score_corpus(texts, references).bleu, 2)


if __name__ == "__main__":
    sys.exit(main())
