"""Sphinx settings of the site; tools/site.py stages the pages and calls Sphinx."""

import cpr_ext

project = "cpr_ext"
author = "the cpr_ext authors"
version = release = cpr_ext.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # the default one underlines names of modules
html_title = f"cpr_ext {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Headings get the anchors that they have on GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_mock_imports = ["accelerate", "fbgemm_gpu", "lightning", "opentelemetry", "torchrec"]
autodoc_mock_imports += ["transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# Code blocks are of many languages, most of them a terminal's.
highlight_language = "none"
# Attributes of two classes may have one name; neither is a link.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
