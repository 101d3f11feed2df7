"""Random histories of a keyed table against a dictionary.

Admissions, evictions, snapshots, retention, crashes, ways back, publication, late and
repeated updates: after each event peers' parity, the store and the consumers equal it by key.
"""

import random
import shutil

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.parity.own_rows import KeyCopies, OwnRows
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.wings.publishing import KeyedRows, Subscriber, keyed_rows, publish, subscriber
from cpr_ext.wings.publishing.keyed_rows import _Progress
from python_tests.distributed.parity.members import holding
from python_tests.distributed.parity.test_key_copies import KeyedTrainer
from python_tests.keyed_job import DIM, SLOTS, TABLE
from python_tests.wings.publishing.test_keyed_rows import Dictionary, of, recovered

EVENTS = 30


class History:
    """A job with parity, a peer that holds it, and consumers that are prompt or late.

    Attributes:
        known: the dictionary, (weight, state) by key, at each step of the past as it is now.
    """

    def __init__(self, directory, seed):
        self.draw = random.Random(seed)
        self.directory = directory
        self.options = {
            "num_shards": self.draw.choice([1, 2]),
            "store": cpr_ext.StoreOptions(
                rebase_after=self.draw.choice([None, 1.0]),
                retention=cpr_ext.Retention(full_recovery_points=self.draw.choice([0, 2])),
            ),
            "scores": self.draw.random() < 0.5,
            "priority": self.draw.choice([
                cpr_ext.MostFrequentlyUsed(),
                cpr_ext.AllRows(0.3),
                cpr_ext.LargestChange(0.2),
                cpr_ext.AllRows(),
            ]),
            "schedule": cpr_ext.EverySteps(10**6),
        }  # fmt: skip
        self.store = directory / "store"
        self.known = {0: {}}
        self.counts = dict.fromkeys(
            ("evicted", "crash", "lose", "go_back", "saved", "late", "checked"), 0
        )
        self.job = KeyedTrainer(self.store, **self.options)
        self.protect(0)
        self.prompt, self.late = Consumers(self, "prompt"), Consumers(self, "late")

    def protect(self, step):
        """Encode parity: the only other member's part is a copy."""
        self.job.own.begin(step)
        self.peer = holding(self.job.own.layout.num_words, 0)
        self.peer.begin(step, [0])
        self.peer.words.copy_(self.job.words())

    @property
    def step(self):
        return self.job.ckpt.step_count

    @property
    def saved_step(self):
        self.job.ckpt.wait()
        segments = self.job.ckpt.store.manifest.dense
        return segments[-1].last_step if segments else 0

    def train(self):
        evicted = self.job.map.num_evicted
        for _ in range(self.draw.randint(1, 4)):
            self.job.train(1, new_ids=self.draw.choice([0, 4, 12]))
            self.peer.receive(0, self.step, self.job.own.message(self.step, 0))
            self.known[self.step] = self.job.rows()
        self.counts["evicted"] += self.job.map.num_evicted - evicted

    def save(self):
        if self.step:
            self.job.ckpt.save(self.draw.choice(["partial", "partial", "partial", "base"]))
            self.job.ckpt.wait()
            self.counts["saved"] += 1

    def crash(self):
        """All is lost but the store."""
        saved_step = self.saved_step
        self.job.end()
        self.job = KeyedTrainer(self.store, seed=self.draw.randint(1, 99), **self.options)
        report = self.job.ckpt.recover()
        assert (report.step, report.rows_of_other_ids) == (saved_step, 0)
        self.require_of_store(self.job.rows(), saved_step)
        self.return_to(saved_step)
        self.known[saved_step] = self.job.rows()
        self.protect(saved_step)
        self.counts["crash"] += 1

    def rebuild(self, store):
        """A new worker with what the peer and the dense copies have."""
        step, own = self.step, self.job.own
        kept = own.shared_copy(step), own.to_keep(step)
        self.job.ckpt.wait()
        if store == self.store:
            self.job.end()
        made = KeyedTrainer(store, seed=self.draw.randint(1, 99), **self.options)
        made.own.write(0, 0, self.peer.words)
        made.own.restore(step, *kept, [(0, self.peer.words.numel())])
        assert made.own.obstacle == ""
        return made

    def lose(self):
        """The worker is lost, and replaced from its peer's parity."""
        if self.step:
            self.job = self.rebuild(self.store)
            self.counts["lose"] += 1

    def go_back(self):
        """Another member has not completed the step, perhaps in the middle of the next one."""
        if self.draw.random() < 0.5:
            _, new = self.job.map([1, 2, 10**15 + self.draw.randint(0, 9)])
            with self.job.ckpt.writing_rows(TABLE, new), torch.no_grad():
                self.job.weight[new] = 7.0
        log = self.job.own.log
        state = self.draw.randint(log.oldest, log.newest)
        self.job.own.go_back(state)
        self.peer.go_back(state)
        self.return_to(state)
        self.counts["go_back"] += 1

    def return_to(self, step):
        self.known = {at: rows for at, rows in self.known.items() if at <= step}

    def publish(self):
        if self.saved_step:
            publish(self.store, self.directory / "rows")

    def follow(self):
        if self.saved_step:
            self.late.follow(cut_off=True)
            self.counts["late"] += 1

    def require_of_store(self, rows, step):
        assert rows.keys() == self.known[step].keys()
        if self.options["priority"] == cpr_ext.AllRows():
            assert rows == self.known[step]
        seen = [known for at, known in self.known.items() if at <= step]
        for key, row in rows.items():
            assert any(known.get(key) == row for known in seen), key

    def check(self):
        assert self.job.rows() == self.known[self.step]
        if self.step:
            peer = self.rebuild(self.directory / "peer")
            peer.end()
            shutil.rmtree(self.directory / "peer")
            assert peer.rows() == self.known[self.step]
            assert torch.equal(peer.map.key, self.job.map.key)
        if step := self.saved_step:
            rows = recovered(self.store, self.directory / "copy", states=True, **self.options)
            self.require_of_store(rows, step)
            self.publish()
            self.prompt.follow()
            self.prompt.require({key: weight for key, (weight, _) in rows.items()})
            self.counts["checked"] += 1

    def run(self):
        events = [self.train] * 5 + [self.save] * 4
        events += [self.crash, self.lose, self.go_back, self.publish, self.follow]
        for _ in range(EVENTS):
            self.draw.choice(events)()
            self.check()
        self.train()
        self.save()
        self.check()
        self.late.follow()
        self.late.require(of(self.prompt.keyed))
        self.job.end()


