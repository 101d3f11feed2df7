"""All that reads a store, each as one call whose result can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cpr_ext
from cpr_ext.storage.retention import Retention
from cpr_ext.wings.tools import maintenance
from python_tests.faults.invariant import Fresh
from python_tests.faults.model import TABLES

NUM_SHARDS = 2


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def recover(store: Path, _: Path, **options: Any) -> Any:
    fresh = Fresh(store, NUM_SHARDS, store=cpr_ext.StoreOptions(None, Retention(3)))
    try:
        report = fresh.checkpointer.recover(**options)
        return report.step, hashlib.sha256(fresh.state.to_bytes()).hexdigest()
    finally:
        fresh.checkpointer.close()


def _verify(store: Path, _: Path) -> Any:
    report = maintenance.verify(store)
    return report.damaged, report.left_overs


def _export(store: Path, place: Path) -> Any:
    maintenance.export(store, place / "out")
    return hashlib.sha256((place / "out" / "model.safetensors").read_bytes()).hexdigest()


def _read_rows(store: Path, _: Path) -> Any:
    name, (num_rows, _dim) = "tables.big", TABLES["big"]
    return _digest(maintenance.read_rows(store, name, range(num_rows)).arrays["weight"])


def _inspect(store: Path, _: Path) -> Any:
    summary = maintenance.inspect(store)
    return len(summary.points), summary.file_bytes


def _repair(store: Path, _: Path) -> Any:
    report = maintenance.repair(store, apply=True)
    return report.damaged, report.actions


ACTIONS: dict[str, Callable[[Path, Path], Any]] = {
    "recover": recover,
    "recover-raise": partial(recover, on_damage="raise"),
    "recover-full": partial(recover, mode="full"),
    "move": lambda store, place: _recover_from(store, place),
    "verify": _verify,
    "export": _export,
    "read-rows": _read_rows,
    "inspect": _inspect,
    "repair": _repair,
}


def _recover_from(store: Path, place: Path) -> Any:
    return recover(place / "new", place, from_store=store)
