"""Read a page that the package wrote: tags, ids, what it loads, and its text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

__all__ = ["EVIL", "SHOWN", "Page", "with_text"]

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}
FIXED = ("verdict", "state", "format")  # words of a list


def with_text(text: str, content: Any) -> Any:
    """Return JSON data with this text in place of each, and as one more key of each object."""
    if isinstance(content, str):
        return text
    if isinstance(content, list):
        return [with_text(text, one) for one in content]
    if isinstance(content, dict):
        found = {key: one if key in FIXED else with_text(text, one) for key, one in content.items()}
        return {**found, text: next(iter(found.values()), text)}
    return content


class Page(HTMLParser):
    """Reads a page: tags that are not closed in turn, ids, what is loaded, and the text beside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        named = dict(attrs)
        self.attributes |= set(named)
        self.ids += [named["id"]] if named.get("id") else []
        self.loaded += [value for name, value in attrs if name in ("src", "href", "data", "action") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= set(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())


SHOWN = Path(__file__).with_name("html_page.js").read_text(encoding="utf-8")
"""What a browser shows of a page: its pictures by section, texts of theirs that are cut, and what is too wide."""
