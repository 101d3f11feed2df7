"""Files and pages: they agree with each other, and what they name is there."""

import ast
import importlib
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from cpr_ext.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
ENGINES = ROOT / "examples/engines"
# The API's own models, generated from what clusters serve.
MODELS = {
    "Deployment": None,  # it has none
    "Service": None,
    "Job": "IoK8sApiBatchV1JobSpec",
    "JobSet": "JobsetV1alpha2JobSetSpec",
    "ClusterTrainingRuntime": "TrainerV1alpha1TrainingRuntimeSpec",
}


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text())


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def faults_of(document):
    text = document.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
        page = document.parent / target if target else document
        if not target.startswith("http") and not page.exists():
            yield f"{document}: no {target}"
        elif not target.startswith("http") and anchor and anchor not in anchors(page):
            yield f"{document}: no heading {target}#{anchor}"
    for target in re.findall(r"`((?:python_tests|cpr_ext|csrc)/[\w/.]+)`", text):
        if not (ROOT / target).exists():
            yield f"{document}: no {target}"


def test_what_documents_link_to_and_name_is_there(tmp_path):
    assert [fault for document in DOCUMENTS for fault in faults_of(document)] == []
    page = tmp_path / "page.md"
    page.write_text("# A b\n[a](#a-b) [b](#b) [c](c.md) `csrc/c.h`\n")
    assert len(list(faults_of(page))) == 3


def test_examples_of_pages_are_files_that_are_run():
    for page, example in (
        ("README.md", "quickstart.py"),
        ("docs/how_often.md", "target_pls.py"),
    ):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert (ROOT / "examples" / example).read_text() in blocks


def test_what_snippets_of_pages_import_is_there():
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for block in (block for page in DOCUMENTS for block in blocks.findall(page.read_text())):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("cpr_ext"):
                with suppress(UsageError):  # it says what is not installed
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, each.name) for each in node.names), block


def test_decisions_are_listed_by_their_titles():
    listed = (ROOT / "docs/decisions/README.md").read_text()
    entries = dict(re.findall(r"^- \[\d+\]\((\S+)\)\s+(.*(?:\n  .*)*)", listed, re.MULTILINE))
    assert sorted(entries) == [path.name for path in DECISIONS]
    for path in DECISIONS:
        title = path.read_text().splitlines()[0].partition(": ")[2]
        assert " ".join(entries[path.name].split()).startswith(title)


def test_workflows_call_what_there_is():
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert {path.name for path in workflows} >= {"ci.yml", "nightly.yml", "release.yml"}
    makefile = (ROOT / "Makefile").read_text()
    for path in workflows:
        workflow = read_yaml(path)
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] > 0
            commands = [step["run"] for step in job["steps"] if "run" in step]
            targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
            targets += re.findall(r"^make ([a-z]\S*)", "\n".join(commands), re.MULTILINE)
            assert targets or commands == [".ci/run"]
            assert all(re.search(rf"^{each}:", makefile, re.MULTILINE) for each in targets)


def test_the_citation_is_of_this_version_and_the_notice_names_all_data():
    project = (ROOT / "pyproject.toml").read_text()
    citation = read_yaml("CITATION.cff")
    for key in ("version", "license"):
        assert f'\n{key} = "{citation[key]}"\n' in project
    assert [paper["year"] for paper in citation["references"]] == [2021, 2023]
    notice = (ROOT / "NOTICE").read_text()
    for path in [*ROOT.glob("cpr_ext/**/*.json"), *(ROOT / "python_tests/data").iterdir()]:
        assert path.relative_to(ROOT).as_posix() in notice


def test_the_stub_leaves_no_argument_and_no_result_untyped():
    """That it names all that the module has: ``make lint``."""
    generic = r"NDArray\[typing\.Any\]|dict\[str, typing\.Any\]|list\[typing\.Any\]"
    untyped = re.sub(generic, "Generic", (ROOT / "cpr_ext/_C.pyi").read_text())
    assert "Any" not in untyped
    for function in ast.walk(ast.parse(untyped)):
        if isinstance(function, ast.FunctionDef):
            arguments = [*function.args.args, *function.args.kwonlyargs]
            named = [each for each in arguments if each.arg != "self"]
            assert function.returns is not None
            assert all(each.annotation is not None for each in named), function.name
            assert not any(re.fullmatch(r"arg\d+", each.arg) for each in named), function.name


def is_within(tree, whole):
    """Whether all of a tree is in another, which may have defaults beside it."""
    if isinstance(tree, dict):
        return isinstance(whole, dict) and all(
            key in whole and is_within(value, whole[key]) for key, value in tree.items()
        )
    if isinstance(tree, list):
        return len(tree) == len(whole) and all(map(is_within, tree, whole))
    return tree == whole


def found(tree, key):
    """All values of a key, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from [value] if name == key else found(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from found(value, key)


def test_files_for_engines_fit_their_schemas_and_torchrun_takes_their_options():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    commands = []
    for path in sorted(ENGINES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            pods = [each["spec"] for each in found(document, "template")]
            kinds = [("IoK8sApiCoreV1PodSpec", pod) for pod in pods if "containers" in pod]
            for kind, spec in [(MODELS[document["kind"]], document["spec"]), *kinds]:
                if kind is not None:
                    model = getattr(models, kind)
                    assert is_within(spec, model.from_dict(spec).to_dict()), path
                    wrong = {**spec, "a": 1}
                    assert not is_within(wrong, model.from_dict(wrong).to_dict())
            commands += [each for each in found(document, "command") if each[0] == "torchrun"]
    slurm = ENGINES / "slurm.sh"
    subprocess.run(["bash", "-n", str(slurm)], check=True)
    [line] = re.findall(r"until (torchrun .*?);", slurm.read_text().replace("\\\n", " "))
    for command in [*commands, shlex.split(line)]:
        options = get_args_parser().parse_args(command[1:])
        assert (options.nnodes, options.rdzv_backend) == ("4:6", "cpr")
        assert options.training_script == "train.py"
        assert options.rdzv_endpoint.endswith(":29400")
    page = (ROOT / "docs/engines.md").read_text()
    assert all(f"../examples/engines/{path.name}" in page for path in ENGINES.iterdir())
