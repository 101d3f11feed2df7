"""A loop is killed and recovered in new processes: what it forgets is found, and named."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.proving.prove import prove

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(__file__).with_name("omissions.py"))


def test_a_script_that_saves_all_is_proven_and_its_own_store_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proof = prove(SCRIPT)
    assert proof.is_proven, str(proof)
    assert proof.kills == [1, 2, 3, 4]
    assert proof.compared["arrays of tables"] == 3
    assert proof.compared["inputs"] >= 2
    assert proof.compared["losses"] == 1
    assert proof.warnings == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("forgotten", "what", "variable", "remedy"),
    [
        ("reader", "input 1 of ", "train: reader.state_dict()['next_batch']", "'reader': reader}"),
        ("generator", "input 1 of ", "train: generator", "state={'generator': generator}"),
        ("scheduler", "'lr' of group 0: it is 0.1, and was 0.05", "", "before the Checkpointer's"),
        ("average", "average.weights['0.weight']", "average.weights", "lambda: average.weights}"),
        ("inner", "of the model", "train: dense.state[0]", "Checkpointer(model, [..., dense]"),
        ("teacher", "loss 1", "teacher.weight", "one module that holds the model and teacher"),
    ],
)
def test_what_a_script_forgets_is_named_with_its_remedy(forgotten, what, variable, remedy):
    proof = prove(SCRIPT, [forgotten])
    assert not proof.is_proven
    found = proof.difference
    assert (found.killed_after, found.step) == (1, 2)
    assert what in f"{found.what}: {found.how}"
    assert variable in "".join(found.variables[:1])
    assert remedy in found.remedy
    assert found.remedy in str(proof)


def test_a_variable_that_may_differ_is_ignored():
    assert prove(SCRIPT, ["average"], steps=3, ignore=["average"]).is_proven


LOOP = """
import torch, cpr_ext
model = torch.nn.Sequential(torch.nn.EmbeddingBag(40, 4), torch.nn.Linear(4, 1))
{register}
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
with cpr_ext.Checkpointer(model, optimizer, {store}) as ckpt:
    {recover}
    for step in range(8):
        {before}
        model(torch.randint(0, 40, (6, 3))).mean().backward()
        optimizer.step()
        ckpt.step(6)
"""
GOOD = {
    "register": "",
    "store": "'store'",
    "recover": "ckpt.recover()",
    "before": "optimizer.zero_grad()",
}


SHUFFLED = """
import torch, cpr_ext
model = torch.nn.Sequential(torch.nn.EmbeddingBag(40, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(120).reshape(40, 3) % 40, torch.rand(40, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with cpr_ext.Checkpointer(model, optimizer, "store") as ckpt:
    ckpt.recover()
    for rows, wanted in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(rows), wanted).backward()
        optimizer.step()
        ckpt.step(4)
"""


def test_a_loader_that_begins_again_is_named_before_what_came_of_it(tmp_path):
    (tmp_path / "train.py").write_text(SHUFFLED)
    remedy = prove(str(tmp_path / "train.py"), steps=3).difference.remedy
    assert "ResumableLoader(loader)" in remedy


def write(path, **changes):
    path.write_text(LOOP.format(**{**GOOD, **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {
                "register": "model.register_buffer('seen', torch.zeros(1), persistent=False)",
                "before": "optimizer.zero_grad(); model.seen += 1",
            },
            r"buffer 'seen', which state_dict\(\) lacks,: its value differs\n.*persistent=True",
        ),
        (
            {"register": "import os", "store": "f'store-{os.getpid()}'"},
            "the step: it resumes from step 0\n.*with the same directory each time",
        ),
        (
            {"before": "pass"},
            "number of gradients left from the step before: it is 0, and was (?s:.*)zero_grad",
        ),
        (
            {"before": "torch.seed()"},
            "two runs differ before any kill, in step 1: .*\n.*seed all generators",
        ),
    ],
)
def test_other_ways_to_differ(tmp_path, changes, text):
    proof = prove(write(tmp_path / "train.py", **changes), steps=4)
    with pytest.raises(AssertionError, match=text):
        assert proof.is_proven, str(proof)


@pytest.mark.parametrize(
    ("source", "steps", "text"),
    [
        ("print('nothing')", 5, "makes no cpr_ext.Checkpointer, so there is nothing to prove"),
        ("raise SystemExit('no')", 5, r"ended after 0 steps; .*\(exit status 1\):\n  \| no"),
        (LOOP.format(**GOOD), 1, "steps is 1; a proof needs at least 2"),
        (
            *(LOOP.format(**{**GOOD, "recover": "pass"}), 5),
            r"(?s)after the kill at step 1 .*call recover\(\) before",
        ),
    ],
)
def test_what_cannot_be_proven_is_refused_with_the_reason(tmp_path, source, steps, text):
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(UsageError, match=text):
        prove(str(tmp_path / "train.py"), steps=steps)


def test_options_whose_losses_are_known_are_replaced_and_named(tmp_path):
    script = write(
        tmp_path / "train.py",
        store="'store', store=cpr_ext.StoreOptions(precision=cpr_ext.Precision('int8'))",
    )
    text = str(prove(script, steps=2))
    assert "not proven: what snapshots lose by precision=Precision(" in text


def test_the_command_ends_with_1_if_something_differs():
    run = CliRunner().invoke
    done = run(app, ["prove", "--steps", "3", SCRIPT, "generator"])
    assert done.exit_code == 1
    assert "remedy: pass state={'generator': generator}" in done.output
    done = run(app, ["prove", "--steps", "2", "--json", str(ROOT / "examples/quickstart.py")])
    assert (done.exit_code, '"is_proven": true' in done.output) == (0, True)


@pytest.mark.parametrize(
    ("example", "module", "ignore"),
    [
        ("target_pls", "torch", []),
        ("lightning_callback", "lightning.pytorch", []),
        # What the Trainer keeps for its log; its own checkpoints lack it, too.
        ("transformers_trainer", "transformers", ["_tr_loss", "grad_norm"]),
    ],
)
def test_examples_that_train_resume(example, module, ignore):
    pytest.importorskip(module)
    proof = prove(str(ROOT / f"examples/{example}.py"), steps=3, ignore=ignore)
    assert proof.is_proven, str(proof)


def test_the_process_of_a_proof_is_a_new_one(tmp_path, monkeypatch):
    monkeypatch.undo()
    script = write(tmp_path / "train.py", recover="open('no file')")
    with pytest.raises(UsageError, match="No such file or directory: 'no file'"):
        prove(script)
