"""Links and paths in the documents exist, and the documents use standard terms."""

import re
from pathlib import Path

import pytest
import readme

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# These pages name files and words of earlier versions on purpose.
HISTORY = {"CHANGELOG.md"}
# Words that the documents avoid, besides those of test_writing.py, and standard terms. Keys are regular expressions.
GLOSSARY = {
    r"\brefuse[sd]?\b": "is rejected, raises, fails with",
    r"\b(?:file|files|folder|table|error|log|line|report|page|config|configuration|command|help)s? says?\b": "reports",
    r"\b(?:lie|lies|lying) (?:in|on|at|up)\b": "is stored in, is placed",
    r"\bas many as\b": "number of",
    r"\bbeside\b": "next to, compared with",
    r"\ba training\b(?! (?:run|step|pair|row|set|split|loop|sentence))": "a training run",
    r"\bother software\b": "other libraries, the reference implementation",
    r"\btorn\b": "truncated",
    r"[a-z]+iz(?:m|tic)\b": "-ism, -istic",
}


def prose(page: Path) -> str:
    """Return the text of a page without fenced blocks and inline code."""
    text = page.read_text(encoding="utf-8")
    for block in readme.fenced_blocks(text):
        text = text.replace(block.text, "\n" * block.text.count("\n"))
    return re.sub(r"`[^`\n]*`", "``", text)


def slug(heading: str) -> str:
    """Return the anchor that Git hosts give a heading.

    >>> slug("## Train on `data`, again")
    'train-on-data-again'
    """
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of all headings of a page."""
    return {slug(line) for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_existing_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, broken


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_paths_in_code_font_exist(page):
    roots = ("transformer_jax", "tests", "benchmarks", "configs", "docs", ".ci")
    paths = [
        path
        for path in re.findall(r"`([\w./-]+?)(?:::\w+)?`", page.read_text(encoding="utf-8"))
        if path.partition("/")[0] in roots and "/" in path
    ]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_documents_use_standard_words(page):
    found = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        for pattern, instead in GLOSSARY.items():
            found += [
                f"{page.name}:{number}: {match[0]!r}: write {instead}" for match in re.finditer(pattern, line, re.I)
            ]
    assert not found, "\n".join(found)


def test_glossary_matches_old_words():
    for text in ("it lies in a file", "is refused", "as many as", "the error says", "parallelizm", "a training ends"):
        assert any(re.search(pattern, text, re.I) for pattern in GLOSSARY), text
    for text in ("a training run", "the training step", "prism", "it is rejected", "initialize"):
        assert not any(re.search(pattern, text, re.I) for pattern in GLOSSARY), text
