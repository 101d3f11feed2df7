"""Random changes of structure, and writes that nothing sees: no claim survives that is not true.

Each of the three proofs is also taken out: then some claim is false.
"""

import random
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cpr_ext
from cpr_ext.errors import CprError, SnapshotError, SnapshotFailedWarning, UntrackedChangeWarning
from cpr_ext.saving.round_trip import RoundTrips
from cpr_ext.saving.scrub import Scrub
from cpr_ext.tracking.inventory import Inventory
from python_tests.helpers import die, flip, same_bits
from python_tests.tracking.watched import NEVER

N = 80
FAULTS = (UntrackedChangeWarning, SnapshotFailedWarning)


class Moving(torch.optim.SGD):
    """A subclass that moves rows without a gradient in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


KINDS = {"adagrad": torch.optim.Adagrad, "moving": Moving, "sgd": torch.optim.SGD}


class Loop:
    """A loop whose structure changes; ``changes`` made so far are those of a new process, too."""

    def __init__(self, directory, kind, changes=()):
        self.directory, self.kind, self.changes = directory, kind, []
        torch.manual_seed(0)
        tables = {name: nn.Embedding(N, 4, sparse=True) for name in "abc"}
        self.model = nn.ModuleDict({**tables, "head": nn.Linear(4, 1), "top": nn.Linear(1, 1)})
        first = KINDS[kind]([self.model["a"].weight], lr=0.1)
        second = torch.optim.Adagrad([self.model["b"].weight], lr=0.1)
        dense = torch.optim.SGD(self.model["head"].parameters(), lr=0.01)
        self.optimizers = [first, second, dense]
        self.inner = torch.optim.SGD(self.model["top"].parameters(), lr=0.01, momentum=0.9)
        self.ckpt = cpr_ext.Checkpointer(
            self.model,
            self.optimizers,
            directory,
            priority=cpr_ext.AllRows(),
            consistency="step",
            save_at_close=False,
            **NEVER,
        )
        self.saved, self.number, self.is_damaged = {}, 0, False
        for change in changes:
            self.do(change)

    def do(self, action):
        getattr(self, action)()
        if action in ("add_group", "move_table", "wrap"):
            self.changes.append(action)

    def train(self):
        self.number += 1
        used = ["a", "b", *("c" for each in self.changes if each == "add_group")]
        rows = torch.tensor([self.number % N, 3 * self.number % N])
        for optimizer in [*self.optimizers, self.inner]:
            optimizer.zero_grad()
        out = self.model["head"](sum(self.model[name](rows) for name in used))
        self.model["top"](out).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if "wrap" in self.changes:
            self.inner.step()  # of a wrapper that the Checkpointer does not know
        self.ckpt.step()

    def save(self):
        if self.number == 0:
            self.train()
        self.saved[self.ckpt.step_count] = (self.state(), list(self.changes))
        self.ckpt.save()
        try:
            self.ckpt.wait()
        except SnapshotError as error:  # it claims nothing
            if "changed unseen" not in str(error.__cause__):
                raise

    def state(self):
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for table in self.ckpt.tables:
            for name, array in table.arrays().items():
                state[f"{table.name}/{name}"] = array.clone()
        for index, values in enumerate(self.inner.state.values()):
            state[f"inner/{index}"] = values["momentum_buffer"].clone()
        return state

    def write_past(self):
        with torch.no_grad():
            for name in "abc":
                self.model[name].weight.data[7:11] += 1

    def add_group(self):
        if "add_group" not in self.changes:
            self.optimizers[1].add_param_group({"params": [self.model["c"].weight]})

    def move_table(self):
        if "move_table" not in self.changes:
            weight = self.model["b"].weight
            self.optimizers[1].param_groups[0]["params"].clear()
            self.optimizers[1].state.pop(weight, None)
            self.optimizers[0].add_param_group({"params": [weight]})

    def wrap(self):
        """From now on another optimizer steps, too."""

    def damage(self):
        """The next snapshot that is read back is not what was captured."""
        self.is_damaged = True

    def damage_if_read_back(self, snapshot):
        """A write that went wrong: some bits of its rows are others in the file."""
        trip = self.ckpt._saver.claims.round_trips._trip
        if self.is_damaged and trip is not None and trip.number == snapshot.number:
            self.is_damaged = False
            for path in (self.directory / "shard-00000").glob(f"{snapshot.number:08}-*"):
                flip(path, path.stat().st_size - 64)

    def end_proofs(self):
        """Let all of them end, and take note of what they found."""
        self.ckpt.scrub()
        saver = self.ckpt._saver
        saver._parts.committer.call(saver.claims.round_trips.finish).result()
        saver.settle()


ACTIONS = ("train", "train", "save", "save", "write_past", "add_group", "move_table", "wrap")
ACTIONS += ("damage",)


def check(actions, kind):
    """Do the actions, let the proofs end, and recover in a new process what still claims."""
    note = RoundTrips.note_committed

    def note_then_damage(trips, snapshot, dense):
        note(trips, snapshot, dense)
        loop.damage_if_read_back(snapshot)

    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        for each in FAULTS:
            warnings.simplefilter("ignore", each)
        patch.setattr(RoundTrips, "note_committed", note_then_damage)
        loop = Loop(Path(folder) / "store", kind)
        for action in actions:
            loop.do(action)
        loop.end_proofs()
        claims = [r.last_step for r in loop.ckpt.store.dense.segments if r.is_complete]
        die(loop.ckpt)
        if claims:
            expected, changes = loop.saved[claims[-1]]
            fresh = Loop(loop.directory, kind, changes)
            report = fresh.ckpt.recover(mode="full")
            assert report.step == claims[-1]
            assert_same(fresh, report, expected)
            fresh.ckpt.close()


def assert_same(fresh, report, expected):
    assert report.damaged_segments == []
    found = fresh.state()
    wrong = [
        name for name in expected if name not in found or not same_bits(found[name], expected[name])
    ]
    assert wrong == [], f"step {report.step}"


@settings(max_examples=30, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=12),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_what_claims_to_be_complete_is_recovered_in_every_bit(actions, kind):
    check(["save", *actions, "save"], kind)


def drawn(count=60):
    """Sequences for the proofs that are taken out: always the same."""
    source = random.Random(7)
    for _ in range(count):
        actions = [source.choice(ACTIONS) for _ in range(source.randint(4, 12))]
        yield ["save", *actions, "save"], source.choice(sorted(KINDS))


NO_PROOF = {
    "inventory": [(Inventory, "look", lambda inventory: None)],
    "round trip": [(RoundTrips, "take_found", lambda trips: [])],
    "scrub": [
        (Scrub, "run_pass", lambda scrub: []),
        (Scrub, "check_some", lambda scrub, **options: []),
    ],
}


@pytest.mark.parametrize("proof", NO_PROOF)
def test_without_one_of_the_proofs_a_claim_is_false(proof, monkeypatch):
    for place in NO_PROOF[proof]:
        monkeypatch.setattr(*place)
    found = 0
    for actions, kind in drawn():
        try:
            check(actions, kind)
        except (AssertionError, CprError):
            found += 1
            break
    assert found, "nothing found it missing"
