"""What a fresh process must find in the stores, whatever happened to the last one."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpr_ext
from cpr_ext.errors import StoreError
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.wings.tools.maintenance import verify
from python_tests.faults.journal import NOTHING, Promise, States, read_promise
from python_tests.faults.model import SLOT_BYTES, Model, State, build, train_step
from python_tests.faults.power_cut import fingerprint, read_tree
from python_tests.faults.scenario import STORES
from python_tests.helpers import open_checkpointer


class Fresh:
    """A model that knows nothing, and a Checkpointer on a store left behind."""

    def __init__(self, directory: Path, num_shards: int, **options: Any) -> None:
        self.model: Model
        self.model, self.optimizers = build(99)
        self.seq = 0
        self.checkpointer = open_checkpointer(
            self.model,
            self.optimizers,
            directory,
            num_shards=num_shards,
            priority=cpr_ext.AllRows(),
            schedule=cpr_ext.EverySteps(10**9),
            staging=cpr_ext.StagingOptions(num_threads=1, slot_bytes=SLOT_BYTES),
            save_at_close=False,
            state={"seq": lambda: self.seq},
            **{"store": cpr_ext.StoreOptions(None), **options},
        )

    @property
    def state(self) -> State:
        return State.of(self.model, self.optimizers)

    def recover(self, mode: Any = "partial") -> int:
        """The number of the state found."""
        report = self.checkpointer.recover(mode=mode)
        assert not report.damaged_segments, f"damaged: {report.damaged_segments}"
        return report.state.get("seq", NOTHING)

    def train(self) -> None:
        train_step(self.model, self.optimizers)
        self.checkpointer.step(10)


def key_of(root: Path, lines: Sequence[str], states: States) -> bytes:
    """Equal for all that ``check_stores`` cannot tell apart: the files, and what may be found."""
    digest = hashlib.sha256(fingerprint(read_tree(root)))
    for name in STORES:
        promise = read_promise(lines, name, states)
        digest.update(repr(dataclasses.astuple(promise)).encode())
        for seq in {*promise.allowed, *promise.complete} - {NOTHING}:
            for old in range(promise.first[seq], seq + 1):
                digest.update(states[old].to_bytes())
    return digest.digest()


def check_stores(root: Path, lines: Sequence[str], states: States) -> list[str]:
    """What is wrong with the stores below ``root`` after these lines of their journal."""
    found = []
    for name, num_shards in STORES.items():
        if not (root / name).exists() and not any(f" {name} " in line for line in lines):
            continue
        promise = read_promise(lines, name, states)
        found += [f"{name}: {text}" for text in promise.broken]
        try:
            _check_store(root / name, num_shards, promise, states)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def _check_store(store: Path, num_shards: int, promise: Promise, states: States) -> None:
    """Raise what is wrong with one store."""
    if NOTHING not in promise.allowed:
        _require_sound(store)
    elif not (store / MANIFEST_FILE).exists():
        assert not list(store.glob("segments/*")), "MANIFEST.json is gone"
    store.mkdir(exist_ok=True)
    copy = store.with_name(store.name + "-full")
    shutil.copytree(store, copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing more is to fail
        _check_partial(store, num_shards, promise, states)
        _check_full(copy, num_shards, promise, states)


def _check_partial(store: Path, num_shards: int, promise: Promise, states: States) -> None:
    fresh = Fresh(store, num_shards)
    seq = fresh.recover()
    _require(seq, promise.allowed, promise, states, fresh.state)
    assert _require_sound(store) == [], "files that nothing names are left after opening"
    saved = _go_on(fresh)
    again = Fresh(store, num_shards)
    again.recover()
    assert again.state == saved, "what a new run saved is not what the next one finds"
    again.checkpointer.close()
    assert _require_sound(store) == []


def _go_on(fresh: Fresh) -> State:
    """Train, save twice, and end; returns the state saved."""
    for _ in range(2):
        fresh.train()
        fresh.checkpointer.save()
        assert fresh.checkpointer.wait(20), "a new run's snapshot does not end"
    saved = fresh.state
    fresh.checkpointer.close()
    return saved


def _check_full(store: Path, num_shards: int, promise: Promise, states: States) -> None:
    fresh = Fresh(store, num_shards)
    try:
        seq = fresh.recover(mode="full")
    except StoreError as error:
        if NOTHING not in promise.complete or "no full-recovery point" not in str(error):
            raise
    else:
        allowed = promise.complete
        if seq != NOTHING:  # at a point all rows are of one state
            promise = Promise(first=dict.fromkeys(promise.first, seq))
        _require(seq, allowed, promise, states, fresh.state)
        fresh.train()
        fresh.checkpointer.save()
        assert fresh.checkpointer.wait(20), "a new run's snapshot does not end"
    fresh.checkpointer.close()


def _require(
    seq: int, allowed: Sequence[int], promise: Promise, states: States, state: State
) -> None:
    assert seq in allowed, f"found state {seq}; promised was one of {list(allowed)}"
    if seq != NOTHING:
        why = states.explain(state, seq, promise.first[seq])
        assert not why, why


def _require_sound(store: Path) -> list[str]:
    """Files that nothing names."""
    report = verify(store)
    assert report.is_sound, f"verify: {report.damaged}"
    return report.left_overs
