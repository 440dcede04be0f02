"""The site: ``make docs`` builds it into runs/site/, strictly: a broken link or reference is an error.

Sphinx with furo rather than mkdocs-material, whose end of life is announced for 2027; pages are Markdown (MyST), and
napoleon reads Google docstrings as they are.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mpinit

project = "mpinit"
release = version = mpinit.__version__
author = "the mpinit developers"
extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"),
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
# `initialize` has many arguments: one a line, where they do not fit into one.
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
