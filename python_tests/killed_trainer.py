"""Trains, is killed, and continues; run by ``test_process_death`` in a process of its own.

The process forks each trainer, so that none spends seconds importing torch, and never starts a
thread itself. It prints what it did as JSON; a broken promise is an AssertionError.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import sklearn.metrics  # noqa: F401 - imported here once, not in every trainer
import torch
import torch._dynamo

import cpr_ext
from cpr_ext.storage.manifest import read_manifest
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic
from cpr_ext.wings.lab.dlrm.trainer import Trainer, TrainOptions

NUM_SHARDS = 3
BATCH_SIZE = 32
NUM_STEPS = 200
SOURCE = Synthetic([40, 500, 3000], num_samples=BATCH_SIZE * NUM_STEPS)
# With these a continued run ends in the very state of an uninterrupted one.
EXACT = {"priority": cpr_ext.AllRows()}
KINDS = [
    EXACT,
    {"priority": cpr_ext.MostFrequentlyUsed()},
    {"priority": cpr_ext.SubSampledUsed()},
    {"priority": cpr_ext.LargestChange()},
]


class Journal:
    """What a trainer told before it was killed: one short write per line."""

    def __init__(self, path):
        self.path = path

    def write(self, event, value):
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{event} {value}\n".encode())
        os.close(descriptor)

    def read(self, event):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == event]


def train(store, kind, journal):
    """A trainer's life: tells where it resumed, what `wait` acknowledged, and how it ended."""
    torch.set_num_threads(1)
    resumed = []

    def observe(progress):
        if progress.message:
            return
        if not resumed:
            resumed.append(progress.step - 1)
            journal.write("resumed", progress.step - 1)
        if progress.step % 7 == 0:
            trainer._checkpointer.wait()
            journal.write("durable", trainer._checkpointer.store.manifest.dense[-1].last_step)

    trainer = Trainer(
        find_preset("tiny"),
        SOURCE,
        TrainOptions(
            settings=replace(SOURCE.recommended, batch_size=BATCH_SIZE),
            store=store,
            every_steps=4,
            num_shards=NUM_SHARDS,
            **kind,
        ),
        observe,
    )
    result = trainer.run()
    digest = hashlib.sha256()
    for value in trainer._model.state_dict().values():
        digest.update(value.numpy().tobytes())
    journal.write("finished", result.steps)
    journal.write("digest", digest.hexdigest())


def fork_trainer(store, kind, journal):
    pid = os.fork()
    if pid:
        return pid
    try:
        train(store, kind, journal)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait_for(journal, event, pid):
    """Until the trainer has written ``event``, or has ended."""
    deadline = time.monotonic() + 120
    while not journal.read(event) and time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)


def committed_step(store):
    """Step of the newest snapshot committed as a whole; every segment that is listed is there."""
    if not (store / "MANIFEST.json").exists():
        return 0
    reader = StoreReader(store)
    for record in reader.manifest.records():
        reader.open(record)
    return reader.manifest.newest.last_step if reader.manifest.newest else 0


def run_to_the_end(store, kind, journal):
    _, status = os.waitpid(fork_trainer(store, kind, journal), 0)
    assert status == 0
    assert journal.read("finished") == [str(NUM_STEPS)]
    assert committed_step(store) == NUM_STEPS
    record = read_manifest(store).dense[-1]
    assert record.num_samples == NUM_STEPS * BATCH_SIZE
    return journal.read("digest")[0]


def kill_again_and_again(directory, number, kills_wanted, chance):
    """One store: killed at random moments, continued each time, and at last run to its end."""
    kind = KINDS[number % len(KINDS)]
    store = directory / f"store-{number}"
    durable, kills, before_first_step = 0, 0, 0
    for life in range(1000):
        journal = Journal(directory / f"journal-{number}-{life}")
        committed = committed_step(store)
        assert committed >= durable, f"step {durable} was durable, the store is at {committed}"
        if kills == kills_wanted or committed == NUM_STEPS:
            break
        pid = fork_trainer(store, kind, journal)
        # However slow the machine is, every second trainer lives to see a step made durable.
        if life % 2:
            wait_for(journal, "durable", pid)
        elif chance.random() < 0.8:
            wait_for(journal, "resumed", pid)
        time.sleep(chance.uniform(0.0, 0.25))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, "the trainer failed"
            break
        kills += 1
        resumed = journal.read("resumed")
        before_first_step += not resumed
        assert resumed in ([], [str(committed)]), f"resumed at {resumed}, committed {committed}"
        durable = max([durable, *map(int, journal.read("durable"))])
    journal = Journal(directory / f"journal-{number}-end")
    digest = run_to_the_end(store, kind, journal)
    return kills, before_first_step, durable, digest if kind is EXACT else None


def main(directory, kills_wanted):
    chance = random.Random()
    digest = run_to_the_end(directory / "straight", EXACT, Journal(directory / "journal-straight"))
    told = {"kills": 0, "before_first_step": 0, "stores": 0, "durable": []}
    while told["kills"] < kills_wanted:
        kills, early, durable, end = kill_again_and_again(directory, told["stores"], 10, chance)
        assert end in (None, digest), "a continued run ended elsewhere than an uninterrupted one"
        told["kills"] += kills
        told["before_first_step"] += early
        told["stores"] += 1
        told["durable"].append(durable)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
