"""Where FBGEMM has the rows of a table: in the host's memory, a GPU's, or one with a cache.

No GPU is needed: the operators are FBGEMM's for the CPU, whose attributes are changed to those that
its operators for a GPU have. So their memory is found as on a GPU, but they cannot run.
"""

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec import find_sharded_tables, make_checkpointer
from python_tests.integrations.sharded_models import NAMES, sharded
from python_tests.integrations.test_torchrec import held, kernels_of, same_tables

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's and FBGEMM's own, by the dozen
]


def place(operator, location, memory):
    """The operator as FBGEMM makes it for a GPU: ``memory`` is ``dev``, or managed, ``uvm``."""
    for name in ("weights", "momentum1"):
        rows = getattr(operator, f"{name}_host")
        delattr(operator, f"{name}_{memory}")
        setattr(operator, f"{name}_{memory}", rows.detach())
        delattr(operator, f"{name}_host")
        setattr(operator, f"{name}_host", torch.empty(0))
        placements = getattr(operator, f"{name}_physical_placements")
        setattr(operator, f"{name}_physical_placements", [int(location)] * len(placements))


def placed(location, memory, plan="mixed"):
    parallel, optimizer = sharded(plan)
    for operator in kernels_of(parallel):
        place(operator, location, memory)
    return parallel, optimizer


def test_rows_in_a_gpus_memory_are_views_of_it():
    parallel, _ = placed(EmbeddingLocation.DEVICE, "dev")
    operators = kernels_of(parallel)
    memory = {
        name: {getattr(op, f"{kind}_dev").untyped_storage().data_ptr() for op in operators}
        for name, kind in (("weight", "weights"), ("sum", "momentum1"))
    }
    tables = find_sharded_tables(parallel)
    assert {table.part.table for table in tables} == set(NAMES.values())
    for table in tables:
        assert table.array_names() == ["sum", "weight"]
        for name, array in table.arrays().items():
            assert array.untyped_storage().data_ptr() in memory[name]


def test_rows_in_a_gpus_memory_are_saved_and_restored_in_place(tmp_path):
    parallel, optimizer = placed(EmbeddingLocation.DEVICE, "dev")
    options = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
    with make_checkpointer(parallel, optimizer, tmp_path, **options) as checkpointer:
        for number, operator in enumerate(kernels_of(parallel)):
            operator.weights_dev.fill_(number + 1)
            operator.momentum1_dev.fill_(number + 10)
        checkpointer.save("base")
        checkpointer.wait()
        saved = held(checkpointer)
        for operator in kernels_of(parallel):
            operator.weights_dev.zero_()
        assert not same_tables(held(checkpointer), saved)
        checkpointer.recover()
        assert same_tables(held(checkpointer), saved)


def test_rows_that_moved_within_the_gpu_need_a_new_checkpointer():
    parallel, _ = placed(EmbeddingLocation.DEVICE, "dev")
    table = find_sharded_tables(parallel)[0]
    for operator in kernels_of(parallel):
        operator.weights_dev = operator.weights_dev.clone()
    with pytest.raises(UsageError, match="was moved to other memory"):
        table.arrays()


@pytest.mark.parametrize(
    ("location", "why"),
    [
        (EmbeddingLocation.MTIA, "an unknown place"),
    ],
)
def test_rows_elsewhere_are_refused_by_name(tmp_path, location, why):
    parallel, optimizer = placed(location, "uvm", plan="table_wise")
    refusal = rf"'\S+embedding\S+': EmbeddingLocation.{location.name}: {why}.* 'fused'"
    with pytest.raises(UsageError, match=refusal):
        make_checkpointer(parallel, optimizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
