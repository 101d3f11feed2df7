"""Each code block of docs/migration.md takes a checkpoint of its kind over, in every bit."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchsnapshot
from torch.distributed.checkpoint.state_dict import get_state_dict

import cpr_ext

PAGE = (Path(__file__).resolve().parents[1] / "docs/migration.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w\S*) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
BATCH, OLD_STEP, LAST_STEP = 16, 5, 8


def build():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(500, 8, sparse=True), torch.nn.Linear(8, 1))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train_step(model, optimizer, step):
    rows = torch.randint(0, 500, (BATCH, 4), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(rows).mean().backward()
    optimizer.step()


def trained(steps):
    torch.manual_seed(3)
    model, optimizer = build()
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def state(model, optimizer):
    return str((model.state_dict(), optimizer.state_dict()))


def save_with_torch(model, optimizer):
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": OLD_STEP}
    torch.save(parts, "old.pt")


def save_with_dcp(model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": states, "step": OLD_STEP}
    dcp.save(parts, checkpoint_id="old_dcp", no_dist=True)


def save_with_torchsnapshot(model, optimizer):
    progress = torchsnapshot.StateDict(step=OLD_STEP)
    app_state = {"model": model, "optimizer": optimizer, "progress": progress}
    torchsnapshot.Snapshot.take("old_snapshot", app_state)


SAVE = {
    "torch.save": save_with_torch,
    "dcp": save_with_dcp,
    "torchsnapshot": save_with_torchsnapshot,
}


def run(block):
    names = {"torch": torch, "cpr_ext": cpr_ext, "build": build, "train_step": train_step}
    names |= {"BATCH": BATCH, "num_steps": LAST_STEP}
    exec(BLOCKS[block], names)
    return names


def test_no_block_is_left_out():
    assert {*BLOCKS} == {*SAVE, "back"}
    assert PAGE.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("kind", SAVE)
def test_a_block_continues_the_old_checkpoint_and_then_the_store(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    SAVE[kind](*trained(OLD_STEP))
    first = run(kind)
    end = LAST_STEP if kind == "torch.save" else OLD_STEP  # only that block trains on
    assert (first["report"].step, first["ckpt"].step_count) == (0, end)
    assert first["ckpt"].num_samples == end * BATCH
    assert state(first["model"], first["optimizer"]) == state(*trained(end))
    again = run(kind)
    assert again["report"].step == end
    assert state(again["model"], again["optimizer"]) == state(*trained(end))


def test_the_way_back_is_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_with_torch(*trained(OLD_STEP))
    run("torch.save")
    model = run("back")["model"]
    assert str(model.state_dict()) == str(trained(LAST_STEP)[0].state_dict())
