"""Files that hosts and readers of a repository look for: they parse, and agree with the rest."""

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
YAML_FILES = sorted(
    [*ROOT.glob(".github/**/*.yml"), *ROOT.glob(".github/**/*.yaml"), ROOT / "CITATION.cff"]
)


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text())


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_parses(path):
    assert isinstance(read_yaml(path), dict)


def test_all_yaml_is_known():
    names = {path.relative_to(ROOT).as_posix() for path in YAML_FILES}
    assert names >= {
        "CITATION.cff",
        ".github/workflows/ci.yml",
        ".github/workflows/nightly.yml",
        ".github/ISSUE_TEMPLATE/bug_report.yml",
        ".github/ISSUE_TEMPLATE/feature_request.yml",
    }


def test_the_citation_is_of_this_version_and_names_the_papers():
    citation = read_yaml("CITATION.cff")
    project = (ROOT / "pyproject.toml").read_text()
    assert citation["cff-version"] == "1.2.0"
    for key in ("version", "license"):
        assert f'\n{key} = "{citation[key]}"\n' in project
    assert {"message", "title", "authors"} <= citation.keys()
    papers = citation["references"]
    assert [paper["year"] for paper in papers] == [2021, 2023]
    assert papers[0]["title"] == citation["preferred-citation"]["title"]
    for paper in papers:
        assert {"type", "title", "authors"} <= paper.keys()
        assert all(author.keys() == {"family-names", "given-names"} for author in paper["authors"])


def test_the_workflow_runs_what_ci_runs():
    workflow = read_yaml(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}
    assert job["timeout-minutes"] > 0


def test_the_release_workflow_calls_make():
    workflow = read_yaml(".github/workflows/release.yml")
    makefile = (ROOT / "Makefile").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        make, target = command.split()[:2]
        assert make == "make"
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_nightly_workflow_calls_what_ci_leaves_out():
    workflow = read_yaml(".github/workflows/nightly.yml")
    makefile = (ROOT / "Makefile").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    for target in job["strategy"]["matrix"]["target"]:
        assert re.search(rf"^{target}: build", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_each_field_of_an_issue_form_has_an_id_and_a_label(name):
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


def test_the_notice_names_all_data_that_is_shipped():
    notice = (ROOT / "NOTICE").read_text()
    shipped = [*ROOT.glob("cpr_ext/**/*.json")]
    assert shipped
    for path in [*shipped, *(ROOT / "python_tests/data").iterdir()]:
        assert path.relative_to(ROOT).as_posix() in notice
    assert 'license-files = ["LICENSE", "NOTICE"]' in (ROOT / "pyproject.toml").read_text()


def test_a_vulnerability_has_an_address():
    security = (ROOT / "SECURITY.md").read_text()
    assert re.search(r"^## Report a vulnerability$", security, re.MULTILINE)
    assert "SECURITY.md#report-a-vulnerability" in (ROOT / "CODE_OF_CONDUCT.md").read_text()
