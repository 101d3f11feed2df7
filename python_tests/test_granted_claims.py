"""Random changes of structure, and writes that nothing sees: each claim in a store is true.

Each part of what grants claims is also taken out: then some claim is false.
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
from cpr_ext.errors import CprError, SnapshotError, UntrackedChangeWarning
from cpr_ext.saving import claims
from cpr_ext.saving.saved_hashes import SavedHashes
from cpr_ext.saving.selection import Selector
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tracking.inventory import Inventory
from python_tests.helpers import die, open_checkpointer, same_bits
from python_tests.tracking.watched import NEVER

N = 80


class Moving(torch.optim.SGD):
    """A subclass that moves rows without a gradient in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


class Lying(Moving):
    """It says that it does not."""

    updates_only_looked_up_rows = True


KINDS = {"adagrad": torch.optim.Adagrad, "moving": Moving, "lying": Lying, "sgd": torch.optim.SGD}
OVERLAPS = ("always", "never")
FRACTIONS = (1, 0.1)


class Loop:
    """A loop whose structure changes; ``changes`` made so far are those of a new process, too."""

    def __init__(self, directory, kind, overlap, fraction, changes=()):
        self.directory, self.changes = directory, []
        torch.manual_seed(0)
        tables = {name: nn.Embedding(N, 4, sparse=True) for name in "abc"}
        self.model = nn.ModuleDict({**tables, "head": nn.Linear(4, 1), "top": nn.Linear(1, 1)})
        first = KINDS[kind]([self.model["a"].weight], lr=0.1)
        names = "bc" if overlap == "always" else "b"  # tables without optimizer do not overlap
        second = torch.optim.Adagrad([self.model[name].weight for name in names], lr=0.1)
        dense = torch.optim.SGD(self.model["head"].parameters(), lr=0.01)
        self.optimizers = [first, second, dense]
        self.inner = torch.optim.SGD(self.model["top"].parameters(), lr=0.01, momentum=0.9)
        self.ckpt = open_checkpointer(
            self.model,
            self.optimizers,
            directory,
            priority=cpr_ext.AllRows() if fraction == 1 else cpr_ext.MostFrequentlyUsed(fraction),
            overlap=overlap,
            store=cpr_ext.StoreOptions(retention=cpr_ext.Retention(100)),
            save_at_close=False,
            **NEVER,
        )
        self.states, self.number = {}, 0
        self.has_group = overlap == "always"
        for change in changes:
            self.do(change)

    def do(self, action):
        getattr(self, action)()
        if action in ("add_group", "move_table", "wrap"):
            self.changes.append(action)

    def train(self):
        self.number += 1
        used = "abc" if self.has_group else "ab"
        rows = torch.tensor([self.number % N, 3 * self.number % N])
        for optimizer in [*self.optimizers, self.inner]:
            optimizer.zero_grad()
        out = self.model["head"](sum(self.model[name](rows) for name in used))
        self.model["top"](out).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if "wrap" in self.changes:
            self.inner.step()  # of a wrapper that the Checkpointer does not know
        self.note()  # for a base that begins with this step
        self.ckpt.step()

    def note(self):
        """Note what the next snapshot is of."""
        self.states[self.ckpt._saver._next_number] = [self.state()], list(self.changes)

    def note_write(self):
        """Note what the snapshot in flight is of, if it captures all rows after this write."""
        if (snapshot := self.ckpt._saver.in_flight) is not None:
            self.states[snapshot.number][0].append(self.state())

    def begin(self):
        """Have a snapshot captured, committed and checked while training goes on."""
        if self.ckpt._saver.in_flight is None and self.number:
            self.note()
            self.ckpt._saver.begin(self.ckpt._saver._parts.rebase.next_kind())
            self.ckpt._saver.resume()

    def save(self):
        if self.number == 0:
            self.train()
        self.ckpt._saver.finish()
        self.note()
        self.ckpt.save()

    def wait(self):
        try:
            self.ckpt.wait()
        except SnapshotError as error:  # it claims nothing
            if "was changed outside" not in str(error.__cause__):
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
        first = 11 * self.number % N
        for name in "abc":
            self.model[name].weight.data[first : first + 3] += 1
        self.note_write()

    def write_one(self):
        self.model["b"].weight.data[(3 * self.number + 3) % N] += 1  # which is trained next
        self.note_write()

    def add_group(self):
        if not self.has_group:
            self.has_group = True
            self.optimizers[1].add_param_group({"params": [self.model["c"].weight]})

    def move_table(self):
        if "move_table" not in self.changes:
            weight = self.model["b"].weight
            self.optimizers[1].param_groups[0]["params"].clear()
            self.optimizers[1].state.pop(weight, None)
            self.optimizers[0].add_param_group({"params": [weight]})

    def wrap(self):
        """From now on another optimizer steps, too."""


