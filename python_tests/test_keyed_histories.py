"""Random histories of a keyed table against a dictionary.

Admissions, evictions, snapshots, compaction, retention, crashes, publication, late and repeated
updates: after each event the store and the consumers have the ids of the newest snapshot, each with
a row of its own.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpr_ext
from cpr_ext.tools.publishing import KeyedRows, Subscriber, publish
from python_tests.keyed_job import DIM, SLOTS, TABLE, KeyedJob
from python_tests.tools.publishing.test_keyed_rows import Dictionary, of, recovered

ROOT = Path(__file__).resolve().parents[1]
EVENTS = 40


class History:
    def __init__(self, directory, seed):
        self.draw = random.Random(seed)
        self.directory = directory
        self.options = {
            "num_shards": self.draw.choice([1, 2]),
            "rebase_after": self.draw.choice([None, 1.0]),
            "scores": self.draw.random() < 0.5,
            "priority": self.draw.choice(
                [cpr_ext.MostFrequentlyUsed(), cpr_ext.AllRows(0.3), cpr_ext.LargestChange(0.2)]
            ),
            "schedule": cpr_ext.EverySteps(10**6),
        }
        if self.draw.random() < 0.5:
            self.options["compaction"] = cpr_ext.CompactionOptions(after=3)
        self.store = directory / "store"
        self.job = KeyedJob(self.store, **self.options)
        self.keyed = KeyedRows(SLOTS, DIM)
        self.subscriber = Subscriber(directory / "rows", {TABLE: self.keyed})
        self.consumer = Dictionary()
        self.counts = dict.fromkeys(("evicted", "crashed", "checked"), 0)

    @property
    def saved_step(self):
        self.job.ckpt.wait()
        segments = self.job.ckpt.store.dense.segments
        return segments[-1].last_step if segments else 0

    def train(self):
        evicted = self.job.map.num_evicted
        self.job.train(self.draw.randint(1, 4), new_ids=self.draw.choice([0, 1, 5]))
        self.counts["evicted"] += self.job.map.num_evicted - evicted

    def save(self):
        if self.job.ckpt.step_count:
            self.job.ckpt.save(self.draw.choice(["partial", "partial", "partial", "base"]))
            self.job.ckpt.wait()

    def crash(self):
        saved_step, old = self.saved_step, self.job.end()
        self.job = KeyedJob(self.store, seed=self.draw.randint(1, 99), **self.options)
        self.job.history, self.job.keys_at = old.history, old.keys_at
        report = self.job.ckpt.recover()
        assert (report.step, report.rows_of_other_ids) == (saved_step, 0)
        self.job.remember(report.step) if report.step else None
        self.counts["crashed"] += 1

    def publish(self):
        if self.saved_step:
            publish(self.store, self.directory / "rows")
            if self.draw.random() < 0.7:
                self.subscriber.poll()

    def follow(self):
        if self.saved_step:
            cut = self.draw.choice([None, None, 0, 1])
            self.consumer.follow(self.store, cut_off_after=cut)
            if cut is not None and self.draw.random() < 0.8:
                self.consumer.follow(self.store)

    def check(self):
        if not self.saved_step:
            return
        rows = recovered(self.store, self.directory / "copy", **self.options)
        assert rows.keys() == self.job.keys_at[self.saved_step]
        weights = {k: [weight for weight, _ in seen] for k, seen in self.job.history.items()}
        assert [key for key, row in rows.items() if row not in weights[key]] == []
        publish(self.store, self.directory / "rows")
        self.subscriber.poll()
        self.consumer.follow(self.store)
        assert of(self.keyed) == rows
        assert self.consumer.rows == rows
        self.counts["checked"] += 1


@pytest.mark.parametrize("seed", range(8))
def test_store_and_consumers_equal_a_dictionary_by_key(tmp_path, seed):
    history = History(tmp_path, seed)
    events = [history.train] * 4 + [history.save] * 3
    events += [history.crash, history.publish, history.follow, history.check]
    for _ in range(EVENTS):
        history.draw.choice(events)()
    history.train()
    history.save()
    history.check()
    history.job.end()
    assert history.counts["checked"] >= 1


def test_a_job_that_is_killed_at_random_has_each_row_under_its_id(tmp_path):
    draw = random.Random(7)
    store, steps = tmp_path / "store", 0
    for _ in range(2):
        command = [sys.executable, "-m", "python_tests.keyed_job", str(store)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
            steps += draw.randint(3, 40)
            for line in process.stdout:
                if int(line) >= steps:
                    break
            process.kill()
            reached = max([int(line), *map(int, process.stdout.read().split())])
        unbroken = KeyedJob(tmp_path / f"unbroken-{steps}", scores=True)
        unbroken.train(reached + 1)
        unbroken.end()
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(store, tmp_path / "copy")
        job = KeyedJob(tmp_path / "copy", scores=True, priority=cpr_ext.AllRows())
        report = job.ckpt.recover()
        job.ckpt.close()
        assert reached - 11 <= report.step <= reached + 1
        assert job.rows().keys() == unbroken.keys_at[report.step]
        assert unbroken.foreign(job.rows()) == []
