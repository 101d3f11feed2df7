"""TorchRec's managed collisions (MCH): which id has each row of a table.

A module sorts the ids by their value, and next to each id keeps its slot, and what its policy
counts of it. Here each slot has its id and its counts instead, as arrays of its row. So a row, its
id and its counts are captured together, and the module's order is made again from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

from cpr_ext import SlotKeys, Table
from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec.lookups import KernelLookups
from cpr_ext.state.slot_keys import EMPTY, KeyShare
from cpr_ext.state.table import Assigning

_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
_NO_ID = torch.iinfo(torch.int64).max  # what a module has in the place of an id for an empty slot


class ManagedKeys(SlotKeys):
    """The keys of a module's slots, and its policy's counts of them, in the order of the slots."""

    num_reserved = 1  # the last slot is that of all ids without one

    def __init__(self, name: str, module: MCHManagedCollisionModule) -> None:
        self._name = name
        self._module = module
        size, device = module.output_size(), module.device
        scores = {
            counted: torch.zeros(size, dtype=torch.int64, device=device)
            for counted in module._mch_metadata
        }
        super().__init__(torch.full((size,), EMPTY, device=device), scores)
        self._segments = module._output_segments_tensor.clone()
        count, index = module.buckets(), 0
        if size == int(self._segments[count]):
            count = 1  # it has all slots, and buckets of its own perhaps
        else:
            starts = self._segments[:count]
            index = int((starts == module._output_global_offset).nonzero()[0])
        self.share = KeyShare(index, count, module.input_size())

    def refresh(self) -> None:
        """Copy the module's map into the order of the slots.

        Raises:
            UsageError: the map gives a slot to two ids, or to none; or an id is negative.
        """
        module = self._module
        ids, slots = module._mch_sorted_raw_ids, self._slots()
        is_known = torch.zeros(len(self.key), dtype=torch.bool, device=self.key.device)
        inside = slots[(slots >= 0) & (slots < len(self.key))]
        is_known[inside] = True
        if not bool(is_known.all()):
            slot = int((~is_known).nonzero()[0])
            raise UsageError(
                f"'{self._name}': the map of its module gives slot {slot} to no id and another one "
                "to two; was a part of its state loaded?"
            )
        if int(ids.min()) < 0:
            raise UsageError(
                f"'{self._name}': id {int(ids.min())} is negative; ids are 0 or more. Give the "
                "module an input_hash_func that maps them there"
            )
        self.key[slots] = torch.where(ids == _NO_ID, EMPTY, ids)
        for name, score in self.scores.items():
            score[slots] = module._mch_metadata[name]

    def version(self) -> object:
        """Return how often PyTorch has written the module's map, and where it is."""
        return [(tensor.data_ptr(), tensor._version) for tensor in map_tensors(self._module)]

    def rebuild(self) -> None:
        """Sort the module's map again, by the ids of the slots."""
        module = self._module
        module._output_segments_tensor.copy_(self._segments)  # restored state has the old plan's
        ids = torch.where(self.key == EMPTY, _NO_ID, self.key)
        order = torch.argsort(ids, stable=True)
        module._mch_sorted_raw_ids.copy_(ids[order])
        module._mch_remapped_ids_mapping.copy_(order + module._output_global_offset)
        for name, score in self.scores.items():
            module._mch_metadata[name].copy_(score[order])

    def _slots(self) -> torch.Tensor:
        module: Any = self._module
        slots: torch.Tensor = module._mch_remapped_ids_mapping - module._output_global_offset
        return slots


def map_tensors(module: Any) -> list[torch.Tensor]:
    """Return the buffers of a module that say which id has each slot."""
    mapping = [module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping]
    return [*mapping, *module._mch_metadata.values()]


