"""Read a page that the package wrote: tags, ids, what it loads, and its text."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["EVIL", "SHOWN", "Page"]

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Reads a page: tags that are not closed in turn, ids, what is loaded, and the text beside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        named = dict(attrs)
        self.ids += [named["id"]] if named.get("id") else []
        self.loaded += [value for name, value in attrs if name in ("src", "href", "data", "action") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

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


SHOWN = """(() => {
    const box = (one) => one.getBoundingClientRect();
    const all = (names) => [...document.querySelectorAll(names)];
    return {
        width: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
        pictures: all(".picture svg").filter((one) => box(one).width)
            .map((one) => [one.closest("section").id, box(one).width, box(one).height]),
        cut: all(".picture text").filter((one) => {
            if (!box(one).width) return false;
            const text = box(one), whole = box(one.closest("svg"));
            return text.left < whole.left - 1 || text.right > whole.right + 1
                || text.top < whole.top - 1 || text.bottom > whole.bottom + 1;
        }).map((one) => one.textContent),
        wide: all("body *").filter((one) => box(one).right > innerWidth + 1 && !one.closest(".scroll, .picture, pre"))
            .map((one) => one.tagName + "." + one.className),
        paper: getComputedStyle(document.querySelector("section")).backgroundColor,
        drawn: getComputedStyle(document.querySelector(".picture path")).fill,
    };
})()"""
"""What a browser shows of a page: its pictures by section, texts of theirs that are cut, and what is too wide."""
