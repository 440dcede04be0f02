"""The site: ``make docs`` builds it into runs/site/, strictly: a broken link or reference is an error.

Sphinx with furo rather than mkdocs-material, whose end of life is announced for 2027; pages are Markdown (MyST), and
napoleon reads Google docstrings as they are.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parents[1]))

import mpinit

project = "mpinit"
release = version = mpinit.__version__
author = "the mpinit developers"
extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"),
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"mpinit {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_typehints = "signature"
# `initialize` has 34 arguments: one a line, where they do not fit into one.
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
TORCH = "https://docs.pytorch.org/docs/stable/"


def _inventories() -> dict[str, tuple[str, None]]:
    """Make torch's names links, if its site can be reached; the build is the same without."""
    try:
        urllib.request.urlopen(f"{TORCH}objects.inv", timeout=5).close()
    except OSError:
        return {}
    return {"torch": (TORCH, None)}


intersphinx_mapping = _inventories()
# Their integrations are documented without them.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_member_order = "bysource"
autoclass_content = "class"
add_module_names = False
# Headings name them already.
toc_object_entries = False


def _let_long_names_break(app: Any, tree: nodes.document, page: str) -> None:
    """Let names in tables break after a dot and similar signs, because a table is as wide as its longest word."""
    for cell in tree.findall(nodes.entry):
        for literal in list(cell.findall(nodes.literal)):
            parts = re.split(r"(?<=\w[._(=])(?=[A-Za-z])", literal.astext())
            inside: list[nodes.Node] = [nodes.Text(parts[0])]
            for part in parts[1:]:
                inside += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]
            literal.children = []
            literal.extend(inside)


def _show_one_signature() -> None:
    """Let autodoc show the signature of ``initialize`` itself, and not that of each overload, 34 arguments long."""
    analyzer = ModuleAnalyzer.for_module("mpinit.initialization")
    analyzer.analyze()
    del analyzer.overloads["initialize"]


def _add_short_anchors(app: Any, tree: nodes.document) -> None:
    """Add the anchor ``mpinit.Audit`` to ``mpinit.inspect.audit.Audit``: links of viewcode from the source use it.

    viewcode has one name for each module, and the functions of these modules are documented below ``mpinit``.
    """
    signatures = list(tree.findall(addnodes.desc_signature))
    known = {anchor for signature in signatures for anchor in signature["ids"]}
    for signature in signatures:
        short = f"mpinit.{signature.get('fullname')}"
        if signature["ids"] and short not in known:
            signature["ids"].append(short)


def setup(app: Any) -> None:
    """Register the extensions; Sphinx calls it."""
    app.connect("doctree-read", _add_short_anchors)
    _show_one_signature()
    app.connect("doctree-resolved", _let_long_names_break)
