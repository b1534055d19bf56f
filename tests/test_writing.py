"""The wording of help texts, docstrings, error messages, documents and test names: standard words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Phrases to avoid, as regular expressions without regard to case, each with what to write instead.
AVOID = {
    r"\banew\b": "again",
    r"\bthe latter\b|\bthe former\b": "repeat the noun",
    r"\bso many\b": "this number of, the number of",
    r"\bas above\b|\bas else\b": "name what is meant",
    r"\bruns? goes? on\b|\bgoes on (with|from|where|at)\b|\bgoing on with\b": "resumes, continues",
    r"\b(is|are|was|were) refused\b|\brefuses\b": "is rejected, raises, fails with",
    r"\bdrawn tokens?\b": "sampled tokens",
    r"\blikelier\b|\blikeliest\b": "more probable, the most probable",
    r"\bgiven beginnings?\b": "target prefixes",
    r"\btrainings\b": "training runs",
    r"\bof its own accord\b|\bof one's own\b": "own",
    r"\bin a row that\b": "consecutive",
    r"\bwhat (it|they) costs?\b": "its overhead",
    r"\btaken for whole\b|\btorn (file|entry|write)": "complete, truncated",
    r"\bthe other software\b": "the reference implementation",
    r"\bbeside (it|them|each other)\b": "next to",
    r"\bof which there (is|are)\b": "number of",
    r"\b(behaviour|honour|colour|neighbour|centre)\w*": "US spelling",
    r"\b(initial|normal|optim|token|serial)is(e|ed|er|ers|es|ing|ation)\b": "US spelling",
}

# Words to avoid in the names of tests, in addition to AVOID.
AVOID_IN_NAMES = {
    r"\b(says?|said|told)\b": "prints, logs, reports, states",
    r"\b(lies|stands)\b": "is, is stored, is placed",
    r"\b(refuse|refuses|refused)\b": "is rejected, raises",
    r"\b(whole|torn)\b": "complete, truncated",
    r"\b(beside|nobody|learnt|room)\b": "next to, none, learned, capacity",
    r"\bgo(es)? on\b": "resumes, continues",
    r"\bdraws?\b": "samples",
}

# Files of tests that contain the words to avoid.
LISTS_WORDS = ("test_doc_pages.py", "test_writing.py")


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a Python file (docstrings, help texts, messages), or the paragraphs of a document."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    else:
        for paragraph in re.finditer(r"(?:.+\n?)+", re.sub(r"`[^`\n]*`", "``", content)):
            yield content.count("\n", 0, paragraph.start()) + 1, paragraph[0]


def files() -> list[Path]:
    """Return the files that the rules hold for."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(
        [
            *(ROOT / "transformer_jax").rglob("*.py"),
            *(ROOT / "configs").glob("*.py"),
            *(ROOT / "benchmarks").glob("*.py"),
            *(file for file in (ROOT / "tests").rglob("*.py") if file.name not in LISTS_WORDS),
            *pages,
        ]
    )


def findings(file: Path) -> list[str]:
    """Return a line for each phrase to avoid in a file."""
    return [
        f"{file.relative_to(ROOT)}:{line}: {found[0]!r}; write {better}"
        for line, text in texts_of(file)
        for pattern, better in AVOID.items()
        for found in re.finditer(pattern, " ".join(text.split()), re.IGNORECASE)
    ]


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_texts_use_standard_words(file):
    found = findings(file)
    assert not found, "\n".join(found)


def test_names_of_tests_use_standard_words():
    found = [
        f"{file.relative_to(ROOT)}::test_{name}: {match[0]!r}; write {better}"
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        for pattern, better in (AVOID | AVOID_IN_NAMES).items()
        for match in re.finditer(pattern, name.replace("_", " "))
    ]
    assert not found, "\n".join(found)


def test_phrases_are_detected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Right.\n\nA run goes\non where it stopped, and `so many` steps are made anew.\n")
    texts = [" ".join(text.split()) for _, text in texts_of(page)]
    hits = [pattern for pattern in AVOID for text in texts if re.search(pattern, text, re.IGNORECASE)]
    assert len(hits) == 2
