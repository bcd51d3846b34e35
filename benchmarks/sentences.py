"""Count the long sentences of README.md and docs/, and find the words that plain English leaves out.

A sentence ends with . ! or ?, and with its paragraph or list item. Code blocks, headings and generated parts do not
count; inline code is one word. Of tables only the words are looked at.

python benchmarks/sentences.py [--show] [PAGE ...]    # exit code 1 above 3 %, or where a word to leave out is found
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from table import COUNTED, MARKED, PAGES

LONG_WORDS = 25
LONG_SHARE = 0.03  # of all sentences
WRITTEN = [page for page in PAGES if page.name != "clients.md"]  # which is generated as a whole
BLOCK = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]+`")
IMAGE_OR_TAG = re.compile(r"!\[[^]]*\]\([^)]*\)(\{[^}]*\})?|</?\w[^>]*>")
LINK = re.compile(r"\[([^]]*)\]\([^)\s]*\)")
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+|(?<=[.!?][)\"*_])\s+")
VERBS = "is|are|was|does|do|has|keeps|gives|makes|reads|saves|would|cannot|can|may|will|puts|leaves|then|alone"
PREPOSITIONS = "with|without|in|of|and|or|to|from|as|by|at|for|on|that|which|[0-9]"
LEFT_OUT = {
    "to spare": r"\bto spare\b",
    "at peak": r"\bat peak\b",
    "decides the total": r"\bdecides? (the|its) total\b",
    "of one's own": r"\bof (one's|its|your|their|our|my) own\b",
    "is no ...": r"\b(is|are) no\b(?! longer)",
    "what ... is": r"\bwhat ([\w§'-]+ ){1,4}is\b",
    "as much as": r"\bas much as\b",
    "told": r"\btold\b",
    "two clauses of that": r"\bthat\b.*\bthat\b",
    "stock, no adjective": rf"\bstock('s|(?=[.,;:)?]|$| ({VERBS}|{PREPOSITIONS})\b))",
}


class Page(NamedTuple):
    """What a page has; a word to leave out comes with its sentence."""

    sentences: list[str]
    long: list[str]
    words: list[tuple[str, str]]


def read(text: str) -> Page:
    """Return the sentences of a page, the long ones, and the words to leave out."""
    text = CODE.sub("§", BLOCK.sub("\n\n", COUNTED.sub("1", MARKED.sub("", text))))
    blocks, cells = [""], list[str]()
    for line in LINK.sub(r"\1", IMAGE_OR_TAG.sub("", text)).splitlines():
        if not line.strip() or line.startswith(("#", "|")) or ITEM.match(line):
            blocks.append("")
        if line.startswith("|"):
            cells += line.strip("|").split("|")
        elif not line.startswith("#"):
            blocks[-1] += " " + ITEM.sub("", line).strip()
    sentences = [one for block in blocks for one in END.split(block.strip()) if re.search(r"[\w§]", one)]
    long = [one for one in sentences if len(re.findall(r"\S*[^\W_]\S*|\S*§\S*", one)) > LONG_WORDS]
    checked = [(what, re.compile(pattern, re.IGNORECASE)) for what, pattern in LEFT_OUT.items()]
    words = [(what, one.strip()) for one in sentences + cells for what, pattern in checked if pattern.search(one)]
    return Page(sentences, long, words)


def joined(pages: Iterable[Page]) -> Page:
    """Return several pages as one."""
    return Page(*(list(chain.from_iterable(parts)) for parts in zip(*pages, strict=True)))


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    paths = [Path(one) for one in arguments if one != "--show"] or WRITTEN
    pages = {path.name: read(path.read_text(encoding="utf-8")) for path in paths}
    whole = joined(pages.values())
    for name, page in {**pages, "in all": whole}.items():
        share = len(page.long) / max(len(page.sentences), 1)
        print(f"{name:24} {len(page.sentences):5} sentences {share:6.1%} long {len(page.words):4} words to leave out")
    for what, sentence in [("long", one) for one in whole.long] + whole.words if "--show" in arguments else ():
        print(f"{what}: {sentence}")
    return int(len(whole.long) > LONG_SHARE * len(whole.sentences) or bool(whole.words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
