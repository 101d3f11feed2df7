import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import cpr_ext
from cpr_ext.errors import DamageError, UsageError
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import export
from cpr_ext.wings.tools.maintenance.exporting import FORMATS
from python_tests.helpers import assert_same, build, flip, same_bits
from python_tests.wings.tools.maintenance.stores import TABLES, recovered, trained_store


def load(out, format):
    """What was exported, read by the format's own library."""
    if format == "safetensors":
        return [load_file(out / f"{n}.safetensors") for n in ("model", "optimizer_rows")]
    if format == "torch":
        return [torch.load(out / f"{n}.pt", weights_only=True) for n in ("model", "optimizer_rows")]
    metadata = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    state = {"model": {}, "optimizer_rows": {}}
    for name, value in metadata.items():
        part, key = name.split(".", 1)
        state[part][key] = torch.empty(value.size, dtype=value.properties.dtype)
    dcp.load(state, checkpoint_id=out, no_dist=True)
    return [state["model"], state["optimizer_rows"]]


@pytest.mark.parametrize(
    "format", sorted({*FORMATS} - {"torchrec"})
)  # of it: test_torchrec_in_and_out
def test_what_is_exported_is_what_recovery_restores_bit_for_bit(store, tmp_path, format):
    _, rows, state = recovered(store)
    (tmp_path / "out.tmp").mkdir()  # of an export that was killed
    report = export(store, tmp_path / "out", format=format)
    exported, optimizer_rows = load(tmp_path / "out", format)
    assert_same(exported, dict(state["model"]))
    assert optimizer_rows.keys() == {f"tables.{name}.weight.sum" for name in TABLES}
    for name in TABLES:
        assert same_bits(optimizer_rows[f"tables.{name}.weight.sum"], rows[f"tables.{name}"]["sum"])
    assert report.tensors == len(exported) + len(optimizer_rows)
    sizes = [v.numel() * v.element_size() for v in [*exported.values(), *optimizer_rows.values()]]
    assert report.tensor_bytes == sum(sizes)
    assert report.step == 13
    model, _ = build(TABLES, seed=7)
    model.load_state_dict(exported, strict=True)
    assert_same(dict(model.state_dict()), state["model"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_and_a_table_shared_by_two_modules(tmp_path, dtype):
    model = nn.ModuleDict({"a": nn.Embedding(50, 3, dtype=dtype), "b": nn.Embedding(50, 3)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store", num_shards=2) as ckpt:
        ckpt.step()
        ckpt.wait()
    export(tmp_path / "store", tmp_path / "out")
    loaded, rows = load(tmp_path / "out", "safetensors")
    assert rows == {}
    assert_same(loaded, dict(model.state_dict()))


def test_what_exists_is_not_overwritten_and_damage_is_named_and_leaves_nothing(tmp_path):
    trained_store(tmp_path / "store").checkpointer.close()
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        export(tmp_path / "store", tmp_path / "there")
    reader = StoreReader(tmp_path / "store")
    path = reader.path_of(reader.manifest.rows[0])
    flip(path, reader.manifest.rows[0].header_bytes + 5)
    with pytest.raises(DamageError, match=path.name):
        export(tmp_path / "store", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store", "there"]
