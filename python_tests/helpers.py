"""What the tests of the Python layer share: small models, plain copies of their state, and readers.

Segments are read with the ``safetensors`` library alone, so that a mistake shared by the writer and
the reader of this package cannot hide.
"""

import json
import os
import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import cpr_ext
from cpr_ext.saving import background_capture
from cpr_ext.saving.background_capture import CaptureThread
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests import preloaded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)

# The models are so small that more threads wait for each other most of the time.
torch.set_num_threads(1)

# An eps that float16 can hold: with the default a tiny gradient gives 0 / 0.
_EPS = 1e-3

# name -> (makes the optimizer of the tables, whether their gradients are sparse)
TABLE_OPTIMIZERS = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), True),
    "sgd_momentum": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), False),
    "adagrad": (lambda params: torch.optim.Adagrad(params, lr=0.1, eps=_EPS), True),
    "adam": (lambda params: torch.optim.Adam(params, lr=0.01, eps=_EPS), False),
    "sparse_adam": (lambda params: torch.optim.SparseAdam(params, lr=0.01, eps=_EPS), True),
    "rowwise_adagrad": (lambda params: RowWiseAdagrad(params, lr=0.1), True),
}
# Those that leave rows without a lookup as they are.
STILL_OPTIMIZERS = ["sgd", "adagrad", "sparse_adam", "rowwise_adagrad"]


class SmallModel(nn.Module):
    """A few tables and a linear layer, or none."""

    def __init__(self, tables, *, dtype=torch.float32, sparse=True, seed=0, has_dense=True):
        super().__init__()
        made = {n: nn.Embedding(*size, sparse=sparse, dtype=dtype) for n, size in tables.items()}
        self.tables = nn.ModuleDict(made)
        self.linear = nn.Linear(4, 2) if has_dense else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64) if has_dense else None)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, indices, dense):
        rows = [self.tables[name](ids).float() for name, ids in indices.items()]
        # Bounded gradients, whose squares float16 can hold: nothing diverges.
        loss = sum(0.1 * values.sin().sum() for values in rows)
        if self.linear is None:
            return loss
        self.seen += 1
        return loss + self.linear(dense).square().mean()


def build(tables, optimizer="adagrad", dtype=torch.float32, seed=0, has_dense=True):
    """A SmallModel and the optimizers of its tables and of the rest."""
    make, sparse = TABLE_OPTIMIZERS[optimizer]
    model = SmallModel(tables, dtype=dtype, sparse=sparse, seed=seed, has_dense=has_dense)
    if model.linear is None:
        return model, [make(model.tables.parameters())]
    return model, [make(model.tables.parameters()), torch.optim.Adam(model.linear.parameters())]


def make_indices(model, generator, count):
    """``count`` lookups in each table, the low row ids more often than the others."""
    indices = {}
    for name, module in model.tables.items():
        draws = torch.rand(count, generator=generator) ** 3
        indices[name] = (draws * module.num_embeddings).long()
    return indices


def train_step(model, optimizers, indices, generator):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(indices, torch.randn(3, 4, generator=generator)).backward()
    for optimizer in optimizers:
        optimizer.step()


@contextmanager
def short_windows(are_short=True):
    """The capturing thread is asked to stop as soon as it starts: a chunk in every window."""
    resume = CaptureThread.resume

    def resume_and_stop(self, work):
        def stopped(stop):
            stop.set()
            work(stop)

        resume(self, stopped)

    with patch.object(CaptureThread, "resume", resume_and_stop if are_short else resume):
        yield


@cache
def _quiet(kind):
    class Quiet(kind):
        def close(self, *, save=False):
            super().close(save=save)

    return Quiet


def open_checkpointer(
    *given, make=cpr_ext.Checkpointer, overlap=None, save_at_close=True, **options
):
    """A Checkpointer that captures small tables in the background ("always"), or no table."""
    least = {"always": 0, "never": sys.maxsize}.get(overlap, background_capture.OVERLAP_BYTES)
    with patch.object(background_capture, "OVERLAP_BYTES", least):
        checkpointer = make(*given, **options)
    if not save_at_close:
        checkpointer.__class__ = _quiet(type(checkpointer))
    return checkpointer


class Trained:
    """A model in training with its checkpointer; the same seed trains the same steps."""

    def __init__(
        self,
        directory,
        tables=None,
        *,
        optimizer="adagrad",
        seed=0,
        lookups=8,
        has_dense=True,
        **options,
    ):
        self.tables = tables or {"big": (200, 4), "small": (3, 2)}
        self.model, self.optimizers = build(self.tables, optimizer, seed=seed, has_dense=has_dense)
        self.lookups = lookups
        # Tests say themselves what is saved.
        options = {"save_at_close": False, **options}
        self.checkpointer = open_checkpointer(self.model, self.optimizers, directory, **options)
        torch.manual_seed(seed)

    @property
    def store(self):
        return self.checkpointer.store

    def train(self, num_steps, *, num_samples=10):
        """Steps whose lookups depend on the step's number only."""
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 + self.checkpointer.step_count)
            indices = make_indices(self.model, generator, self.lookups)
            train_step(self.model, self.optimizers, indices, generator)
            self.checkpointer.step(num_samples)

    def save(self, kind="partial"):
        """A snapshot of now, once it is durable; its handle."""
        handle = self.checkpointer.save(kind)
        self.checkpointer.wait()
        return handle

    def state(self):
        return copy_state(self.model, self.optimizers)

    def rows(self):
        return copy_rows(self.checkpointer.tables)

    def die(self):
        """What the end of a process leaves behind: the files, and no locks."""
        die(self.checkpointer)


