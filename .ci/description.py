"""The package's long description: README, in which every link leads somewhere from any page that shows it.

hatchling calls this when it builds the package. A link to a file of the repository becomes one to ``source``, a table's
key in pyproject.toml beside this file's path; without a source its text alone is left, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A Markdown link or picture whose address is neither a whole one nor a heading of the page.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute(text: str, source: str) -> str:
    """README's text without relative links.

    Args:
        text: Markdown.
        source: address of the folder of files that relative links start from; "" where there is none.
    """

    def whole(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if source:
            return f"{picture}[{words}]({source.rstrip('/')}/{path})"
        return "" if picture else words

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    shown = [part if part.startswith("```") else RELATIVE.sub(whole, part) for part in parts]
    return re.sub(r"\n{3,}", "\n\n", "".join(shown))


class Description(MetadataHookInterface):
    """Sets ``project.readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table ``project``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        shown = absolute(text, str(self.config.get("source", "")))
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
