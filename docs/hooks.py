"""Hooks of MkDocs: split the configuration reference into one page per section, and rewrite links out of `docs/`.

`docs/config-reference.md` is generated from the schema and shown unchanged in the repository. On the site its 1,200
lines would be one page, so it is split at the top-level keys, and links go to the page with their anchor. Links to
files outside of `docs/` go to the repository.
"""

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

REFERENCE = "config-reference.md"
FOLDER = "config-reference"
HEADING = re.compile(r"^(?P<marks>#{2,4}) (?P<title>(?P<key>\w+).*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<path>[^)\s#:]*)(?:#(?P<anchor>[^)\s]+))?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
github_slug = slugify(case="lower")


@dataclass(frozen=True)
class Reference:
    """The pages of the split reference."""

    pages: dict[str, str]
    """Markdown by path in the site; the first page is the overview."""
    anchors: dict[str, str]
    """The path of the page with each anchor."""


def split(text: str) -> Reference:
    """Split the reference into an overview and one page for each top-level key."""
    headings = list(HEADING.finditer(text))
    overview = text[: headings[0].start()]
    sections: dict[str, str] = {}
    anchors: dict[str, str] = {}
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        key = heading["key"]
        path = f"{FOLDER}/{key}.md"
        # The heading of a key without variants becomes the title of its page.
        is_title = heading["title"] == key and key not in sections
        start = sections.get(key, "" if is_title else f"# {key}\n\n")
        body = text[heading.end() : following.start() if following is not None else len(text)]
        sections[key] = f"{start}{'#' if is_title else heading['marks']} {heading['title']}{body}"
        anchors[github_slug(heading["title"], "-")] = path
    rows = re.sub(r"^\| `(\w+)`", lambda row: row_link(row, sections), overview, flags=re.MULTILINE)
    pages = {f"{FOLDER}/index.md": rows}
    return Reference(pages | {f"{FOLDER}/{key}.md": page for key, page in sections.items()}, anchors)


def row_link(row: re.Match[str], sections: dict[str, str]) -> str:
    """Return the first cell of an overview row, with a link to the page of its key."""
    return f"| [`{row[1]}`]({row[1]}.md)" if row[1] in sections else row[0]


def load(docs: str) -> Reference:
    return split((Path(docs) / REFERENCE).read_text(encoding="utf8"))


def on_files(files: Files, *, config: Any) -> Files:
    """Replace the reference with the split pages."""
    whole = files.get_file_from_path(REFERENCE)
    assert whole is not None, f"{REFERENCE} is missing"
    files.remove(whole)
    for path, text in load(config.docs_dir).pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to the reference to its parts, and links out of `docs/` to the repository."""
    reference = load(config.docs_dir)
    own = page.file.src_uri
    here = posixpath.dirname(own)

    def redirect(link: re.Match[str]) -> str:
        path, anchor = link["path"], link["anchor"]
        target = posixpath.normpath(posixpath.join(here, path)) if path else own
        if target == REFERENCE or (not path and own in reference.pages):
            if anchor and anchor not in reference.anchors:
                return link[0]  # otherwise MkDocs warns: the whole reference is not part of the site
            part = reference.anchors[anchor] if anchor else f"{FOLDER}/index.md"
            address = posixpath.relpath(part, here or ".")
            return f"]({address}#{anchor})" if anchor else f"]({address})"
        if target.startswith("../") or (path and path.endswith("/") and not files.get_file_from_path(target)):
            kind = "tree" if path.endswith("/") else "blob"
            return f"]({config.repo_url}/{kind}/main/{posixpath.normpath('docs/' + target)})"
        return link[0]

    # Code is not changed.
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(redirect, part) for part in parts)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Mark the pages of the reference for the stylesheet."""
    return f'<div class="reference">{html}</div>' if page.file.src_uri.startswith(f"{FOLDER}/") else html
