"""Where FBGEMM has the rows of a table: in the host's memory, a GPU's, or one with a cache.

No GPU is needed: the operators are FBGEMM's for the CPU, whose attributes are changed to those that
its operators for a GPU have. So their memory is found as on a GPU, but they cannot run.
"""

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from python_tests.integrations.sharded_models import (
    ALONE,
    NAMES,
    held,
    kernels_of,
    opened,
    same_tables,
    sharded,
)

pytestmark = ALONE


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


def test_rows_in_a_gpus_memory_are_views_of_it_saved_and_restored_in_place(tmp_path):
    parallel, optimizer = placed(EmbeddingLocation.DEVICE, "dev")
    operators = kernels_of(parallel)
    memory = {
        name: {getattr(op, f"{kind}_dev").untyped_storage().data_ptr() for op in operators}
        for name, kind in (("weight", "weights"), ("sum", "momentum1"))
    }
    tables = sharded_tables(find_kernels(parallel))
    assert {table.part.table for table in tables} == set(NAMES.values())
    for table in tables:
        assert table.array_names() == ["sum", "weight"]
        for name, array in table.arrays().items():
            assert array.untyped_storage().data_ptr() in memory[name]
    with opened(parallel, optimizer, tmp_path) as checkpointer:
        for number, operator in enumerate(operators):
            operator.weights_dev.fill_(number + 1)
            operator.momentum1_dev.fill_(number + 10)
        checkpointer.save("base")
        checkpointer.wait()
        saved = held(checkpointer)
        for operator in operators:
            operator.weights_dev.zero_()
        assert not same_tables(held(checkpointer), saved)
        checkpointer.recover()
        assert same_tables(held(checkpointer), saved)
    for operator in operators:  # within the GPU
        operator.weights_dev = operator.weights_dev.clone()
    with pytest.raises(UsageError, match="was moved to other memory"):
        tables[0].arrays()


def test_rows_elsewhere_are_refused_by_name(tmp_path):
    parallel, optimizer = placed(EmbeddingLocation.MTIA, "uvm", plan="table_wise")
    refusal = r"'\S+embedding\S+': EmbeddingLocation.MTIA: an unknown place.* 'fused'"
    with pytest.raises(UsageError, match=refusal):
        opened(parallel, optimizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