class ManagedProgress:
    """What modules keep between two evictions: the ids of the batches since, and their times.

    Each process has its own. A :class:`cpr_ext.state.stateful.Stateful`.
    """

    def __init__(self, modules: Mapping[str, MCHManagedCollisionModule]) -> None:
        self._modules = modules

    def state_dict(self) -> dict[str, Any]:
        """Return it by the names of the modules."""
        return {name: _progress(module) for name, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        for name, module in self._modules.items():
            if name in state:
                _set_progress(module, state[name])


def _progress(module: Any) -> dict[str, Any]:
    size, offset = module._input_history_buffer_size, module._current_history_buffer_offset
    histories = {"ids": module._history_accumulator} if size >= 0 else {}
    histories |= module._history_metadata
    return {
        "iteration": module._current_iter,
        "last_eviction": module._last_eviction_iter,
        "size": size,
        "histories": {name: history[:offset].clone() for name, history in histories.items()},
        "evicted": module._evicted_emb_indices.clone() if module._evicted else None,
    }


def _set_progress(module: Any, state: Mapping[str, Any]) -> None:
    module._current_iter = state["iteration"]
    module._last_eviction_iter = state["last_eviction"]
    module._current_iter_tensor.fill_(max(0, state["iteration"]))
    module._evicted = state["evicted"] is not None
    if module._evicted:
        module._evicted_emb_indices = state["evicted"].to(module.device)
    size, histories = state["size"], state["histories"]
    module._input_history_buffer_size = size
    module._current_history_buffer_offset = len(histories["ids"]) if size >= 0 else 0
    for name, kept in histories.items():
        history = torch.zeros(size, dtype=torch.int64, device=module.device)
        history[: len(kept)] = kept
        if name == "ids":
            module._history_accumulator = history
        else:
            module.register_buffer(f"_history_{name}", history, persistent=False)
            module._history_metadata[name] = history


class EvictionLookups:
    """Lookups of an operator, and the slots that an eviction resets.

    A :class:`cpr_ext.state.table.ChangeSource` and
    :class:`cpr_ext.state.table.AssignmentSource`.
    """

    def __init__(self, kernel: KernelLookups, module: Any) -> None:
        self._kernel = kernel
        self._module = module
        self.tables: dict[str, Table] = {}

    def watch_lookups(self, note: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """See :class:`cpr_ext.state.table.ChangeSource`."""
        return self._kernel.watch_lookups(note)

    def watch_changes(self, before: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """See :class:`cpr_ext.state.table.ChangeSource`."""
        return self._kernel.watch_changes(before)

    def watch_assignments(self, assigning: Assigning) -> Sequence[Any]:
        """See :class:`cpr_ext.state.table.AssignmentSource`."""
        return [_EvictionHandle(self._module, self.tables, assigning)]


class _EvictionHandle:
    """Has a sharded module reset evicted slots inside of ``assigning``, until removed."""

    def __init__(self, module: Any, tables: Mapping[str, Table], assigning: Any) -> None:
        self._assigning: Callable[[], Any] = weakref.WeakMethod(assigning)
        self._tables = tables
        inner = module._evict

        def evict(evictions: Mapping[str, torch.Tensor | None]) -> None:
            assigning = self._assigning()
            with ExitStack() as blocks:
                for name, slots in evictions.items():
                    table = self._tables.get(name)
                    if assigning is not None and table is not None and slots is not None:
                        blocks.enter_context(assigning(table, slots.long()))
                inner(evictions)

        module._evict = evict

    def remove(self) -> None:
        """Let the module reset slots without it."""
        self._assigning = lambda: None


class ManagedTables:
    """The managed collisions of a model, whether or not it is sharded.

    Raises:
        UsageError: a module, or a policy, whose map cannot be saved; named.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = list(_find(get_unwrapped_module(model)))
        modules = {name: module for name, module, _ in self._found}
        #: What modules keep between evictions; None: there are none.
        self.progress = ManagedProgress(modules) if modules else None

    def give_keys(self, tables: Sequence[Table]) -> None:
        """Give each table of a managed module the keys of its slots."""
        wrapped: dict[int, EvictionLookups] = {}
        for name, module, owner in self._found:
            for table in tables:
                whole = table.name if table.part is None else table.part.table
                if whole != name:
                    continue
                table.slots = ManagedKeys(name, module)
                table.slots.require_fit(table.name, table.weight)
                lookups = table.lookups
                if isinstance(lookups, KernelLookups):
                    own = wrapped.setdefault(id(lookups), EvictionLookups(lookups, owner))
                    own.tables[name.rpartition(".")[2]] = table
                    table.lookups = own

    @property
    def buffers(self) -> set[int]:
        """The ids of the tensors of which rows have the values."""
        return {id(tensor) for _, module, _ in self._found for tensor in map_tensors(module)}


def _find(model: nn.Module) -> Iterator[tuple[str, MCHManagedCollisionModule, Any]]:
    """Yield each table's name, its module, and the module that resets its rows."""
    kinds = BaseShardedManagedCollisionEmbeddingCollection, BaseManagedCollisionEmbeddingCollection
    known = set()
    for name, owner in model.named_modules():
        if not isinstance(owner, kinds):
            continue
        embeddings: Any = owner._embedding_module
        kind = "embedding_bags" if hasattr(embeddings, "embedding_bags") else "embeddings"
        modules: Any = owner._managed_collision_collection._managed_collision_modules
        for table, module in modules.items():
            known.add(id(module))
            path = ".".join(filter(None, (name, "_embedding_module", kind, table)))
            yield path, _savable(path, module), owner
    for name, other in model.named_modules():
        if isinstance(other, ManagedCollisionModule) and id(other) not in known:
            raise UsageError(
                f"'{name}' is a {type(other).__name__} outside of a "
                "ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection: "
                "which table it gives rows of is not known, so its ids cannot be saved with them"
            )


def _savable(name: str, module: Any) -> MCHManagedCollisionModule:
    if type(module) is not MCHManagedCollisionModule:
        raise UsageError(
            f"'{name}' is mapped by a {type(module).__name__}, whose ids cannot be saved with "
            "their rows yet; use MCHManagedCollisionModule, or torch.distributed.checkpoint"
        )
    policy = module._eviction_policy
    if type(policy) not in _POLICIES:
        known = ", ".join(kind.__name__ for kind in _POLICIES)
        raise UsageError(
            f"'{name}' evicts by a {type(policy).__name__}, whose state is not known; those that "
            f"are: {known}"
        )
    return module
