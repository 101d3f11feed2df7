"""Builds the site in build/site/html: every page of the repository, and the API reference.

    python tools/site.py [--out build/site]

Pages are staged in the folders that they have here, so that their links to each other hold. A
notebook becomes a page. A link to a file that is no page becomes plain code, and the name of an
example a download. A warning of Sphinx, such as a link that leads nowhere, fails the build. Needs
sphinx, myst-parser and furo, and what `import cpr_ext` needs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import notebook_pages

import cpr_ext

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "docs/decisions/*.md", "docs/notebooks/*.ipynb", "csrc/README.md")
MODULES = (
    "",
    ".distributed",
    ".wings.policy",
    ".wings.tools.maintenance",
    ".wings.publishing",
    ".wings.remote",
    ".integrations.torchrec",
    ".wings.callbacks.loops",
    ".wings.callbacks.lightning",
    ".wings.callbacks.transformers",
    ".wings.callbacks.opentelemetry",
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_DOWNLOADS = (ROOT / "docs/monitoring", ROOT / "examples/engines")
_EXAMPLE = re.compile(r"`(examples/[\w.]+)`")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    out = parser.parse_args().out
    stage(out / "source")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += [out / "source", out / "html"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run([str(word) for word in command], env=environment, check=False)
    if done.returncode == 0:
        print(f"{out / 'html' / 'index.html'}")
    sys.exit(done.returncode)


def stage(source: Path) -> None:
    """Copy all pages and pictures, and write the pages of the API."""
    shutil.rmtree(source, ignore_errors=True)
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for path in pages:
        place = (source / path.relative_to(ROOT)).with_suffix(".md")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            shutil.copy(path, place.parent)
        text = with_reachable_links(page_text(path), path, pages)
        text = with_downloads(text, path)
        if path == ROOT / "docs" / "decisions" / "README.md":
            text += all_decisions(pages)
        place.write_text(text)
    shutil.copytree(ROOT / "docs" / "images", source / "docs" / "images")
    shutil.copytree(ROOT / "docs" / "monitoring", source / "docs" / "monitoring")
    shutil.copytree(ROOT / "examples", source / "examples")
    shutil.copy(ROOT / "docs" / "site" / "conf.py", source)
    shutil.copytree(ROOT / "docs" / "site" / "_static", source / "_static")
    index = (ROOT / "docs" / "site" / "index.md").read_text()
    (source / "index.md").write_text(index + unlisted(index, pages))
    (source / "api").mkdir()
    for module in MODULES:
        name = f"cpr_ext{module}"
        (source / "api" / f"{name}.rst").write_text(api_page(name))


def page_text(path: Path) -> str:
    """Return a page, or a notebook as one, with a link to its file."""
    if path.suffix != ".ipynb":
        return path.read_text()
    title, _, rest = notebook_pages.to_markdown(json.loads(path.read_text())).partition("\n")
    return f"{title}\n\n{{download}}`The notebook <{path.name}>`\n{rest}"


def with_reachable_links(text: str, path: Path, pages: list[Path]) -> str:
    """Return a page whose links lead to pages, pictures, anchors or other sites."""

    def replace(link: re.Match[str]) -> str:
        mark, label, target, anchor = link.groups()
        if mark or "://" in target or target.startswith("mailto:"):
            return link[0]
        there = (path.parent / target).resolve()
        if there / "README.md" in pages:
            return f"[{label}]({target.rstrip('/')}/README.md{anchor or ''})"
        if there in pages:
            return link[0].replace(".ipynb", ".md")
        if there.is_file() and there.parent in _DOWNLOADS:
            return f"{{download}}`{label} <{target}>`"
        name = str(there.relative_to(ROOT))
        if label.rstrip("/") == name:
            return f"`{label}`"
        return label if label.startswith("`") else f"{label} (`{name}`)"

    return _LINK.sub(replace, text)


def with_downloads(text: str, path: Path) -> str:
    """Return a page that offers the examples that it names: who installed a wheel has no others."""

    def replace(name: re.Match[str]) -> str:
        if not (ROOT / name[1]).is_file():
            return name[0]
        return f"{{download}}`{name[1]} <{os.path.relpath(ROOT / name[1], path.parent)}>`"

    return _EXAMPLE.sub(replace, text)


def all_decisions(pages: list[Path]) -> str:
    """Return a hidden table of contents, for the side bar."""
    names = [path.stem for path in pages if path.parent.name == "decisions" and path.stem[0] == "0"]
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def unlisted(index: str, pages: list[Path]) -> str:
    """Return a table of contents of the pages that the index does not list."""
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in pages]
    listed = re.split(r"[\s<>]+", index)
    names = [n for n in names if n not in listed and not n.startswith("docs/decisions/0")]
    if not names:
        return ""
    return "\n```{toctree}\n:caption: More\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def api_page(name: str) -> str:
    """Return the reference of a module's public names."""
    # These need libraries that conf.py replaces: only Sphinx imports them.
    if ".integrations." in name or ".callbacks." in name:
        lines = [name, "=" * len(name), "", f".. automodule:: {name}", "   :members:"]
        return "\n".join([*lines, "   :show-inheritance:", ""])
    module = importlib.import_module(name)
    summary = inspect.getdoc(module).splitlines()[0]
    lines = [name, "=" * len(name), "", summary, ""]
    is_root = name == cpr_ext.__name__
    for public in module.__all__ if is_root else sorted(set(module.__all__) - set(cpr_ext.__all__)):
        thing = getattr(module, public)
        if inspect.isclass(thing):
            lines += [f".. autoclass:: {name}.{public}", "   :members:"]
        elif inspect.isfunction(thing):
            lines += [f".. autofunction:: {name}.{public}"]
        else:
            lines += [f".. py:data:: {name}.{public}", "", f"   {thing!r}".replace("*", r"\*")]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    main()
