"""Labeled bracketing F1 from the text of trees alone: each opening bracket is matched by counting, each span found by
counting the words before it, and brackets are paired off one by one. Slow, and nothing of the package in it."""

import re

WORD = re.compile(r"\(([^\s()]+) ([^\s()]+)\)")


def spans(text: str) -> list[tuple[str, int, int]]:
    """Return (label, words before the start, words before the end) of every counted bracket, in text order."""
    starts = [match.start() for match in WORD.finditer(text)]
    counted = [match.start() for match in WORD.finditer(text) if match[1] not in (",", ":", "``", "''", ".", "-NONE-")]
    found = []
    for start, letter in enumerate(text):
        if letter != "(" or start in starts:
            continue
        depth, end = 1, start
        while depth:
            end += 1
            depth += {"(": 1, ")": -1}.get(text[end], 0)
        label = re.match(r"[^\s()]*", text[start + 1 :])[0].replace("PRT", "ADVP")
        before, inside = sum(place < start for place in counted), sum(start < place < end for place in counted)
        if label != "TOP" and inside:
            found.append((label, before, before + inside))
    return found


def f1(pairs: list[tuple[str, str]]) -> tuple[float, float, float]:
    """Return (precision, recall, F1) of (gold, parse) texts in percent."""
    matched = gold_count = parse_count = 0
    for gold, parse in pairs:
        left = spans(gold)
        gold_count += len(left)
        for span in spans(parse):
            parse_count += 1
            if span in left:
                left.remove(span)
                matched += 1
    precision, recall = 100 * matched / parse_count, 100 * matched / gold_count
    return precision, recall, 2 * precision * recall / (precision + recall)