class Consumers:
    """One that subscribes to the publication, and one that reads the store by key."""

    def __init__(self, history, name):
        self.history = history
        self.keyed = KeyedRows(SLOTS, DIM)
        self.subscriber = Subscriber(history.directory / "rows", {TABLE: self.keyed})
        self.dictionary = Dictionary()

    def follow(self, *, cut_off=False):
        draw, store = self.history.draw, self.history.store
        self.subscriber.poll()
        cut = draw.choice([None, 0, 1]) if cut_off else None
        for _ in range(draw.randint(1, 2)):
            self.dictionary.follow(store, cut_off_after=cut)

    def require(self, weights):
        assert of(self.keyed) == weights
        assert self.dictionary.rows == weights


@pytest.mark.parametrize("seed", range(6))
def test_parity_store_and_consumers_equal_a_dictionary_by_key(tmp_path, seed):
    history = History(tmp_path, seed)
    history.run()
    assert history.counts["checked"] >= 10


def nothing(*_, **__):
    return None


MISTAKES = {
    "changed keys are not saved first": (KeyWatch, "must_save", lambda *_: torch.empty(0).numpy()),
    "ids of a cut-off update stay": (keyed_rows, "_progress_of", lambda *_: _Progress()),
    "parity takes no keys": (KeyCopies, "take", nothing),
    "keys stay on the way back": (KeyCopies, "give_back", nothing),
    "maps are not built again": (cpr_ext.SlotKeys, "rebuild", nothing),
    "rows of new ids are in no delta": (OwnRows, "before_write", nothing),
    "keys change before they are kept": (OwnRows, "_before_keys_change", nothing),
    "evicted ids stay": (keyed_rows, "gone_keys", lambda _, before, now: before[:0]),
    "a subscriber keeps its keys": (KeyedRows, "set_keys", nothing),
    "rows of old keys are applied": (subscriber, "put_rows", nothing),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises((AssertionError, cpr_ext.CprError)):
        run_all(tmp_path)


def run_all(directory):
    for seed in range(12):
        History(directory / str(seed), seed).run()
