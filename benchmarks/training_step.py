"""A training step (forward, loss, backward, Adam, dropout on) against torch.nn.Transformer, in turn.

python -m benchmarks.training_step --sizes tiny,small,base --peers eager,compile,autocast
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common import Output, Side, SideError, comma_list, comparison, parser, summary, take_turns
from benchmarks.sizes import SIZES

OURS = "benchmarks.training_sides:ours"
PEER = "benchmarks.torch_training:peer"
PEERS: dict[str, dict[str, bool]] = {
    "eager": {},
    "compile": {"compile": True},
    "autocast": {"autocast": True},
    "compile_autocast": {"compile": True, "autocast": True},
}


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each size and peer."""
    flags = parser(__doc__.splitlines()[0], rounds=7)
    flags.add_argument("--sizes", type=comma_list, default=["tiny", "small", "base"], help=", ".join(SIZES))
    flags.add_argument("--peers", type=comma_list, default=["eager", "compile", "autocast"], help=", ".join(PEERS))
    flags.add_argument("--rows", type=int, help="rows of the batch, where they are not the size's")
    flags.add_argument("--length", type=int, help="tokens of a row on each side, where they are not the size's")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of our computation")
    flags.add_argument("--dropout-generator", choices=("hash", "threefry"), default="hash")
    flags.add_argument("--dropout", choices=("paper", "everywhere"), default="paper", help="everywhere: in attention "
                       "and after the activation too, as torch.nn.Transformer has it")  # fmt: skip
    flags.add_argument("--attention-kernel", choices=("auto", "xla"), default="auto")
    flags.add_argument("--remat", choices=("none", "layers", "dots"), default="none")
    flags.add_argument("--loss-chunk-mb", type=int)
    options = flags.parse_args(arguments)
    for given, legal, flag in ((options.sizes, SIZES, "--sizes"), (options.peers, PEERS, "--peers")):
        unknown = sorted(set(given) - set(legal))
        if unknown:
            flags.error(f"{flag} {','.join(unknown)}: legal: {', '.join(legal)}")
    output = Output(options.output)
    found = [measure(size, options, output) for size in options.sizes]
    return 0 if all(found) else 1


def measure(size: str, options: argparse.Namespace, output: Output) -> bool:
    """Measure all peers at one size, or ours alone; return False if our side failed."""
    common = {"size": size, "device": options.device, "malloc": not options.no_malloc_tuning}
    common |= {"rows": options.rows, "length": options.length, "dropout": options.dropout}
    choices = {"dtype": options.dtype, "dropout_generator": options.dropout_generator}
    choices |= {"attention_kernel": options.attention_kernel, "remat": options.remat}
    if options.dropout == "everywhere":
        choices |= {"attention_dropout": 0.1, "activation_dropout": 0.1}
    if options.loss_chunk_mb:
        choices["loss_chunk_mb"] = options.loss_chunk_mb
    spec = {**common, "choices": choices}
    label = f"{size} {options.dtype}" + "".join(
        f" {name} {getattr(options, name)}"
        for name in ("dropout", "dropout_generator", "attention_kernel", "remat", "rows", "length", "loss_chunk_mb")
        if getattr(options, name) not in ("auto", "hash", "none", "paper", None)
    )
    try:
        with Side(OURS, spec) as ours:
            if not options.peers:
                seconds = take_turns({"ours": ours}, options.rounds, options.turn_seconds)["ours"]
                figures = {"seconds": {"ours": summary(seconds)}, "rounds": options.rounds}
                _write(output, f"{label} alone", {**choices, **common, **figures}, ours)
            for name in options.peers:
                try:
                    with Side(PEER, {**common, **PEERS[name]}) as peer:
                        turns = take_turns({"ours": ours, "peer": peer}, options.rounds, options.turn_seconds)
                        figures = comparison(turns["ours"], turns["peer"])
                        memory = peer.ask(measure="memory")["peak_bytes"]
                except SideError as error:
                    if error.args[0].startswith(OURS):
                        raise
                    output.skip("training_step", f"{label} vs {name}", error)
                    continue
                figures |= {"peer": name, "peer_info": peer.info, "peer_peak_bytes": memory}
                _write(output, f"{label} vs {name}", {**choices, **common, **figures}, ours)
    except SideError as error:
        output.skip("training_step", label, error)
        return False
    return True


def _write(output: Output, name: str, figures: Mapping[str, Any], ours: Side) -> None:
    """The line, with what is known of the machine's limit: measured now, beside the timings."""
    rate, seconds = ours.ask(measure="matrix_rate")["flops"], figures["seconds"]["ours"]["median"]
    info = ours.info
    more = {
        "tokens_per_second": round(info["tokens"] / seconds),
        "model_flops": info["model_flops"],
        "matrix_flops_per_second": float(f"{rate:.4g}"),
        "share_of_matrix_rate": round(info["model_flops"] / seconds / rate, 4),
        "peak_bytes": ours.ask(measure="memory")["peak_bytes"],
        "malloc_tuned": info["malloc_tuned"],
        "ours_info": info,
    }
    output.write("training_step", name, {**figures, **more})


if __name__ == "__main__":
    sys.exit(main())
