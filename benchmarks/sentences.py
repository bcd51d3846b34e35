"""Count the long sentences of README.md and docs/, and find the words that plain English leaves out.

A sentence ends with . ! or ?, and with its paragraph or list item. Code blocks, headings and generated parts are left
out; inline code is one word. Of a table the words are looked at alone.

python benchmarks/sentences.py [--show] [PAGE ...]    # exit code 1 above 3 %, or where a word to leave out is found
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from table import COUNTED, MARKED, PAGES

LONG_WORDS = 25
LONG_SHARE = 0.03  # of all sentences
GENERATED = ("clients.md",)  # whole pages
BLOCK = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)[^`].*?\1(?!`)", re.DOTALL)
LINK = re.compile(r"!\[[^]]*\]\([^)]*\)(?:\{[^}]*\})?|\[((?:[^][]|\[[^]]*\])*)\]\([^)\s]*\)|<https?:[^>]*>|</?\w+[^>]*>")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+")
OF_STOCK = (
    r"\bstock(?:'s|(?=[.,;:)?]|$| (?:[0-9]|(?:is|are|was|does|do|has|keeps|gives|makes|reads|raised|saves|then|with|in|of|and|or|to|"
    r"from|as|by|at|for|would|cannot|may|can|will|on|that|which|alone|itself|without|trains|puts|leaves)\b)))"
)
LEFT_OUT = {
    "to spare": r"\bto spare\b",
    "at peak": r"\bat peak\b",
    "decides the total": r"\bdecides? (?:the|its) total\b",
    "of one's own": r"\bof (?:one's|its|your|their|our|my) own\b",
    "is no ...": r"\b(?:is|are) no\b(?! longer)",
    "what ... is": r"\bwhat (?:[\w§'-]+ ){1,4}is\b",
    "as much as": r"\bas much as\b",
    "told": r"\btold\b",
    "two clauses of that": r"\bthat\b.*\bthat\b",
    "stock, no adjective": OF_STOCK,
}


class Page(NamedTuple):
    """What a page has: its sentences, those that are long, and each word to leave out with its sentence."""

    sentences: list[str]
    long: list[str]
    words: list[tuple[str, str]]


def split(text: str) -> tuple[list[str], list[str]]:
    """Return the sentences of a page, and its cells of tables."""
    text = COUNTED.sub("1", MARKED.sub("", text))
    text = LINK.sub(lambda found: found[1] or "", CODE.sub("§", BLOCK.sub("\n\n", text)))
    blocks, cells = [""], list[str]()
    for line in text.splitlines():
        if line.startswith("|"):
            cells += line.strip("|").split("|")
        if not line.strip() or line.startswith(("#", "|", ">")) or ITEM.match(line):
            blocks.append("")
        if not line.startswith(("#", "|")):
            blocks[-1] += " " + ITEM.sub("", line).strip()
    return [one for block in blocks for one in END.split(block.strip()) if re.search(r"\w|§", one)], cells


def read(text: str) -> Page:
    """Return what a page has."""
    sentences, cells = split(text)
    long = [one for one in sentences if sum(bool(re.search(r"[^\W_]|§", word)) for word in one.split()) > LONG_WORDS]
    checked = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in LEFT_OUT.items()]
    words = [(name, one.strip()) for one in (*sentences, *cells) for name, pattern in checked if pattern.search(one)]
    return Page(sentences, long, words)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    named = [Path(one).resolve() for one in arguments if one != "--show"]
    pages = {page.name: read(page.read_text(encoding="utf-8")) for page in named or PAGES if page.name not in GENERATED}
    for name, page in {**pages, "in all": joined(pages.values())}.items():
        share = len(page.long) / max(len(page.sentences), 1)
        print(f"{name:24} {len(page.sentences):5} sentences {share:6.1%} long {len(page.words):4} words to leave out")
        for what, text in [("long", one) for one in page.long] + page.words if "--show" in arguments and name in pages else ():
            print(f"    {what}: {text}")
    whole = joined(pages.values())
    return int(len(whole.long) > LONG_SHARE * len(whole.sentences) or bool(whole.words))


def joined(pages: Iterable[Page]) -> Page:
    """Return several pages as one."""
    return Page(*(sum(parts, []) for parts in zip(*pages, strict=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
