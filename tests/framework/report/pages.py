"""Reading of pages in tests."""

from html.parser import HTMLParser
from pathlib import Path

from partita.report.run_page import write_report


class Page(HTMLParser):
    """Tags, attributes and texts of a page. Checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        """Tag, name and value."""
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1:] != ["style"]:
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        """All texts of the page."""
        return "\n".join(self.texts)

    def after(self, text: str, *, count: int) -> list[str]:
        """Return the texts that follow a text."""
        place = self.texts.index(text)
        return self.texts[place + 1 : place + 1 + count]


def page_of(folder: Path) -> Page:
    """Write the report of a run and read it."""
    return Page(write_report(folder).read_text(encoding="utf8"))