ACTIONS = ("train",) * 4 + ("save", "begin", "begin", "wait", "write_past", "write_one")
ACTIONS += ("add_group", "move_table", "wrap")


def check(actions, *options):
    """Do the actions; all that was ever claimed is recovered, by another process, in every bit."""
    granted = set()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore", UntrackedChangeWarning)
        patch.setattr(claims, "_SLICE_BYTES", 400)  # a check takes several steps
        patch.setattr(claims, "SHARE", 0.0)
        loop = Loop(Path(folder) / "store", *options)
        for action in actions:
            loop.do(action)
            granted |= complete(loop)
        loop.wait()
        granted |= complete(loop)
        assert granted == complete(loop)  # none was taken back
        die(loop.ckpt)
        if granted:
            states, changes = loop.states[max(granted)]
            fresh = Loop(loop.directory, *options, changes)
            assert fresh.ckpt.recover(mode="full").is_complete
            found = fresh.state()
            assert any(
                all(n in found and same_bits(found[n], state[n]) for n in state) for state in states
            ), f"snapshot {max(granted)}"
            die(fresh.ckpt)


def complete(loop):
    """The numbers of the snapshots that another process would take for complete."""
    return {r.snapshot for r in StoreReader(loop.directory).manifest.dense if r.is_complete}


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=25),
    kind=st.sampled_from(sorted(KINDS)),
    overlap=st.sampled_from(OVERLAPS),
    fraction=st.sampled_from(FRACTIONS),
)
def test_what_claims_to_be_complete_is_recovered_in_every_bit(actions, kind, overlap, fraction):
    check(["save", "wait", *actions, "save"], kind, overlap, fraction)


def drawn(count=200):
    """Sequences for the parts that are taken out: always the same."""
    source = random.Random(7)
    for _ in range(count):
        actions = [source.choice(ACTIONS) for _ in range(source.randint(6, 25))]
        # What is written before a point, and trained before its check meets it.
        last = source.choice([["save"], ["write_one", "save", *["train"] * 9]])
        options = [source.choice(each) for each in (sorted(KINDS), OVERLAPS, FRACTIONS)]
        yield ["save", "wait", *actions, *last], options


def passed(hashes, max_bytes):
    return [], True


def are_clean(selector, selections, *, is_captured):
    return True


TAKEN_OUT = {
    "inventory": (Inventory, "look", lambda inventory: True),
    "comparison": (SavedHashes, "advance", passed),
    "comparison of rows that are about to change": (SavedHashes, "check_changing", lambda *_: []),
    "dirty rows": (Selector, "are_complete", are_clean),
}


@pytest.mark.parametrize("part", TAKEN_OUT)
def test_without_a_part_some_claim_is_false(part, monkeypatch):
    monkeypatch.setattr(*TAKEN_OUT[part])
    for actions, options in drawn():
        try:
            check(actions, *options)
        except (AssertionError, CprError):
            return
    pytest.fail("nothing found it missing")
