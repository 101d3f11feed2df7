"""Write a store's newest state as plain state dicts that other tools load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cpr_ext.errors import CprError, UsageError
from cpr_ext.files import storage_error, sync_directory
from cpr_ext.maintenance.row_reading import shard_rows
from cpr_ext.maintenance.safetensors_stream import TensorSpec, write_safetensors
from cpr_ext.recovery import read_dense
from cpr_ext.segment import ArraySpec
from cpr_ext.shard_rows import ShardRows
from cpr_ext.store_reader import StoreReader, read_committed
from cpr_ext.tables import WEIGHT

Format = Literal["safetensors", "torch", "dcp"]
FORMATS: tuple[Format, ...] = ("safetensors", "torch", "dcp")
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        out: the directory.
        files: names in it.
        step, num_samples: the position in training that was exported.
        tensors: how many, model and optimizer together.
        tensor_bytes: their size.
    """

    out: str
    format: str
    files: tuple[str, ...]
    step: int
    num_samples: int
    tensors: int
    tensor_bytes: int


@dataclass(frozen=True)
class _TableArray:
    """One array of a table, whole, wherever its shards lie."""

    shape: tuple[int, ...]
    array: ArraySpec
    shards: tuple[ShardRows, ...]
    ranges: tuple[tuple[int, int], ...]

    def blocks(self) -> Iterator[torch.Tensor]:
        rows = max(1, BLOCK_BYTES // sum(a.row_bytes for a in self.shards[0].arrays))
        for shard, (begin, end) in zip(self.shards, self.ranges, strict=True):
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                arrays = shard.range(first, last).arrays
                # A state that no segment of this shard has is zero, as in older segments.
                yield arrays.get(
                    self.array.name,
                    torch.zeros((last - first, *self.array.row_shape), dtype=self.array.dtype),
                )

    def whole(self) -> torch.Tensor:
        return torch.cat(list(self.blocks()))


def export(
    store: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    full: bool = False,
) -> ExportReport:
    """Write the newest snapshot as two plain state dicts: the model's, and optimizers' row states.

    ``safetensors``: ``model.safetensors`` and ``optimizer_rows.safetensors``; memory is bounded.
    ``torch``: ``model.pt`` and ``optimizer_rows.pt``, for ``torch.load(weights_only=True)``.
    ``dcp``: one torch.distributed.checkpoint of ``{"model": ..., "optimizer_rows": ...}``.
    The last two hold the model in memory once.

    The model's tensors have the names of its ``state_dict()``; row states are called
    ``<state_dict name of the table>.<state>``, as ``tables.users.weight.sum``.

    Args:
        store: the directory; a training process may be using it.
        out: a directory that does not exist yet; it appears once it is complete.
        format: ``"safetensors"``, ``"torch"`` or ``"dcp"``.
        full: the newest full-recovery point, not the newest snapshot.

    Raises:
        UsageError: ``out`` exists, or no such format.
        StoreError: not a store, or nothing to export.
        DamageError: what would have to be read is damaged (named).
        StorageError: the operating system refused.
    """
    if format not in FORMATS:
        raise UsageError(f"format is {format!r}; allowed: {', '.join(FORMATS)}")
    target = Path(out)
    if target.exists():
        raise UsageError(f"'{target}' exists; choose a new directory")
    return read_committed(store, lambda reader: _export(reader, target, format, full))


def _export(reader: StoreReader, target: Path, format: Format, full: bool) -> ExportReport:
    record = reader.newest(full=full)
    model, rows = _collect(reader, record.snapshot, full)
    temporary = target.with_name(target.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _WRITERS[format](temporary, model, rows)
        sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        if isinstance(error, CprError):  # of the store that is read
            raise
        raise storage_error("write", target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sizes = [_spec(value) for value in [*model.values(), *rows.values()]]
    return ExportReport(
        out=str(target),
        format=format,
        files=tuple(sorted(entry.name for entry in target.iterdir())),
        step=record.last_step,
        num_samples=record.num_samples,
        tensors=len(sizes),
        tensor_bytes=sum(spec.size_bytes for spec in sizes),
    )


_Value = torch.Tensor | _TableArray


def _collect(
    reader: StoreReader, snapshot: int, full: bool
) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """The model's tensors and the row states, by name; tables are not read yet."""
    part = read_dense(reader.dense, reader.newest(full=full))
    tree = part.tree()
    # What a module's get_extra_state() gave is no tensor and has no place in a plain state dict.
    model: dict[str, _Value] = {
        name: value for name, value in tree["model"].items() if isinstance(value, torch.Tensor)
    }
    rows: dict[str, _Value] = {}
    keys: dict[str, str] = tree["table_keys"]  # state_dict name -> table
    for key, name in keys.items():
        shards = range(reader.num_shards)
        ranges = tuple(reader.row_range(name, shard) for shard in shards)
        parts = tuple(shard_rows(reader, shard, name, snapshot) for shard in shards)
        held = [(p, r) for p, r in zip(parts, ranges, strict=True) if r[0] < r[1]]
        for array in held[0][0].arrays:
            shape = (reader.table(name).num_embeddings, *array.row_shape)
            value = _TableArray(shape, array, tuple(p for p, _ in held), tuple(r for _, r in held))
            if array.name == WEIGHT:
                model[key] = value
            else:
                rows[f"{key}.{array.name}"] = value
    return model, rows


def _spec(value: _Value) -> TensorSpec:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype)
    return TensorSpec(value.shape, value.array.dtype)


def _write_safetensors(out: Path, model: dict[str, _Value], rows: dict[str, _Value]) -> None:
    for name, values in (("model", model), ("optimizer_rows", rows)):
        write_safetensors(
            out / f"{name}.safetensors",
            {key: _spec(value) for key, value in values.items()},
            lambda key, values=values: _blocks(values[key]),  # type: ignore[misc]
        )


def _blocks(value: _Value) -> Iterator[torch.Tensor]:
    return iter([value]) if isinstance(value, torch.Tensor) else value.blocks()


def _whole(values: dict[str, _Value]) -> dict[str, torch.Tensor]:
    return {k: v if isinstance(v, torch.Tensor) else v.whole() for k, v in values.items()}


def _write_torch(out: Path, model: dict[str, _Value], rows: dict[str, _Value]) -> None:
    for name, values in (("model", model), ("optimizer_rows", rows)):
        with (out / f"{name}.pt").open("wb") as file:
            torch.save(_whole(values), file)
            file.flush()
            os.fsync(file.fileno())


def _write_dcp(out: Path, model: dict[str, _Value], rows: dict[str, _Value]) -> None:
    # Imported here: it takes a second, and only this format needs it.
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {"model": _whole(model), "optimizer_rows": _whole(rows)}
    save(state, checkpoint_id=out, no_dist=True)


_WRITERS = {"safetensors": _write_safetensors, "torch": _write_torch, "dcp": _write_dcp}
