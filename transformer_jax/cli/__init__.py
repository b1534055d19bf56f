"""The command line: parsers only. `transformer-jax COMMAND ...`, and `train.py`."""

import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from transformer_jax.cli import experiments, models, pictures, runs, scores, translation
from transformer_jax.cli.parsing import take_flag
from transformer_jax.runtime.distributed import abort, is_main_process, is_multiprocess, process_label
from transformer_jax.runtime.environment import make_deterministic, tune_malloc, use_compilation_cache
from transformer_jax.types import UserError, first_line

USAGE = """usage: transformer-jax COMMAND ... [--traceback] [--no-malloc-tuning] [--no-compilation-cache]
                                   [--deterministic]

commands:
  train [CONFIG] [--workdir DIR] [--section.field VALUE ...]   train a recipe, or go on with a run
  translate RUN [...] < in.txt > out.txt                       translate, a line for each line
  evaluate RUN... [--source FILE --reference FILE] [...]       BLEU, chrF, loss, speed; differences; --sweep
  score RUN --source FILE --target FILE [...]                  log-probabilities of given translations
  average RUN [--last K|--minutes M|--steps S...]              average checkpoints
  attention RUN "SENTENCE" --output FILE [...]                 what the model attends to: a page, or a picture
  plot RUN|CONFIG... --output FILE [--panels NAME...]          learning curves, schedules, lengths, padding
  import --from FORMAT PATH --output RUN [...]                 a run of another software's model
  export RUN --to FORMAT --output DIR                          a run for another software
  compare --against PEER [PATH] [...]                          the same weights here and there, layer by layer
  doctor [CONFIG|RUN]                                          what is ready here and what needs fixing
  params [CONFIG] [--flops]                                    count parameters and training cost
  table3 ROW... [--scale N] [--section.field VALUE ...]        train rows of the paper's Table 3, print them beside it
  parsing prepare --train FILE... --output DIR [...]           trees as sentence pairs, for configs/parsing_wsj.py
  parsing score RUN [--split STEM]                             labeled bracketing F1 of a run's parses

options:
  --traceback           show where an error comes from
  --no-malloc-tuning    train with the C library's allocator as it is
  --no-compilation-cache  compile everything anew
  --deterministic       the same bits in every run, on GPUs too, where it costs speed

transformer-jax COMMAND --help says more."""

COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": runs.train,
    "translate": translation.translate,
    "evaluate": scores.evaluate,
    "score": scores.score,
    "average": scores.average,
    "attention": pictures.attention,
    "plot": pictures.plot,
    "import": models.import_model,
    "export": models.export_model,
    "compare": models.compare,
    "doctor": models.doctor,
    "params": models.params,
    "table3": experiments.table3,
    "parsing": experiments.parsing,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, or 1 for a stated failure; 2, for wrong usage, is raised."""
    given = list(sys.argv[1:] if args is None else args)
    show_traceback = take_flag(given, "--traceback")
    # It speeds up training and slows down decoding.
    if not take_flag(given, "--no-malloc-tuning") and given[:1] in (["train"], ["table3"]):
        tune_malloc()
    if not take_flag(given, "--no-compilation-cache"):
        use_compilation_cache()
    if take_flag(given, "--deterministic"):
        make_deterministic()
    if not given or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if given[0] not in COMMANDS:
        print(f"transformer-jax: {given[0]!r} is no command; legal: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    warnings.showwarning = _show_warning
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("transformer_jax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        status = COMMANDS[given[0]](given[1:])
        sys.stdout.flush()
    except UserError as error:
        if show_traceback:
            traceback.print_exc()
        print(f"error: {_who()}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        if is_multiprocess():
            abort(1)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's flush does not fail too
        return 1
    except Exception as error:  # a defect here: one line for the user, all of it with --traceback
        if is_multiprocess():
            if show_traceback:
                traceback.print_exc()
            print(
                f"error: {_who()}{first_line(error)}\nif another process has ended, that is why, and its last lines "
                "say more; the same command in all processes goes on from the last checkpoint",
                file=sys.stderr,
            )
            abort(1)
        if show_traceback:
            raise
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "make room on the disk, and run it again" if is_full else "run again with --traceback to see where"
        print(f"error: {first_line(error)}\n{cure}", file=sys.stderr)
        return 1
    finally:
        logger.removeHandler(handler)
    return status or 0


def train_main() -> int:
    """`python train.py ...` is `transformer-jax train ...`."""
    return main(["train", *sys.argv[1:]])


def _who() -> str:
    return f"{process_label()}: " if is_multiprocess() else ""


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, UserWarning) and (not is_multiprocess() or is_main_process()):
        print(f"warning: {message}", file=sys.stderr, flush=True)
