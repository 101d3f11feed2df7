"""Stores of snapshots of many precisions, next to a reference that rounds by the specification.

Processes train one after the other, each with a precision of its own. Between them the rows may go
to a store of another number of shards. At the end a bit of it flips.
"""

import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.state.precision import EXACT, PRECISIONS, STATE_PRECISIONS, precision_of_row
from python_tests.helpers import Trained, assert_same, flipped, row_records
from python_tests.rounding import round_rows

OPTIONS = {
    "tables": {"big": (300, 16), "wide": (40, 33), "thin": (20, 2)},
    "schedule": cpr_ext.EverySteps(10**9),
    "priority": cpr_ext.AllRows(),
    "lookups": 60,
}
#: What one process does; ``goes_on``: in the store as it is, else in one of other shards.
Process = namedtuple("Process", "precision saves overlap goes_on")
processes = st.lists(
    st.builds(
        Process,
        st.builds(
            Precision,
            base=st.sampled_from([EXACT, *PRECISIONS]),
            partial=st.sampled_from(PRECISIONS),
            state=st.sampled_from([EXACT, *STATE_PRECISIONS]),
        ),
        st.lists(st.sampled_from(["base", "partial", "partial"]), min_size=1, max_size=3),
        st.sampled_from(["never", "always"]),
        st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=3,
)


def saved_over(states, live, changed, precision, kind):
    """The state after one of ``states``: rows as recovered, and which are rounded, by table."""
    rows, rounded = {}, {}
    for table, arrays in live.items():
        where = changed[table]
        chosen = {
            name: precision_of_row(
                values.shape[1], precision.of_weights(kind) if name == "weight" else precision.state
            )
            for name, values in arrays.items()
        }
        old_rows, old_rounded = states[-1] if states else (live, {})
        rows[table] = {name: array.clone() for name, array in old_rows[table].items()}
        for name, values in arrays.items():
            rows[table][name][where] = round_rows(values[where], chosen[name])
        rounded[table] = old_rounded.get(table, torch.zeros_like(where)).clone()
        rounded[table][where] = set(chosen.values()) != {EXACT}
    return rows, rounded


def same(left, right):
    """Which rows (n,) have the same bits in all arrays."""
    bits = [(left[n].view(torch.int32), right[n].view(torch.int32)) for n in left]
    return torch.stack([(a == b).all(1) for a, b in bits]).all(0)


def opened(folder, **options):
    """Each folder has another number of shards."""
    return Trained(folder, num_shards=2 + int(folder.name), **OPTIONS, **options)


def run(process, folder, source, seed, states):
    """Let a process train and save in ``folder``, with the rows of the store ``source``.

    Returns the paths of the live segments.
    """
    store = StoreOptions(precision=process.precision)
    trained = opened(folder, seed=seed, store=store, overlap=process.overlap)
    if states:
        trained.checkpointer.recover(from_store=None if folder == source else source)
        assert_same(trained.rows(), states[-1][0])
    first = [] if folder == source and states else ["base"]
    for kind in [*first, *process.saves]:
        before = trained.rows()
        trained.train(1)
        kind = trained.save(kind).kind
        live = trained.rows()
        changed = {name: ~same(arrays, before[name]) for name, arrays in live.items()}
        if kind == "base":
            changed = {name: torch.ones_like(where) for name, where in changed.items()}
        states.append(saved_over(states, live, changed, process.precision, kind))
    trained.die()
    return [path for _, path in row_records(trained.store)]


def check(folder, states):
    """Each recovered row is of some snapshot; the report says which are not of the newest."""
    fresh = opened(folder, seed=99)
    report = fresh.checkpointer.recover(on_damage="fall_back")
    rows = fresh.rows()
    fresh.die()
    num_rounded = num_unknown = 0
    for table, arrays in rows.items():
        is_of_one = torch.zeros(len(arrays["weight"]), dtype=torch.bool)
        is_rounded, told = is_of_one.clone(), is_of_one.clone()
        for state, rounded in states:
            here = same(arrays, state[table])
            is_of_one |= here
            is_rounded = torch.where(here, rounded[table], is_rounded)
        if table in report.missing_rows:
            told[report.missing_rows[table]] = True
            is_rounded &= ~told
        assert bool((is_of_one | told).all())
        if table in report.older_rows:
            told[report.older_rows[table].row_ids] = True
        num_rounded += int(is_rounded.sum())
        num_unknown += int((~same(arrays, states[-1][0][table]) & ~told).sum())
    assert num_unknown <= report.rows_possibly_stale
    assert num_rounded <= report.rows_rounded


@given(processes, st.integers(0, 2**32))
@settings(max_examples=5)
def test_rows_are_those_of_the_snapshots_whatever_their_precisions(plan, seed):
    with tempfile.TemporaryDirectory() as directory:
        states, folder = [], Path(directory) / "0"
        for number, process in enumerate(plan):
            source = folder
            if number and not process.goes_on:
                folder = Path(directory) / str(number)
            paths = run(process, folder, source, number, states)
        check(folder, states)
        generator = np.random.default_rng(seed)
        path = paths[generator.integers(len(paths))]
        with flipped(path, int(generator.integers(path.stat().st_size))):
            check(folder, states)
