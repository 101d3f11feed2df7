"""A store from a checkpoint of torch.save or torch.distributed.checkpoint.

The checkpoint's tensors become the dense part of a store without tables. A recovery from it then
puts each table's rows where the model has them, as of a table that another job replicates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from cpr_ext import Checkpointer, EverySteps, StoreOptions
from cpr_ext.errors import StorageError, UsageError
from cpr_ext.recovery.replicated_tables import IMPORTED
from cpr_ext.state.position import require_sound
from cpr_ext.storage.filesystem import make_directory, storage_error, sync_directory
from cpr_ext.wings.tools.maintenance.verification import verify

_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_TEMPORARY = ".cpr-import-"  # how the name of a store begins while it is written


@dataclass(frozen=True)
class ImportReport:
    """What a new store holds.

    Attributes:
        store: the directory.
        step, num_samples: the position in training that it says.
        tensors: of the model.
        tensor_bytes: their size.
        parameters_with_state: those of which optimizer state was taken.
        notes: what of the checkpoint was left out, what is next to the store; a sentence each.
    """

    store: str
    step: int
    num_samples: int
    tensors: int
    tensor_bytes: int
    parameters_with_state: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    step: int,
    num_samples: int = 0,
    model_key: str | None = None,
) -> ImportReport:
    """Write a store with the tensors of a checkpoint, for ``recover(from_store=[store])``.

    Optimizer state is taken where the checkpoint has it by the names of parameters, as TorchRec's
    optimizers and torch's ``get_optimizer_state_dict()`` do. The checkpoint is in memory once.

    Args:
        source: a file of ``torch.save``, or a directory of ``torch.distributed.checkpoint``.
        store: a directory that does not exist yet, or is empty.
        step, num_samples: the position in training that the checkpoint is of.
        model_key: where the checkpoint has the model's ``state_dict()``. None: under "model",
            "model_state_dict" or "state_dict", or at the top.

    Raises:
        UsageError: no model is found, or none that a store can hold; or ``store`` is taken.
        StorageError: the operating system refused.
    """
    path = Path(store).absolute()
    _refuse_taken(path)
    require_sound(step, num_samples)
    try:
        tree = _read_dcp(source) if Path(source).is_dir() else _read_file(source)
    except OSError as error:
        raise storage_error("read", Path(source), error) from error
    model, key = _find_model(tree, model_key)
    left_out = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
    notes = [f"'{name}' is not a tensor, and left out" for name in left_out]
    model = {name: value for name, value in model.items() if name not in left_out}
    if not model:
        seen = "; ".join(notes) or "it is empty"
        raise UsageError(f"'{source!s}' has no tensor where the model is: {seen:.500}")
    for name in model:
        if not isinstance(name, str):
            raise UsageError(
                f"'{source!s}' has a tensor under {name!r:.100}, which is no name; save the "
                "state_dict() of the model, whose keys are str"
            )
    states = {} if key is None else _find_states(tree, key, notes)
    foreign = sorted(states.keys() - model.keys())
    notes += [
        f"optimizer state of '{name}', which is not in the model, is left out" for name in foreign
    ]
    optimizer = _Imported([(model[n], state) for n, state in states.items() if n in model])
    notes += [
        f"'{left}' is of an import that was killed, or that runs now; if none runs, remove it"
        for left in sorted(_ancestor(path).glob(f"{_TEMPORARY}*"))
    ]
    with _appearing(path) as temporary:
        with Checkpointer(
            _Holder(model),
            [optimizer],
            temporary,
            tables=[],
            schedule=EverySteps(2**40),
            store=StoreOptions(on_nan="save"),
        ) as ckpt:
            ckpt.adopt(step=step, num_samples=num_samples)
            ckpt.save("base").wait_until_done()
        if found := verify(temporary).damaged:
            raise UsageError(f"'{source!s}' cannot be kept in a store: {found[0].reason}")
    num_bytes = sum(value.nbytes for value in model.values())
    num_states = len(states) - len(foreign)
    return ImportReport(
        str(store), step, num_samples, len(model), num_bytes, num_states, tuple(notes)
    )


def _refuse_taken(path: Path) -> None:
    """Raise UsageError unless a store can appear at ``path``."""
    try:
        if any(path.iterdir()):
            raise UsageError(f"'{path}' is not empty; choose a new directory")
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise UsageError(
            f"'{path}' is a file, or in one; choose a new directory for the store"
        ) from error
    except OSError as error:
        raise storage_error("open", path, error) from error


def _ancestor(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.is_dir())


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Give a directory that is at ``path`` after the block; if the block fails, it is gone."""
    try:
        with TemporaryDirectory(prefix=_TEMPORARY, dir=_ancestor(path)) as folder:
            made = Path(folder) / "store"
            yield made
            make_directory(path.parent)
            made.rename(path)
            sync_directory(path.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error("write", path, error) from error


class _Holder(nn.Module):
    """A model whose ``state_dict()`` is what a checkpoint holds."""

    _tensors: Mapping[str, torch.Tensor]

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["_tensors"] = tensors

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self._tensors)


