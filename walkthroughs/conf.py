"""The documentation site: ``sphinx-build -W walkthroughs build/site``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
NO_SIDEBAR = ("index", "lesson", "gallery", "reference/conventions", "kernels/*")
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the extension, and the package of this checkout

project = "minimha"
author = "The minimha authors"
html_title = "minimha"
extensions = [
    "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "myst_parser", "sphinx_design",
    "building",
]  # fmt: skip
exclude_patterns = ["building"]
highlight_language = "none"
suppress_warnings = ["config.cache"]

# Walkthroughs are written for GitHub: $…$, ```math, and tables; the site's own pages use more.
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
html_math_renderer = "mathml"

autodoc_typehints = "none"  # numpydoc's sections have shapes too
autodoc_member_order = "bysource"
autosummary_generate = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_static_path = ["building/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # which is fetched, and a file:// page may fetch nothing
html_sidebars = {name: [] for name in NO_SIDEBAR}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_nav_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        "index": [],
        "gallery": [],
        "reference/conventions": [],
    },
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "header_links_before_dropdown": 6,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
