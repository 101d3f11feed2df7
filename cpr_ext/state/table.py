"""Tables: an embedding weight with its per-row optimizer state, and its shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from cpr_ext.errors import UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes
from cpr_ext.state.slot_keys import SlotKeys, as_slot_keys, is_key_array, require_free_names
from cpr_ext.state.table_part import TablePart

WEIGHT = "weight"
NO_KEYS = (
    "table '{table}': the store holds '{array}' of its rows, the model does not; make the table "
    "with the same Table(keys=...) as the store was made with"
)
# Tables that hold this share of all rows are prioritised; the small rest is saved whole.
PRIORITIZED_SHARE = 0.99
_NO_ROWS = (
    "table {table!r}: optimizer state {state!r} is a sparse tensor, which has no rows to save. Use "
    "an optimizer made for sparse gradients (SGD without momentum, Adagrad, SparseAdam), or "
    "sparse=False embeddings"
)
# They leave rows without a gradient alone, unless they have momentum or weight decay.
_KNOWN = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


#: An optimizer, and the one of its parameter groups that has a weight.
Owner = tuple[torch.optim.Optimizer, dict[str, Any]]
Assigning = Callable[["Table", torch.Tensor], AbstractContextManager[None]]


class ChangeSource(Protocol):
    """A fused kernel, which changes rows in the backward pass, and says when."""

    def watch_lookups(self, note: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """Call ``note(table, indices)`` before every lookup that training may change rows by.

        Returns:
            Handles; their ``remove()`` ends it.
        """

    def watch_changes(self, before: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """Call ``before(table, row_ids)`` in each backward pass before it changes these rows.

        Args:
            before: ``row_ids`` (n,) int64, perhaps repeated, may be kept until the next step. An
                error it raises ends the backward pass, and the rows do not change.

        Returns:
            Handles; their ``remove()`` ends it.
        """


@runtime_checkable
class AssignmentSource(Protocol):
    """A :class:`ChangeSource` whose module gives slots to other ids, and writes their rows."""

    def watch_assignments(self, assigning: Assigning) -> Sequence[Any]:
        """Write rows of slots that get another id inside of ``assigning(table, slots)``.

        Args:
            assigning: ``slots`` (n,) int64. Kept weakly: its owner may end first.

        Returns:
            Handles; their ``remove()`` ends it.
        """


@dataclass(eq=False)
class Table:
    """An embedding table and everything that belongs to its rows.

    Attributes:
        name: unique in the model, the key in every snapshot.
        weight: parameter, shape (num_embeddings, embedding_dim).
        optimizer: the optimizer that updates ``weight``, if any.
        modules: the ``nn.Embedding`` / ``nn.EmbeddingBag`` modules that look rows up in it.
        lookups: the fused kernel that changes rows; several tables may have the same one.
        part: the part of a larger table that this is, if other processes hold the rest.
        keys: (num_embeddings,) int64, the id that each row belongs to now, or
            :class:`cpr_ext.SlotKeys`. None: row i belongs to id i, always.
    """

    name: str
    weight: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    modules: list[nn.Module] = field(default_factory=list)
    lookups: ChangeSource | None = None
    part: TablePart | None = None
    keys: torch.Tensor | SlotKeys | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.weight.shape)
        if len(shape) != 2 or 0 in shape:
            raise UsageError(
                f"table {self.name!r} has shape {shape}; needed: (num_embeddings, embedding_dim) "
                "with at least one row and one column"
            )
        if self.weight.dtype not in DTYPE_NAMES:
            raise UsageError(
                f"table {self.name!r} has dtype {self.weight.dtype}; can be stored: {list_dtypes()}"
            )
        if not self.weight.is_contiguous():
            raise UsageError(
                f"table {self.name!r} is not contiguous; give its parameter other memory first: "
                "weight.data = weight.data.contiguous()"
            )
        if self.part is not None and self.part.shape != shape:
            raise UsageError(f"table {self.name!r} has shape {shape}, its part {self.part.shape}")
        #: The keys of its rows; None: it is not keyed.
        self.slots = as_slot_keys(self.keys, self.name, self.weight)
        if self.slots is not None and self.part is not None and shape[1] < self.part.embedding_dim:
            raise UsageError(
                f"table {self.name!r} has keys, and holds columns {self.part.columns} of "
                f"{self.part.embedding_dim}: a row and its key must be in one process. Cut keyed "
                "tables by rows"
            )
        self._form = (self.weight.shape, self.weight.dtype)
        self._known_group: dict[str, Any] | None = None

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Columns of the table."""
        return self.weight.shape[1]

    def row_states(self) -> dict[str, torch.Tensor]:
        """Return the per-row optimizer state: every tensor whose first dimension is num_rows.

        Optimizers make their state at the first step, so each snapshot calls this again.

        Raises:
            UsageError: the state is a sparse tensor (SGD with momentum on sparse gradients).
        """
        if self.optimizer is None:
            return {}
        states = {}
        for name, value in self.optimizer.state.get(self.weight, {}).items():
            if is_row_state(value, self.num_embeddings):
                if value.layout != torch.strided:
                    raise UsageError(_NO_ROWS.format(table=self.name, state=name))
                states[name] = value
        return states

    def refuse_sparse_momentum(self) -> None:
        """Raise UsageError for an optimizer whose state will have no rows, before it makes any."""
        group = self._group() if isinstance(self.optimizer, torch.optim.SGD) else None
        if group and group["momentum"] and any(getattr(m, "sparse", False) for m in self.modules):
            raise UsageError(_NO_ROWS.format(table=self.name, state="momentum_buffer"))

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the weight and per-row states, each (num_embeddings, ...), detached, not copied.

        Raises:
            UsageError: what the modules look rows up in is not this weight any more, or it has
                another shape or dtype; or a state cannot be saved.
        """
        weight, is_replaced = self.weight, False
        for module in self.modules:  # no generator: thousands of tables are asked at once
            is_replaced = is_replaced or module.weight is not weight
        if is_replaced or (weight.shape, weight.dtype) != self._form:
            raise UsageError(
                f"table {self.name!r}: its weight was replaced, or has another shape or dtype than "
                "when the Checkpointer was made; make a new Checkpointer after such a change"
            )
        arrays = {WEIGHT: weight.detach(), **self.row_states()}
        return arrays if self.slots is None else arrays | self.key_arrays()

    def clean_arrays(self) -> dict[str, torch.Tensor]:
        """Return :meth:`arrays` for one who reads only rows that no tracker calls dirty."""
        return self.arrays()

    def begin_restore(self) -> None:
        """Note that rows are to be overwritten, some or all, before the next step."""

    def key_arrays(self) -> dict[str, torch.Tensor]:
        """Return the keys and scores of its rows; none unless it is keyed.

        Raises:
            UsageError: they do not fit the table any more.
        """
        if self.slots is None:
            return {}
        require_free_names(self.name, self.row_states())
        self.slots.require_fit(self.name, self.weight)
        return self.slots.arrays()

    def array_names(self) -> list[str]:
        """Return sorted names of the weight and its per-row states, savable or not."""
        states = {} if self.optimizer is None else self.optimizer.state.get(self.weight, {})
        names = [name for name, value in states.items() if is_row_state(value, self.num_embeddings)]
        return sorted([WEIGHT, *names, *(() if self.slots is None else self.slots.arrays())])

    def keep_row_states(self, names: Collection[str]) -> None:
        """Drop every per-row state but these; the optimizer creates them again on demand."""
        for name in self.row_states().keys() - set(names):
            assert self.optimizer is not None
            del self.optimizer.state[self.weight][name]
        if self.optimizer is not None and not self.optimizer.state.get(self.weight, True):
            del self.optimizer.state[self.weight]

    def drop_half_state(self) -> None:
        """Drop what the optimizer knows of it if no per-row state is there: it starts again."""
        if self.optimizer is not None and not self.row_states():
            self.optimizer.state.pop(self.weight, None)

    def make_row_state(self, name: str, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        """Create an all-zero per-row state that the optimizer would have made at its first step."""
        if is_key_array(name):
            raise UsageError(NO_KEYS.format(table=self.name, array=name))
        if self.optimizer is None:
            raise UsageError(
                f"table {self.name!r}: the store holds optimizer state {name!r}, but no optimizer "
                "updates this table; pass it to the Checkpointer"
            )
        shape = (self.num_embeddings, *row_shape)
        self.optimizer.state[self.weight][name] = torch.zeros(
            shape, dtype=dtype, device=self.weight.device
        )

    def can_make_row_state(self) -> bool:
        """Return whether a per-row state that is not there yet may be made."""
        return self.optimizer is not None

    def _group(self) -> dict[str, Any] | None:
        if self.optimizer is None:
            return None
        groups, known = self.optimizer.param_groups, self._known_group
        for group in groups:
            if group is known:
                return known
        has_it = (g for g in groups if any(p is self.weight for p in g["params"]))
        self._known_group = next(has_it, None)
        return self._known_group

    def note_owner(self, owner: Owner | None) -> None:
        """Note which optimizer updates the weight, and by which of its parameter groups."""
        self.optimizer, self._known_group = owner or (None, None)

    def updates_only_looked_up_rows(self) -> bool:
        """Return whether a step changes only rows that were looked up since the last one.

        Momentum, weight decay and dense Adam move every row at every step; for their tables
        "not looked up" does not mean "not changed". Optimizers that are not known are taken to
        move all rows, unless they have the attribute ``updates_only_looked_up_rows = True``.
        """
        group = self._group()
        if self.optimizer is None or group is None:
            return True  # it was frozen: nothing updates it
        return _is_known(self.optimizer) and not _decays(group)


def moving_tables(tables: Iterable[Table]) -> frozenset[str]:
    """Return the names of the tables of which a step may change rows that were not looked up.

    See :meth:`Table.updates_only_looked_up_rows`. Each parameter group is asked once.
    """
    asked: set[int] = set()  # ids of optimizers
    moves: dict[int, bool] = {}  # by id of a group
    found = []
    for table in tables:
        optimizer, of_table = table.optimizer, None
        if optimizer is not None:
            if id(optimizer) not in asked:
                asked.add(id(optimizer))
                is_known = _is_known(optimizer)
                moves |= {id(g): not is_known or _decays(g) for g in optimizer.param_groups}
            of_table = moves.get(id(table._known_group))
        if not table.updates_only_looked_up_rows() if of_table is None else of_table:
            found.append(table.name)
    return frozenset(found)


def may_move_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may change rows without a gradient, of some table."""
    return not _is_known(optimizer) or any(map(_decays, optimizer.param_groups))


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    # A subclass may do anything in its step.
    says_so = getattr(optimizer, "updates_only_looked_up_rows", False)
    return type(optimizer) in _KNOWN or bool(says_so)