class _Imported(torch.optim.Optimizer):
    """Optimizer state of parameters, whatever optimizer it was of."""

    def __init__(self, states: Sequence[tuple[torch.Tensor, Mapping[str, Any]]]) -> None:
        super().__init__([{"params": [parameter for parameter, _ in states]}], {})
        for parameter, state in states:
            self.state[parameter] = dict(state)


_Imported.__name__ = IMPORTED


def _read_file(source: str | os.PathLike[str]) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # of torch's unpickler, whose errors are of many kinds
        if isinstance(error, OSError):
            raise
        raise UsageError(
            f"'{os.fspath(source)}' is no file that torch.load(weights_only=True) reads: {error}"
        ) from error


def _read_dcp(source: str | os.PathLike[str]) -> Any:
    """Return the tensors of a DCP checkpoint, in the tree that was saved."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(source).read_metadata()
    flat = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(flat, checkpoint_id=source, no_dist=True)
    tree: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for name, value in flat.items():
        *parents, last = paths.get(name, (name,))
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return tree


def _find_model(tree: Any, model_key: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the model's ``state_dict()`` and its key; None: it is the tree itself."""
    if isinstance(tree, Mapping):
        for key in _MODEL_KEYS if model_key is None else (model_key,):
            if isinstance(tree.get(key), Mapping):
                return dict(tree[key]), key
        tensors = [isinstance(value, torch.Tensor) for value in tree.values()]
        if model_key is None and tensors and all(tensors):
            return dict(tree), None
    keys = ", ".join(map(repr, tree)) if isinstance(tree, Mapping) else type(tree).__name__
    raise UsageError(
        f"no model is under {model_key or ' or '.join(_MODEL_KEYS)}; the checkpoint holds: "
        f"{keys:.300}. Name its key: --model-key (Python: model_key=)"
    )


def _find_states(
    tree: Mapping[str, Any], model_key: str, notes: list[str]
) -> dict[str, dict[str, Any]]:
    """Return optimizer state by parameter; add to ``notes`` what cannot be taken."""
    found: dict[str, dict[str, Any]] = {}
    for key, state in _optimizers(tree, model_key):
        if any(not isinstance(name, str) for name in state):
            notes.append(
                f"the optimizer state under '{key}' numbers its parameters, does not name them, "
                "and is left out"
            )
            continue
        for name, values in state.items():
            # TorchRec has a table's name in those of its states: "users.momentum1".
            short = {str(k).rpartition(".")[2]: v for k, v in dict(values).items()}
            found.setdefault(name, {}).update(short)
    return found


def _optimizers(tree: Mapping[str, Any], model_key: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    for key, value in tree.items():
        if key != model_key and isinstance(value, Mapping):
            state = value.get("state")
            if isinstance(state, Mapping) and all(isinstance(v, Mapping) for v in state.values()):
                yield key, state
