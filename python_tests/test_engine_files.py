"""The files for engines fit their schemas, and torchrun takes the options that they give."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "examples/engines"
# The API's own models, generated from what clusters serve.
MODELS = {
    "Deployment": None,  # it has none
    "Service": None,
    "Job": "IoK8sApiBatchV1JobSpec",
    "JobSet": "JobsetV1alpha2JobSetSpec",
    "ClusterTrainingRuntime": "TrainerV1alpha1TrainingRuntimeSpec",
}
DOCUMENTS = [
    (path.name, document)
    for path in sorted(ENGINES.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]


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


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_a_file_has_no_field_that_its_schema_does_not_know(name, document):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    pods = [each["spec"] for each in found(document, "template") if "containers" in each["spec"]]
    kinds = [(MODELS[document["kind"]], document["spec"])]
    kinds += [("IoK8sApiCoreV1PodSpec", pod) for pod in pods]
    for kind, spec in kinds:
        if kind is not None:
            model = getattr(models, kind)
            assert is_within(spec, model.from_dict(spec).to_dict()), name
            assert not is_within({**spec, "a": 1}, model.from_dict({**spec, "a": 1}).to_dict())


def commands():
    for name, document in DOCUMENTS:
        yield from ((name, c) for c in found(document, "command") if c[0] == "torchrun")
    text = (ENGINES / "slurm.sh").read_text().replace("\\\n", " ")
    [line] = re.findall(r"until (torchrun .*?);", text)
    yield "slurm.sh", shlex.split(line)


@pytest.mark.parametrize(("name", "command"), commands())
def test_torchrun_takes_the_options(name, command):
    options = get_args_parser().parse_args(command[1:])
    assert (options.nnodes, options.rdzv_backend) == ("4:6", "cpr")
    assert options.training_script == "train.py"
    assert options.rdzv_endpoint.endswith(":29400")


def test_the_script_is_one():
    subprocess.run(["bash", "-n", str(ENGINES / "slurm.sh")], check=True)


def test_the_page_names_each_file():
    page = (ROOT / "docs/engines.md").read_text()
    for path in ENGINES.iterdir():
        assert f"../examples/engines/{path.name}" in page