def die(checkpointer):
    """End a checkpointer without closing it, as if its process had been killed between steps."""
    saver = checkpointer._saver
    if saver._overlap is not None:
        saver._overlap.close()
    if saver.in_flight is not None and saver.in_flight.state == "captured":
        saver.in_flight.wait_until_done()
    checkpointer._recorder.detach()
    checkpointer._watch.detach()
    if saver.outcomes.read_back is not None:
        saver.outcomes.read_back.has_ended = True  # the dead read nothing back
    checkpointer.store.close()


def copy_rows(tables):
    """A copy of all that belongs to rows: {table: {array: tensor}}."""
    return {
        table.name: {name: value.clone() for name, value in table.arrays().items()}
        for table in tables
    }


def copy_state(model, optimizers):
    """A copy of everything that decides how training goes on."""
    return clone(
        {
            "model": dict(model.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "python": random.getstate(),
        }
    )


def clone(tree):
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(clone(value) for value in tree)
    return tree


def same_bits(left, right):
    """Equal dtype, shape and bytes: NaN equals NaN, 0.0 differs from -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.detach().contiguous(), right.detach().contiguous()
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def differences(left, right, path=""):
    """Where two trees differ in type, shape or any bit."""
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__}, {type(right).__name__}"]
    if isinstance(left, torch.Tensor):
        return [] if same_bits(left, right) else [path]
    if isinstance(left, np.ndarray):
        same = left.dtype == right.dtype and left.shape == right.shape
        return [] if same and left.tobytes() == right.tobytes() else [path]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{path}: keys {sorted(map(str, left))}, {sorted(map(str, right))}"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{path}: length {len(left)}, {len(right)}"]
        pairs = enumerate(zip(left, right, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    same = left == right or (left != left and right != right)
    return [] if same else [f"{path}: {left}, {right}"]


def assert_same(left, right):
    found = differences(left, right)
    assert not found, found[:10]


#: The rows of one chunk of a segment file.
Captured = namedtuple("Captured", "table step row_ids arrays")


def own_metadata(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["cpr_ext"])


def array_offset(path, name: str) -> int:
    """Where an array such as ``tables.a/weight`` begins in a segment file."""
    with Path(path).open("rb") as file:
        text_bytes = int.from_bytes(file.read(8), "little")
        return 8 + text_bytes + int(json.loads(file.read(text_bytes))[name]["data_offsets"][0])


def read_chunks(path) -> list[Captured]:
    """Every chunk of a segment file, read by the safetensors library; copies, not views of it."""
    chunks = []
    with safe_open(path, "pt") as file:
        own = json.loads(file.metadata()["cpr_ext"])
        for index, first, count, step, _ in own["chunks"]:
            table = own["tables"][index]
            rows = slice(first, first + count)
            if "range_begin" not in table:
                row_ids = file.get_tensor(f"{table['name']}/row_ids")[rows].clone()
            else:
                begin = table["range_begin"] + first
                row_ids = torch.arange(begin, begin + count)
            arrays = {
                name: file.get_tensor(f"{table['name']}/{name}")[rows].clone()
                for name, _, _ in own["arrays"][table["arrays"]]
            }
            chunks.append(Captured(table["name"], step, row_ids, arrays))
    return chunks


def row_records(store) -> Iterator[tuple]:
    """(record, path) of every live segment of rows, oldest first."""
    for record in store.manifest.rows:
        yield record, store.path_of(record)


def committed_steps(store: Path) -> list[int]:
    """Of the snapshots that a store names, which may be in use; a new one names none."""
    manifest = store / "MANIFEST.json"
    if not manifest.exists():
        return []
    return [r["last_step"] for r in json.loads(manifest.read_text())["content"]["dense"]]


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Damage one bit of a file."""
    with path.open("rb+", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, position)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), position)


@contextmanager
def flipped(path: Path, position: int, bit: int = 0):
    """Damage one bit of a file inside the block."""
    flip(path, position, bit)
    try:
        yield
    finally:
        flip(path, position, bit)


def run_python(code, *arguments, timeout_seconds=120, returncode=0, is_new=False):
    """Run ``code`` in a process of its own; returns what it printed, fails if it ends otherwise.

    ``is_new``: nothing is imported before.
    """
    here = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n"
    command = ["-c", here + code, *map(str, arguments)]
    options = {"timeout": timeout_seconds, "cwd": "/"}
    if is_new:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    else:
        done = preloaded.run(command, **options)
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout


class Kernel:
    """A fused kernel that changes the rows that a test says: ``kernel.changes(table, row_ids)``."""

    def watch_changes(self, before):
        self.changes = before
        return [self]

    def watch_lookups(self, note):
        return []

    def remove(self):
        self.changes = None
