"""The check of the built site finds links that lead nowhere, and no others."""

import sys
from pathlib import Path

from snippets import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import check_site


def test_links_to_missing_files_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<a href="sub/b.html#here">1</a><a href="sub/b.html#there">2</a><a href="c.html">3</a><a href="#me">4</a>'
        '<a href="https://elsewhere/x#y">5</a><a href="style.css?v=1">6</a><i id="me">'
    )
    (tmp_path / "sub" / "b.html").write_text('<h1 id="here"></h1><a href="../a.html#me">1</a>')
    (tmp_path / "style.css").touch()
    assert check_site.faults(tmp_path) == ["a.html: sub/b.html#there", "a.html: c.html"]
