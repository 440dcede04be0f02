"""Check every link inside the built site, anchors included: ``python docs/check_site.py runs/site`` after the build.

Sphinx checks the links that it resolves itself, and not those that extensions write.
"""

from __future__ import annotations

import html
import re
import sys
from functools import cache
from pathlib import Path


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page."""
    return frozenset(map(html.unescape, re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))))


def faults(site: Path) -> list[str]:
    """Return the links that lead to no file or no anchor, each with its page."""
    found = []
    for page in sorted(site.rglob("*.html")):
        for link in re.findall(r'href="(?!\w+:)([^"]+)"', page.read_text(encoding="utf-8")):
            path, _, anchor = html.unescape(link).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".html" and anchor not in anchors(target)):
                found.append(f"{page.relative_to(site)}: {link}")
    return found


if __name__ == "__main__":
    broken = faults(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(["links that lead nowhere:", *broken]) if broken else 0)
