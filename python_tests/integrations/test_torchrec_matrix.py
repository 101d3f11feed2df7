"""Jobs that are killed and resumed under any other plan, with any number of ranks from 1 to 4.

What their ranks counted and saved is checked too: the lookups of all ranks in the rows of each, and
that their stores are exported as the gathered model.
"""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from cpr_ext.wings.tools.maintenance import export
from python_tests.distributed.losses import long
from python_tests.helpers import assert_same
from python_tests.integrations import matrix_job
from python_tests.integrations.matrix_job import (
    BATCHES,
    MOST_RANKS,
    SAVED_STEPS,
    cells_of,
    whole,
)
from python_tests.integrations.sharded_models import NAMES, lookups_of, whole_tables

pytestmark = pytest.mark.timeout(600)
JOB = matrix_job.__name__


@pytest.mark.parametrize("batch", [0, *map(long, range(1, BATCHES))])
def test_a_killed_job_resumes_under_another_plan_bit_for_bit(torchrec_nursery, tmp_path, batch):
    run(torchrec_nursery, "train", tmp_path, batch, end=-signal.SIGKILL)
    run(torchrec_nursery, "resume", tmp_path, batch, end=0)
    for cell in cells_of(batch):
        check(cell, tmp_path / cell.name)


def run(nursery, function, directory, batch, *, end):
    ranks = [
        nursery.ask("call", JOB, function, str(directory), rank, batch)
        for rank in range(MOST_RANKS)
    ]
    ends = [nursery.ask("wait", pid, 400) for pid in ranks]
    for pid, code in zip(ranks, ends, strict=True):
        if code is None:
            os.kill(pid, signal.SIGKILL)
    assert ends == [end] * MOST_RANKS, "\n".join(
        path.read_text()[-3000:] for path in directory.glob("log-*")
    )


def check(cell, directory):
    print(cell)
    truths, results = (
        [torch.load(directory / f"{name}-{n}.pt", weights_only=False) for n in range(number)]
        for name, number in (("truth", cell.old_ranks), ("resumed", cell.new_ranks))
    )
    check_counts(truths, cell.old_ranks)
    check_export(truths, [directory / f"old-{n}" for n in range(cell.old_ranks)], directory / "out")
    expected, found = whole(truths), whole([result["recovered"] for result in results])
    assert expected.keys() == found.keys()
    for table, arrays in found.items():
        for name, array in arrays.items():
            assert torch.equal(array, taken(expected[table], name)), f"{table}/{name}"
    for result in results:
        assert result["step"] == SAVED_STEPS
        for kind in ("dense", "moments"):
            truth = truths[0][kind]
            assert_same({name: result["recovered"][kind][name] for name in truth}, truth)
        assert_same(result["ended"], result["ended_by_hand"])


def check_counts(truths, world_size):
    """Lookups since the first step, whose base took its own."""
    expected = lookups_of(range(1, SAVED_STEPS), world_size)
    tables = {name: table for table, name in NAMES.items()}
    for truth in truths:
        for (part, _), counts in zip(truth["parts"], truth["counts"], strict=True):
            assert torch.equal(counts, expected[tables[part.table]][slice(*part.rows)]), part


def check_export(truths, stores, out):
    report = export(stores, out)
    assert (report.step, report.notes) == (SAVED_STEPS, ())
    weights = {f"{name}.weight": arrays["weight"] for name, arrays in whole(truths).items()}
    assert_same(load_file(out / "model.safetensors"), {**truths[0]["dense"], **weights})
    tables = whole_tables([part for truth in truths for part in truth["parts"]])
    states = {
        exported_name(name, state, arrays): array
        for name, arrays in tables.items()
        for state, array in arrays.items()
        if state != "weight"
    }
    rows = load_file(out / "optimizer_rows.safetensors")
    assert_same({name: rows[name] for name in states}, states)


def exported_name(name, state, arrays):
    """``sum[0:8]`` of ``whole_tables`` is ``sum`` where that is of all columns."""
    is_whole = state.endswith(f"[0:{arrays['weight'].shape[1]}]")
    return f"{name}.weight.{state.partition('[')[0] if is_whole else state}"


def taken(arrays, name):
    """An array of a table, from those under another plan: state by row may be a mean."""
    if name in arrays:
        return arrays[name]
    state, _, columns = name.rstrip("]").partition("[")
    begin, end = map(int, columns.split(":"))
    parts = []
    for key, value in arrays.items():
        if key.startswith(f"{state}["):
            first, last = map(int, key.rstrip("]").partition("[")[2].split(":"))
            if common := max(0, min(end, last) - max(begin, first)):
                parts.append((common / (end - begin), value))
    assert sum(share for share, _ in parts) == 1
    if len(parts) == 1:
        return parts[0][1]
    total = torch.zeros_like(parts[0][1])
    for share, value in parts:
        total += share * value
    return total
