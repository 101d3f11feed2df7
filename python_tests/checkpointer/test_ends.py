"""The end of a process by a signal: whatever dies around it, all is saved, or a line says why not.

Drawn: signal x to whom x how often x moment x workers of a loader and children.

test_ends.py N [SEED]    draws N of them
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[2]))  # it runs as a script, too
import cpr_ext
from cpr_ext.saving.saver import Saver
from python_tests import preloaded
from python_tests.helpers import die

DRAWN, BEFORE, MOST = 8, 8, 40  # steps of the store that it begins with, and at most
ROWS = 60_000  # a base takes milliseconds
MOMENTS = (
    "recover", "batch", "forward", "optimizer", "step", "save", "wait", "evaluation",
    "close",
)  # fmt: skip
REASON = "saves nothing|nothing more is saved|may not be saved|failed"


class Items(Dataset):
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.tensor([index * 7919 % ROWS, index * 31 % 100])


def build():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 8, sparse=True), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model, optimizer, batch, before=lambda moment: None):
    before("forward")
    model(batch).square().sum().backward()
    before("optimizer")
    optimizer.step()
    optimizer.zero_grad()


def digest(model, optimizer):
    hashed = hashlib.sha1(torch.get_rng_state().numpy())
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy())
        hashed.update(optimizer.state[parameter]["sum"].numpy())
    return hashed.hexdigest()


class Killer:
    """A process that sends the signals, a while after a moment of a step."""

    def __init__(self, plan):
        self.plan, own = plan, os.getpid()
        self.process = subprocess.Popen(
            ["/bin/sh"], stdin=subprocess.PIPE, text=True, process_group=0
        )
        self.target = -own if plan["to"] == "group" else own

    def at(self, moment, step=-1):
        plan = self.plan
        if self.process.stdin.closed or (moment, step) != (plan["moment"], plan["step"]):
            return
        workers = [child.pid for child in torch.multiprocessing.active_children()]
        first = f"kill {' '.join(map(str, workers))}\n" if workers else ""
        sent = f"kill -s {plan['signal']} -- {self.target}\nsleep {plan['between']}\n"
        first = first if plan["to"] == "workers first" else ""
        self.process.stdin.write(f"sleep {plan['delay']}\n{first}" + plan["times"] * sent)
        self.process.stdin.close()


def life(store, plan):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO)
    killer = Killer(plan)
    model, optimizer = build()
    child = subprocess.Popen(["sleep", "100"]) if plan["child"] else None
    options = {"schedule": cpr_ext.EverySteps(5)}
    options |= {"on_sigterm": "save"} if plan["listens"] else {}
    given = {"num_workers": plan["workers"], "generator": torch.Generator()}
    data, batches = Items(0.01 if plan["moment"] == "batch" else 0.0), None
    ckpt = cpr_ext.Checkpointer(model, optimizer, store, **options)
    first = cpr_ext.position(store).step if plan["begins"] else 0
    if plan["early"]:  # the loader's workers are there before all else
        batches = iter(DataLoader(data, sampler=range(4 * first, 4 * MOST), batch_size=4, **given))
    with ckpt:
        killer.at("recover")
        ckpt.recover()
        print("trained", ckpt.step_count, flush=True)
        if batches is None:
            batches = iter(
                DataLoader(data, sampler=range(4 * first, 4 * MOST), batch_size=4, **given)
            )
        while True:
            step = ckpt.step_count - first
            killer.at("batch", step)
            time.sleep(0.5 if step > 10 else 0.0)  # the signal is late
            batch = next(batches)
            train(model, optimizer, batch, partial(killer.at, step=step))
            killer.at("step", step)
            ckpt.step(4)
            print("trained", ckpt.step_count, flush=True)
            if plan["moment"] in ("save", "wait") and step == plan["step"]:
                killer.at("save", step)
                ckpt.save("base")
                killer.at("wait", step)
                ckpt.wait()
            if plan["moment"] == "close" and step == plan["step"]:
                break
            if plan["moment"] == "evaluation" and step == plan["step"]:
                killer.at("evaluation", step)
                model.eval()
                for _, held_out in zip(range(40), DataLoader(data, 4, **given), strict=False):
                    model(held_out)
                model.train()
        killer.at("close", step)
    if child:
        child.kill()


@cache
def references():
    """The digest after each step."""
    model, optimizer = build()
    data, found = Items(), [None]
    for step in range(MOST):
        train(model, optimizer, torch.stack([data[4 * step + number] for number in range(4)]))
        found.append(digest(model, optimizer))
    return found


@cache
def begun():
    """A store of the first steps."""
    folder = tempfile.mkdtemp()
    model, optimizer = build()
    data = Items()
    with cpr_ext.Checkpointer(model, optimizer, f"{folder}/store") as ckpt:
        for step in range(BEFORE):
            batch = torch.stack([data[4 * step + number] for number in range(4)])
            train(model, optimizer, batch)
            ckpt.step(4)
    return Path(folder) / "store"


def draw(seed):
    chance = random.Random(seed)
    plan = {
        "signal": chance.choice(("TERM", "TERM", "INT")),
        "to": chance.choice(("group", "group", "parent", "workers first")),
        "times": chance.choice((1, 1, 2)), "between": round(chance.choice((0.0, 0.05)), 3),
        "moment": chance.choice(MOMENTS), "step": chance.choice((0, 1, 2, 4, 5)),
        "delay": round(chance.choice((0.0, chance.random() * 0.03, chance.random() * 0.2)), 3),
        "workers": chance.choice((0, 2, 2)), "child": chance.random() < 0.3,
        "begins": chance.random() < 0.6, "early": chance.random() < 0.3,
    }  # fmt: skip
    plan["listens"] = plan["signal"] == "TERM" or chance.random() < 0.5
    plan["step"] = -1 if plan["moment"] == "recover" else plan["step"]
    return plan


def try_end(plan, store):
    """What is wrong with how it ended, one text each; and how that was."""
    if plan["begins"]:
        shutil.copytree(begun(), store)
    done = preloaded.run([__file__, "life", store, json.dumps(plan)], timeout=120)
    trained = [int(line.split()[1]) for line in done.stdout.splitlines() if "trained" in line]
    model, optimizer = build()
    torch.manual_seed(1)
    ckpt = cpr_ext.Checkpointer(model, optimizer, store)
    step = ckpt.recover(mode="full" if (store / "MANIFEST.json").exists() else "partial").step
    die(ckpt)
    wrong = []
    right = (143, -15) if plan["signal"] == "TERM" else (130, -2)
    if plan["to"] == "workers first":  # without them training cannot go on
        right = (*right, 143, *(() if plan["listens"] else (1,)))
    if "Exception ignored" in done.stderr:  # Python drops a Ctrl-C in __del__ or at a fork
        right = (*right, 1)
    if plan["moment"] == "close":
        right = (*right, 0)
    if done.returncode not in right:
        wrong.append(f"ended with {done.returncode}")
    last = trained[-1] if trained else 0
    is_reasoned = re.search(REASON, done.stderr) is not None
    if step < last and not is_reasoned:
        wrong.append(f"{last} steps were trained, {step} are saved, and no line says why")
    if step > 0 and digest(model, optimizer) != references()[step]:
        wrong.append(f"what is saved is not the state of step {step}")
    if re.search("Fatal Python|reentrant|UsageError", done.stderr):
        wrong.append("it crashed")
    return wrong, f"{done.returncode}, step {step} of {last}\n{done.stderr}"


@pytest.mark.parametrize("seed", range(DRAWN))
def test_all_is_saved_or_a_line_says_why_not(tmp_path, seed):
    plan = draw(seed)
    wrong, how = try_end(plan, tmp_path / "store")
    assert wrong == [], f"{plan}\n{how}"


@pytest.mark.parametrize("second", [KeyboardInterrupt, RuntimeError])  # of a loader's worker
def test_what_interrupts_the_end_leaves_a_line_that_says_what_may_be_lost(
    tmp_path, caplog, monkeypatch, second
):
    def press(*given):
        raise second if given else KeyboardInterrupt

    model, optimizer = build()
    ckpt = cpr_ext.Checkpointer(model, optimizer, tmp_path)
    for _ in range(2):
        train(model, optimizer, torch.tensor([[1, 2]]))
        ckpt.step()
        ckpt.wait()
    monkeypatch.setattr(Saver, "quiesce", press)
    with pytest.raises(KeyboardInterrupt), ckpt:
        press()
    assert "training ended at step 2: steps after 1 may not be saved" in caplog.text


HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
LEFT_OPEN = """
import torch, cpr_ext
from python_tests.checkpointer.test_ends import build, train
model, optimizer = build()
ckpt = cpr_ext.Checkpointer(model, optimizer, "store")
for step in range({steps}):
    train(model, optimizer, torch.tensor([[1, 2]]))
    ckpt.step()
    if step < 2:
        ckpt.wait()
        ckpt.save()
        ckpt.wait()
{then}
"""

READER = """
other = cpr_ext.Checkpointer(*build(), "other")
other.recover(from_store="store")
"""


@pytest.mark.parametrize(
    ("steps", "then", "lost"),
    [
        (3, "", "at step 3: steps after 2 may"),
        (3, "ckpt.close()", ""),
        (2, "", ""),
        (2, READER, ""),
    ],
)
def test_a_process_that_ends_without_close_says_what_may_be_lost(tmp_path, steps, then, lost):
    script = LEFT_OPEN.format(steps=steps, then=then)
    done = preloaded.run(["-c", HERE + script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lost in done.stderr
    assert ("may not be saved" in done.stderr) == bool(lost)


def main(number, first=0):
    """Draw so many, and say which are wrong."""
    count, saved = 0, 0
    for seed in range(first, first + number):
        plan = draw(seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong, how = try_end(plan, Path(folder) / "store")
            except Exception as error:
                wrong, how = [f"{type(error).__name__}: {error}"], ""
        count += bool(wrong)
        saved += "training ends" in how
        if wrong:
            print(seed, wrong, plan, how[-2500:], flush=True)
    print(f"{number} ends, {saved} of them saved after SIGTERM, {count} wrong", flush=True)
    return count


if __name__ == "__main__":
    if sys.argv[1] == "life":
        life(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(bool(main(*map(int, sys.argv[1:]))))
