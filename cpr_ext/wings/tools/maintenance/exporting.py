"""Write the newest state of a store, or of a whole job, as plain state dicts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cpr_ext.errors import CprError, StoreError, UsageError
from cpr_ext.recovery.import_store import newest_records
from cpr_ext.recovery.restore import read_dense
from cpr_ext.state.table import WEIGHT
from cpr_ext.state.wrapper_names import added, plain_names
from cpr_ext.storage.filesystem import storage_error, sync_directory
from cpr_ext.storage.job_stores import JobStores, find_stores
from cpr_ext.storage.store_reader import StoreReader, read_committed_all
from cpr_ext.wings.publishing.safetensors_stream import TensorSpec, write_safetensors
from cpr_ext.wings.tools.maintenance.job_fit import (
    MemberPart,
    dense_faults,
    newest,
    notes,
    read_parts,
    step_of_all,
)
from cpr_ext.wings.tools.maintenance.whole_tables import (
    Holding,
    Member,
    TablePlan,
    WholeArray,
    plan_of_one,
    plan_tables,
    whole_arrays,
)

# TorchRec calls the first state of a fused optimizer "momentum1", others by FBGEMM's name.
_FIRST = ("sum", "exp_avg", "momentum_buffer")


def optimizer_state(
    rows: Mapping[str, Sequence[WholeArray]],
    optimizers: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter: ``{"users.weight": {"users.momentum1": ...}}``.

    Each range of columns may have one value per row of its own. These are laid end to end, in the
    order of the columns, as TorchRec does.

    Args:
        rows: the arrays per row of each table, by its weight's name.
        optimizers: of a dense part.
        names: of the dense part's parameters, the exported ones where these differ.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, arrays in rows.items():
        table = key.removesuffix(f".{WEIGHT}").rpartition(".")[2]
        pieces: dict[str, list[torch.Tensor]] = {}
        for array in arrays:
            pieces.setdefault(array.name.partition("[")[0], []).append(array.whole())
        first = next((name for name in _FIRST if name in pieces), None)
        state = {
            f"{table}.{'momentum1' if name == first else name}": torch.cat(parts)
            for name, parts in pieces.items()
        }
        if state:
            found[key] = state
    for optimizer in optimizers:
        parameters = [name for group in optimizer.get("parameters", ()) for name in group]
        for name, values in zip(parameters, optimizer["states"].values(), strict=False):
            plain = names.get(name, name)
            if values and plain and plain not in rows:
                found[plain] = dict(values)
    return found


Format = Literal["safetensors", "torch", "dcp", "torchrec"]
FORMATS: tuple[Format, ...] = ("safetensors", "torch", "dcp", "torchrec")
REPORT_FILE = "export.json"


@dataclass(frozen=True)
class ExportedStore:
    """What was taken of one worker's store.

    Attributes:
        store: the directory, or its address in a copy.
        worker: its rank, or the name of the store.
        step, num_samples: of its snapshot; no row of it is newer.
        samples_lost: samples whose effect failures had taken from its rows until then.
        is_full_recovery_point: every row has its state of ``step``, not its newest saved state.
    """

    store: str
    worker: int | str
    step: int
    num_samples: int
    samples_lost: int
    is_full_recovery_point: bool


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        out: the directory.
        files: names in it.
        step, num_samples: the position in training of the dense part.
        tensors: how many, model and optimizer together.
        tensor_bytes: their size.
        stores: what was taken of which; rows may be of other steps than the dense part.
        step_of_rows: the step of every row; None: each has its newest saved state.
        dense_from: the worker whose dense part it is: the one that got furthest.
        removed: prefixes of wrappers that names were written without.
        notes: what else must be known of it, one sentence each.
    """

    out: str
    format: str
    files: tuple[str, ...]
    step: int
    num_samples: int
    tensors: int
    tensor_bytes: int
    stores: tuple[ExportedStore, ...]
    step_of_rows: int | None
    dense_from: int | str
    removed: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    full: bool = False,
    keep_names: bool = False,
    rows_in_order: bool = False,
    world_size: int | None = None,
    address: str | None = None,
) -> ExportReport:
    """Write the newest snapshot as two plain state dicts: the model's, and optimizers' row states.

    The workers of a job have a store each. Their export is the unsharded model: whole tables, and
    the dense part of the worker that got furthest.

    ``safetensors``: ``model.safetensors`` and ``optimizer_rows.safetensors``; memory is bounded.
    ``torch``: ``model.pt`` and ``optimizer_rows.pt``, for ``torch.load(weights_only=True)``.
    ``dcp``: one torch.distributed.checkpoint of ``{"model": ..., "optimizer_rows": ...}``.
    ``torchrec``: one of ``{"model": ..., "optimizer": {"state": ...}}`` by the names of TorchRec's
    optimizers, those of the dense parameters included.
    The last three hold the model in memory once. ``export.json`` is the report.

    The model's tensors have the names of its ``state_dict()`` without what wrappers add; row states
    are called ``<state_dict name of the table>.<state>``, as ``tables.users.weight.sum``. A state
    of one value per row that each range of columns has of its own: ``....sum[0:8]``.

    Args:
        store: the directory of a store, or the one that holds the stores of all workers of a job;
            or these one by one. Processes may be training on them.
        out: a directory that does not exist yet; it appears once it is complete.
        format: ``"safetensors"``, ``"torch"``, ``"dcp"`` or ``"torchrec"``.
        full: the newest full-recovery point that all stores have, not the newest snapshots.
        keep_names: leave ``module.``, ``_orig_mod.`` and ``_dmp_wrapped_module.`` in names.
        rows_in_order: several stores may have a table under one name without recording their parts
            (``Table(part=...)``); its rows then follow each other in the order of workers.
        world_size: of a directory with jobs of several sizes, the one of so many workers.
        address: of the copy that ``store`` was read from; the report names it instead.

    Raises:
        UsageError: ``out`` exists, or no such format.
        StoreError: not a store or job, nothing to export, a worker's store is missing, or the
            stores do not fit together.
        DamageError: what would have to be read is damaged (named).
        StorageError: the operating system refused.
    """
    if format not in FORMATS:
        raise UsageError(f"format is {format!r}; allowed: {', '.join(FORMATS)}")
    target = Path(out)
    if target.exists():
        raise UsageError(f"'{target}' exists; choose a new directory")
    job = find_stores(store, world_size=world_size)
    job.require_all()
    renamed = ("", "") if address is None else (str(store), address)
    options = _Options(format, full, keep_names, rows_in_order, renamed)
    return read_committed_all(job.stores, lambda readers: _export(job, readers, target, options))


