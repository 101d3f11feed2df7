"""Jobs of two to four TorchRec processes, exported as the unsharded model, for plain torch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from cpr_ext.wings.tools.maintenance import export, verify_job
from python_tests.helpers import assert_same
from python_tests.integrations.many_rank_job import STEPS
from python_tests.integrations.sharded_models import NAMES, PLANS, SmallDlrm, whole_tables

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)]
)
def job(request, tmp_path_factory, run_ranks):
    """The directory of a job of so many ranks that has ended, and their number."""
    world_size = request.param
    directory = tmp_path_factory.mktemp(f"{world_size}-ranks")
    run_ranks("python_tests.integrations.many_rank_job", directory, world_size)
    return directory, world_size


@pytest.mark.parametrize("plan", PLANS)
def test_a_job_is_exported_as_the_gathered_model_bit_for_bit(job, plan, tmp_path):
    directory, world_size = job
    held = [torch.load(directory / f"{plan}-{rank}.pt", weights_only=False)
            for rank in range(world_size)]  # fmt: skip
    report = export(directory / plan, tmp_path / "out")
    assert len(report.stores) == world_size
    assert (report.step, report.step_of_rows, report.notes) == (STEPS, STEPS, ())
    model = load_file(tmp_path / "out" / "model.safetensors")
    rows = load_file(tmp_path / "out" / "optimizer_rows.safetensors")
    tables = whole_tables([part for parts, _ in held for part in parts])
    expected = {f"{name}.weight": arrays["weight"] for name, arrays in tables.items()}
    assert_same(model, {**held[0][1], **expected})
    assert expected.keys() == {f"{name}.weight" for name in NAMES.values()}
    for name, arrays in tables.items():
        for state in arrays.keys() - {"weight"}:
            assert torch.equal(rows.pop(exported_name(name, state, arrays)), arrays[state])
    assert not rows
    plain = SmallDlrm()
    plain.load_state_dict(model, strict=True)
    assert_same(dict(plain.state_dict()), model)


def exported_name(name, state, arrays):
    """``sum[0:8]`` of ``whole_tables`` is ``sum`` where that is of all columns."""
    is_whole = state.endswith(f"[0:{arrays['weight'].shape[1]}]")
    return f"{name}.weight.{state.partition('[')[0] if is_whole else state}"


def test_a_job_of_torchrec_fits_together(job):
    report = verify_job(job[0] / "mixed")
    assert report.is_sound
    assert report.notes == []
