"""The site: every page is in its index, and links lead to pages. Sphinx itself: make docs."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(ROOT / "tools"))  # for what it imports from there
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "tools/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def staged(site, tmp_path_factory):
    source = tmp_path_factory.mktemp("site") / "source"
    site.stage(source)
    return source


def listed(index):
    blocks = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", index, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line]


def test_every_page_is_in_the_index_once(staged):
    names = listed((staged / "index.md").read_text())
    assert len(names) == len(set(names))
    pages = {
        path.relative_to(staged).with_suffix("").as_posix()
        for path in [*staged.rglob("*.md"), *staged.rglob("*.rst")]
        if path.parent.name != "decisions"
    }
    assert {*names} == (pages - {"index"}) | {"docs/decisions/README"}
    decisions = (staged / "docs/decisions/README.md").read_text()
    assert all(p.stem in decisions for p in (ROOT / "docs/decisions").glob("0*.md"))


def test_the_reference_has_every_public_name(staged):
    import cpr_ext

    text = (staged / "api/cpr_ext.rst").read_text()
    assert all(f":: cpr_ext.{name}\n" in text for name in cpr_ext.__all__)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[guide](guide.md#a)", "[guide](guide.md#a)"),
        ("[bench/results/](../bench/results/)", "`bench/results/`"),
        ("[notice](../NOTICE)", "notice (`NOTICE`)"),
        ("[`x.py`](../examples/demo.py)", "`x.py`"),
        (
            "[rules](monitoring/alerts.yml)",
            "{download}`rules <monitoring/alerts.yml>`",
        ),
        ("[all](decisions/)", "[all](decisions/README.md)"),
        ("[job](notebooks/first_job.ipynb)", "[job](notebooks/first_job.md)"),
        ("![picture](images/plan.png)", "![picture](images/plan.png)"),
        ("[site](https://a.org/b.md)", "[site](https://a.org/b.md)"),
    ],
)
def test_links_to_files_that_are_no_pages_become_plain(site, link, expected):
    names = ("guide.md", "decisions/README.md", "notebooks/first_job.ipynb")
    pages = [ROOT / "docs" / name for name in names]
    assert site.with_reachable_links(link, ROOT / "docs/tools.md", pages) == expected


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        (
            "docs/a.md",
            "see `examples/demo.py`,",
            "see {download}`examples/demo.py <../examples/demo.py>`,",
        ),
        ("README.md", "`examples/demo.py`", "{download}`examples/demo.py <examples/demo.py>`"),
        ("README.md", "`examples/none.py`", "`examples/none.py`"),
        ("README.md", "```\npython examples/demo.py\n```", "```\npython examples/demo.py\n```"),
    ],
)
def test_examples_that_a_page_names_can_be_downloaded(site, staged, page, text, expected):
    assert site.with_downloads(text, ROOT / page) == expected
    assert (staged / "examples/demo.py").is_file()
