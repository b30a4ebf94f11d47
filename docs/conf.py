"""Settings of the documentation site: `make docs` builds the pages and the docstrings into docs/_build."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "extensions"), str(Path(__file__).parents[1])]

import gear_loader  # noqa: E402 (found on the path above)

project = "Gear Loader"
release = gear_loader.__version__
copyright = author = "The Gear Loader authors"

extensions = ["sphinx.ext.autodoc", "myst_parser", "references", "command_line", "blocks"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Gear Loader {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Pages are Markdown as GitHub shows it: links between headings, and drawings.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
myst_links_external_new_tab = True

# Their pages begin without a constructor, because other calls make them.
made_by_calls = ["Table", "Writer", "VectorWriter", "DeviceWriter", "RemoteTable"]

# A reference that leads nowhere is an error, and so is a public name that no page has: see references.py.
nitpicky = True
public_modules = [
    "gear_loader",
    "gear_loader.checkpoint",
    "gear_loader.distributed",
    "gear_loader.errors",
    "gear_loader.exports",
    "gear_loader.graph",
    "gear_loader.integrations.torchrl",
    "gear_loader.sources",
    "gear_loader.transforms",
    "gear_loader.transport",
]
known_modules = ["torch.utils.data", "torchdata.stateful_dataloader"]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
