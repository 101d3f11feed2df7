"""Stores of snapshots of many precisions, next to a reference that rounds by the specification.

Processes train one after the other, each with a precision of its own. Between them the rows may go
to a store of another number of shards. At the end a bit of it flips.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.state.precision import (
    EXACT,
    PRECISIONS,
    STATE_PRECISIONS,
    precision_of_row,
    round_rows,
)
from python_tests.helpers import Trained, assert_same, flipped, row_records

TABLES = {"big": (300, 16), "wide": (40, 33), "thin": (20, 2)}
OPTIONS = {
    "tables": TABLES,
    "schedule": cpr_ext.EverySteps(10**9),
    "priority": cpr_ext.AllRows(),
    "lookups": 60,
}
PRECISION = st.builds(
    Precision,
    base=st.sampled_from([EXACT, *PRECISIONS]),
    partial=st.sampled_from(PRECISIONS),
    state=st.sampled_from([EXACT, *STATE_PRECISIONS]),
)


@dataclass
class Process:
    """What one process does, and what happens to the store before it begins."""

    precision: Precision
    saves: list[str]
    overlap: str
    before: str  # "nothing" or "resharding"


processes = st.lists(
    st.builds(
        Process,
        PRECISION,
        st.lists(st.sampled_from(["base", "partial", "partial"]), min_size=1, max_size=3),
        st.sampled_from(["never", "always"]),
        st.sampled_from(["nothing", "nothing", "resharding"]),
    ),
    min_size=1,
    max_size=3,
)


@dataclass
class Reference:
    """Every state that a store has had of its rows.

    Attributes:
        states: oldest first: rows of all tables as a recovery returns them, and for each table
            which rows are rounded.
    """

    states: list[tuple[dict, dict]] = field(default_factory=list)

    def save(self, live, changed, precision, kind):
        """Add a snapshot of the rows of ``live`` that changed."""
        rows, rounded = {}, {}
        for table, arrays in live.items():
            where = changed[table]
            kept, values = as_saved({n: a[where] for n, a in arrays.items()}, precision, kind)
            old_rows, old_rounded = self.states[-1] if self.states else ({}, {})
            rows[table] = {
                name: old_rows[table][name].clone() if old_rows else torch.zeros_like(array)
                for name, array in arrays.items()
            }
            rounded[table] = old_rounded.get(
                table, torch.zeros(len(where), dtype=torch.bool)
            ).clone()
            rounded[table][where] = kept
            for name, saved in values.items():
                rows[table][name][where] = saved
        self.states.append((rows, rounded))

    def newest(self):
        return self.states[-1]


def as_saved(arrays, precision, kind):
    """Which rows are rounded, and all as they are saved."""
    chosen = {}
    for name, values in arrays.items():
        wanted = precision.of_weights(kind) if name == "weight" else precision.state
        chosen[name] = precision_of_row(values.shape[1], wanted)
    saved = {name: round_rows(values, chosen[name]) for name, values in arrays.items()}
    return torch.full((len(arrays["weight"]),), set(chosen.values()) != {EXACT}), saved


def same(left, right):
    """Which rows (n,) have the same bits in all arrays."""
    bits = [(left[n].view(torch.int32), right[n].view(torch.int32)) for n in left]
    return torch.stack([(a == b).all(1) for a, b in bits]).all(0)


def run(process, folder, source, seed, reference):
    """Let a process train and save in ``folder``, with the rows of the store ``source``.

    Returns:
        The paths of the live segments.
    """
    options = {"store": StoreOptions(precision=process.precision), "overlap": process.overlap}
    trained = Trained(folder, seed=seed, num_shards=shards_of(folder), **OPTIONS, **options)
    if reference.states:
        trained.checkpointer.recover(from_store=None if folder == source else source)
        assert_same(trained.rows(), reference.newest()[0])
    first = [] if folder == source and reference.states else ["base"]
    for kind in [*first, *process.saves]:
        before = trained.rows()
        trained.train(1)
        handle = trained.checkpointer.save(kind=kind)
        trained.checkpointer.wait()
        live = trained.rows()
        if handle.kind == "base":
            changed = {
                name: torch.ones(len(a["weight"]), dtype=torch.bool) for name, a in live.items()
            }
        else:
            changed = {name: ~same(arrays, before[name]) for name, arrays in live.items()}
        reference.save(live, changed, process.precision, handle.kind)
    trained.die()
    return [path for _, path in row_records(trained.store)]


def shards_of(folder):
    """How many shards the store has; each has another number."""
    return 2 + int(folder.name)


def recovered(folder):
    """The report and the rows of a recovery into a new model."""
    fresh = Trained(folder, seed=99, num_shards=shards_of(folder), **OPTIONS)
    report = fresh.checkpointer.recover(on_damage="fall_back")
    rows = fresh.rows()
    fresh.die()
    return report, rows


def check(report, rows, reference):
    """Each row is of some snapshot, and the report says which are not of the newest."""
    num_rounded = num_unknown = 0
    for table, arrays in rows.items():
        is_of_one = torch.zeros(len(arrays["weight"]), dtype=torch.bool)
        is_rounded = is_of_one.clone()
        for state, rounded in reference.states:
            here = same(arrays, state[table])
            is_of_one |= here
            is_rounded = torch.where(here, rounded[table], is_rounded)
        told = torch.zeros_like(is_of_one)
        if table in report.missing_rows:
            told[report.missing_rows[table]] = True
            is_rounded &= ~told
        assert bool((is_of_one | told).all())
        if table in report.older_rows:
            told[report.older_rows[table].row_ids] = True
        num_rounded += int(is_rounded.sum())
        num_unknown += int((~same(arrays, reference.newest()[0][table]) & ~told).sum())
    assert num_unknown <= report.rows_possibly_stale
    assert num_rounded <= report.rows_rounded


@given(processes, st.integers(0, 2**32))
@settings(max_examples=5)
def test_rows_are_those_of_the_snapshots_whatever_their_precisions(plan, seed):
    with tempfile.TemporaryDirectory() as directory:
        reference, folder = Reference(), Path(directory) / "0"
        for number, process in enumerate(plan):
            source = folder
            if number and process.before == "resharding":
                folder = Path(directory) / str(number)
            paths = run(process, folder, source, number, reference)
        check(*recovered(folder), reference)
        generator = np.random.default_rng(seed)
        path = paths[generator.integers(len(paths))]
        with flipped(path, int(generator.integers(path.stat().st_size))):
            check(*recovered(folder), reference)