@dataclass(frozen=True)
class _Options:
    format: Format
    full: bool
    keep_names: bool
    rows_in_order: bool
    renamed: tuple[str, str]  # a directory, and the address that the report has instead


def _export(
    job: JobStores, readers: Sequence[StoreReader], target: Path, options: _Options
) -> ExportReport:
    records = newest_records(readers, full=options.full)
    members = [Member(*m) for m in zip(job.workers, readers, records, strict=True)]
    parts = read_parts(members)
    if job.is_one_store:
        plan = plan_of_one(readers[0])
    else:
        plan = plan_tables(
            [reader.tables for reader in readers], job.workers, rows_in_order=options.rows_in_order
        )
    content = _collect(members, parts, plan, keep_names=options.keep_names)
    source = newest(parts)
    sizes = [_spec(value) for value in [*content.model.values(), *content.rows.values()]]
    report = ExportReport(
        out=str(target),
        format=options.format,
        files=(),
        step=source.position.step,
        num_samples=source.position.num_samples,
        tensors=len(sizes),
        tensor_bytes=sum(spec.size_bytes for spec in sizes),
        stores=tuple(_exported(part, *options.renamed) for part in parts),
        step_of_rows=step_of_all(members),
        dense_from=source.member.worker,
        removed=tuple(content.removed),
        notes=(*notes(parts), *_parts_alone(job, readers[0]), *content.notes),
    )
    return _write(target, content, report)


def _parts_alone(job: JobStores, reader: StoreReader) -> list[str]:
    """Return notes about a store that is exported without the rest of its tables."""
    cut = [t.name for t in reader.tables.values() if t.part is not None and not t.part.is_whole]
    if not (job.is_one_store and cut):
        return []
    return [
        f"it holds parts of tables, such as '{cut[0]}': for whole ones name the directory that "
        "holds the stores of all workers"
    ]


def _exported(part: MemberPart, directory: str, address: str) -> ExportedStore:
    member, position = part.member, part.position
    return ExportedStore(
        str(member.reader.directory).replace(directory, address, 1),
        member.worker,
        position.step,
        position.num_samples,
        position.samples_lost,
        member.record.is_complete,
    )


