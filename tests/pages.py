"""The Markdown pages of the project, cut into code blocks and links."""

from __future__ import annotations

import re
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*.md")))
NEEDS_GPU = "<!-- needs a GPU -->"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line before it."""

    language: str
    text: str
    before: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    found = re.findall(r"^([^\n]*)\n\n?```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [Block(language, text, before.strip()) for before, language, text in found]


def commands(text: str) -> list[str]:
    """The lines of a shell block without comments."""
    lines = [line.split("  #")[0].split(" # ")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def links(page: Path) -> list[str]:
    """Targets of links and pictures, outside of code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    return [a or b for a, b in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page get."""
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M):
        found.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings of the repository that are not there."""
    wrong = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def main() -> int:
    """python -m tests.pages: ask the web for every link that leaves the repository."""
    wrong = 0
    for page in PAGES:
        for link in sorted({link for link in links(page) if link.startswith("http")}):
            try:
                request = urllib.request.Request(link, headers={"User-Agent": "hccupy link check"})
                with urllib.request.urlopen(request, timeout=20) as answer:
                    said = str(answer.status)
            except OSError as error:
                said, wrong = str(error), wrong + 1
            print(f"{page.relative_to(ROOT)}: {link}: {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