def _decays(group: Mapping[str, Any]) -> bool:
    return bool(group.get("weight_decay", 0) != 0 or group.get("momentum", 0) != 0)


def is_row_state(value: object, num_rows: int) -> bool:
    """Return whether optimizer state belongs to rows: its first dimension is num_rows."""
    return isinstance(value, torch.Tensor) and value.dim() >= 1 and value.shape[0] == num_rows


def find_tables(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[Table]:
    """Find every ``nn.Embedding`` and ``nn.EmbeddingBag`` of ``model``, in module order.

    A weight shared by several modules is one table, named by the first of them.

    Raises:
        UsageError: a table without rows, or one whose weight two optimizers update.
    """
    owners = owners_by_parameter(optimizers)
    tables: dict[int, Table] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if not isinstance(module.weight, nn.Parameter) or "weight" not in module._parameters:
            raise UsageError(
                f"table {name!r}: its weight is computed from other parameters "
                "(torch.nn.utils.parametrize, weight_norm), so it has no rows to save. "
                "Name the other tables with tables={...}; this one is then saved whole each time"
            )
        if (known := tables.get(id(module.weight))) is not None:
            known.modules.append(module)
            continue
        table = Table(name or "embedding", module.weight, modules=[module])
        table.note_owner(owners.get(id(module.weight)))
        tables[id(module.weight)] = table
    return list(tables.values())


def register_tables(
    named: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table],
    optimizers: Iterable[torch.optim.Optimizer],
) -> list[Table]:
    """Return tables given by name: parameters, or modules with a ``weight``; or ready-made."""
    if not isinstance(named, Mapping):
        given: Any = named
        if isinstance(given, str | torch.Tensor) or not isinstance(given, Iterable):
            raise UsageError(
                f"tables is a {type(named).__name__}; needed: modules or parameters by name, such "
                'as tables={"items": model.items}'
            )
        for table in named:
            if not isinstance(table, Table):
                raise UsageError(
                    f"tables holds a {type(table).__name__}; give modules or parameters by name, "
                    'such as tables={"items": model.items}'
                )
        return list(named)
    owners = owners_by_parameter(optimizers)
    tables = []
    for name, given in named.items():
        weight = given.weight if isinstance(given, nn.Module) else given
        if not isinstance(weight, torch.Tensor):
            raise UsageError(
                f"table {name!r} is a {type(given).__name__}; needed: tensor or module"
            )
        modules = [given] if isinstance(given, nn.Module) else []
        tables.append(Table(name, weight, modules=modules))
        tables[-1].note_owner(owners.get(id(weight)))
    return tables