def _write(target: Path, content: _Content, report: ExportReport) -> ExportReport:
    temporary = target.with_name(target.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _WRITERS[report.format](temporary, content)
        files = (REPORT_FILE, *(entry.name for entry in temporary.iterdir()))
        report = replace(report, files=tuple(sorted(files)))
        with (temporary / REPORT_FILE).open("w") as file:
            file.write(json.dumps(asdict(report), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        if isinstance(error, CprError):  # of the store that is read
            raise
        raise storage_error("write", target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


_Value = torch.Tensor | WholeArray


@dataclass(frozen=True)
class _Content:
    """The model's tensors and the row states, by name; tables are not read yet.

    Attributes:
        states: the row states of each table, by its weight's name.
        optimizers: of the dense part.
        names: exported names of its parameters, where these differ.
    """

    model: dict[str, _Value]
    rows: dict[str, _Value]
    states: dict[str, list[WholeArray]]
    optimizers: list[dict[str, Any]]
    names: dict[str, str]
    removed: list[str]
    notes: list[str]


def _collect(
    members: Sequence[Member],
    parts: Sequence[MemberPart],
    plan: TablePlan,
    *,
    keep_names: bool,
) -> _Content:
    _refuse([*plan.faults, *dense_faults(parts)])
    for name, number in plan.unplaced.items():
        raise StoreError(
            f"table '{name}' is in {number} stores, which do not say which part of it each holds. "
            "If its rows follow each other in the order of the workers, say so: --rows-in-order "
            "(Python: rows_in_order=True). Stores of a Table(part=...) hold their order"
        )
    source = newest(parts)
    tree = read_dense(source.member.reader, source.member.record).tree()
    # What a module's get_extra_state() gave is no tensor and has no place in a plain state dict.
    model: dict[str, _Value] = {
        name: value for name, value in tree["model"].items() if isinstance(value, torch.Tensor)
    }
    states: dict[str, list[WholeArray]] = {}
    lacking: list[str] = []
    for table, holdings in plan.tables.items():
        arrays = whole_arrays(members, holdings)
        lacking += [
            f"'{table}/{array.name}' is not in the store of worker {worker}: zero there"
            for array in arrays
            for worker in array.lacking
        ]
        keys = _keys(table, holdings, parts)
        if not keys:
            lacking.append(f"table '{table}' is not in the model's state_dict(), and left out")
        for key in keys:
            model[key] = next(array for array in arrays if array.name == WEIGHT)
            states[key] = [array for array in arrays if array.name != WEIGHT]
    names = {} if keep_names else plain_names(model, source.wrapped)
    rows: dict[str, _Value] = {
        f"{names.get(key, key)}.{array.name}": array
        for key, arrays in states.items()
        for array in arrays
    }
    plain = {names.get(key, key): value for key, value in model.items()}
    by_table = {names.get(key, key): arrays for key, arrays in states.items()}
    return _Content(plain, rows, by_table, tree["optimizers"], names, added(names), lacking)


def _keys(table: str, holdings: Sequence[Holding], parts: Sequence[MemberPart]) -> list[str]:
    """Return the names of a whole table in the ``state_dict()``; none if it is not in there.

    Those that all its parts have in common, where a part's own name stands for the table's; else
    the table's name.
    """
    found = [
        [
            key.replace(holding.name, table)
            for key, name in parts[holding.member].table_keys.items()
            if name == holding.name
        ]
        for holding in holdings
    ]
    common = [key for key in found[0] if all(key in keys for keys in found)]
    return common or ([f"{table}.{WEIGHT}"] if any(found) else [])


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise StoreError(
            f"the stores do not make up one job: {'; '.join(faults)}. Name the directory that "
            "holds the stores of all workers of one job, and no other; `cpr inspect` shows them"
        )


def _spec(value: _Value) -> TensorSpec:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype)
    return TensorSpec(value.shape, value.dtype)


def _write_safetensors(out: Path, content: _Content) -> None:
    for name, values in (("model", content.model), ("optimizer_rows", content.rows)):
        write_safetensors(
            out / f"{name}.safetensors",
            {key: _spec(value) for key, value in values.items()},
            lambda key, values=values: _blocks(values[key]),  # type: ignore[misc]
        )


def _blocks(value: _Value) -> Iterator[torch.Tensor]:
    return iter([value]) if isinstance(value, torch.Tensor) else value.blocks()


def _whole(values: dict[str, _Value]) -> dict[str, torch.Tensor]:
    return {k: v if isinstance(v, torch.Tensor) else v.whole() for k, v in values.items()}


def _write_torch(out: Path, content: _Content) -> None:
    for name, values in (("model", content.model), ("optimizer_rows", content.rows)):
        with (out / f"{name}.pt").open("wb") as file:
            torch.save(_whole(values), file)
            file.flush()
            os.fsync(file.fileno())


def _write_dcp(out: Path, content: _Content) -> None:
    _save_dcp(out, {"optimizer_rows": _whole(content.rows)}, content)


def _write_torchrec(out: Path, content: _Content) -> None:
    state = optimizer_state(content.states, content.optimizers, content.names)
    _save_dcp(out, {"optimizer": {"state": state}}, content)


def _save_dcp(out: Path, others: dict[str, Any], content: _Content) -> None:
    # Imported here: it takes a second, and only these formats need it.
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": _whole(content.model), **others}, checkpoint_id=out, no_dist=True)


_WRITERS = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "dcp": _write_dcp,
    "torchrec": _write_torchrec,
}
