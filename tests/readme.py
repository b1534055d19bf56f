"""Fenced code blocks of a Markdown file, so that documented commands can be run.

python tests/readme.py README.md 2    prints the second block exactly as it is written
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: the word after the fence (`bash`, `python`, or empty), and its text."""

    language: str
    text: str


def fenced_blocks(markdown: str) -> list[Block]:
    """Return all blocks between ``` or ~~~ fences, in order.

    >>> fenced_blocks("text\\n```bash\\nls\\n```\\nmore")
    [Block(language='bash', text='ls\\n')]
    """
    blocks, fence, language, lines = [], "", "", []
    for line in markdown.splitlines(keepends=True):
        stripped = line.strip()
        if not fence:
            opening = re.match(r"(`{3,}|~{3,})\s*(\S*)", stripped)
            if opening:
                fence, language, lines = opening[1], opening[2], []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            blocks.append(Block(language, "".join(lines)))
            fence = ""
        else:
            lines.append(line)
    if fence:
        raise ValueError(f"a {fence} block is not closed")
    return blocks


def main(file: str, number: str) -> None:
    """Print block `number` (from 1) of `file`."""
    blocks = fenced_blocks(Path(file).read_text(encoding="utf-8"))
    if int(number) > len(blocks):
        sys.exit(f"{file} has {len(blocks)} fenced blocks; block {number} is asked for")
    sys.stdout.write(blocks[int(number) - 1].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