def owners_by_parameter(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Owner]:
    """Return the optimizer of each parameter, and its group there, by ``id(parameter)``."""
    owners: dict[int, Owner] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(id(parameter), (optimizer, group))[0] is not optimizer:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} is updated by two "
                        "optimizers; give each parameter to one"
                    )
    return owners


def shard_row_range(num_embeddings: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return rows [begin, end) of a table that ``shard`` of ``num_shards`` holds; may be empty."""
    return shard * num_embeddings // num_shards, (shard + 1) * num_embeddings // num_shards


def prioritized_tables(tables: Sequence[Table]) -> list[Table]:
    """Return the fewest largest tables that together hold 99 % of all rows."""
    total = sum(table.num_embeddings for table in tables)
    chosen: list[Table] = []
    held = 0
    for table in sorted(tables, key=lambda table: -table.num_embeddings):
        if held >= PRIORITIZED_SHARE * total:
            break
        chosen.append(table)
        held += table.num_embeddings
    return chosen


def find_table(tables: Sequence[Table], name: str) -> Table:
    """Return the table of a name; raises UsageError that lists those that are."""
    for table in tables:
        if table.name == name:
            return table
    names = ", ".join(table.name for table in tables)
    raise UsageError(f"no table {name!r}; there are: {names}")


def as_rows(table: Table, row_ids: torch.Tensor) -> torch.Tensor:
    """Return a copy (n,) int64 of row ids, on the device; raises UsageError for other ones."""
    if not isinstance(row_ids, torch.Tensor) or row_ids.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"table {table.name!r}: rows are {getattr(row_ids, 'dtype', type(row_ids).__name__)}; "
            "needed: an int32 or int64 tensor"
        )
    one_piece = torch.contiguous_format
    rows = row_ids.to(table.weight.device, torch.int64, copy=True, memory_format=one_piece)
    rows = rows.reshape(-1)  # a copy, as the block may write to the given tensor
    low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, 0)
    if not 0 <= low <= high < table.num_embeddings:
        raise UsageError(
            f"table {table.name!r} has {table.num_embeddings} rows; given: {low} to {high}"
        )
    return rows


def refuse_cached_rows(model: nn.Module, tables: Sequence[Table]) -> None:
    """Raise UsageError if a module of the model caches rows of a table.

    FBGEMM's TBE does so with ``EmbeddingLocation.MANAGED_CACHING``: rows reach the table only by
    its ``flush()``.
    """
    for module_name, module in model.named_modules():
        cached = _cached_memory(module)
        for table in tables:
            if cached is not None and table.weight.untyped_storage().data_ptr() == cached:
                raise UsageError(
                    f"table {table.name!r}: {type(module).__name__} {module_name!r} caches its "
                    "rows, so that older values would be saved. Place it with "
                    "EmbeddingLocation.DEVICE, or HOST, instead of MANAGED_CACHING"
                )


def _cached_memory(module: nn.Module) -> int | None:
    """Return the address of the table memory of which a module caches rows, if it does."""
    cache, memory = (getattr(module, name, None) for name in ("lxu_cache_weights", "weights_uvm"))
    if not (isinstance(cache, torch.Tensor) and isinstance(memory, torch.Tensor)):
        return None
    return memory.untyped_storage().data_ptr() if cache.numel() and memory.numel() else None
