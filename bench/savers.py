"""The savers that ours is compared with, each used as its documentation says.

A saver keeps a *state*: named float32 tensors and a step. All elements of a state of step ``s``
equal ``s``, so that what a load gives back says by itself which save it came from
(``reliability.py``). Where only the cost of saving is measured, a state is any named tensors.
"""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

State = dict[str, torch.Tensor]
Wait = Callable[[], None]
NUM_TABLES = 2
DIM = 15


def make_state(num_rows: int) -> State:
    """Weights and one float of optimizer state per row; 64 bytes a row."""
    state = {}
    for table in range(NUM_TABLES):
        state[f"weight.{table}"] = torch.zeros(num_rows, DIM)
        state[f"sum.{table}"] = torch.zeros(num_rows)
    return state


def fill(state: State, step: int) -> None:
    """What training does here: every element becomes ``step``."""
    for tensor in state.values():
        tensor.fill_(step)


def join_group_of_one() -> None:
    """This process is a process group, of itself alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Saver(ABC):
    """One way to save.

    Attributes:
        name: what a user would call it.
        is_async: ``begin`` returns before the save is durable; training may go on meanwhile.
    """

    name: str
    is_async = False

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state

    @abstractmethod
    def begin(self, step: int) -> Wait:
        """Save the state; the function returned comes back once the library calls it saved."""

    @abstractmethod
    def load(self) -> int:
        """Load the newest save into the state; returns its step. Raises if nothing loads."""

    def files(self) -> list[Path]:
        """The files of the newest save."""
        return sorted(p for p in self.folder.rglob("*") if p.is_file() and p.stat().st_size)


class Peer(Saver):
    """A library that saves to a path.

    ``new_paths=False``: always the same path, as in the first example of each documentation.
    ``new_paths=True``: a path per step; the last but one goes only when the next save is done; a
    load takes the newest that loads.
    """

    suffix = ""

    def __init__(self, folder: Path, state: State, *, new_paths: bool) -> None:
        super().__init__(folder, state)
        self._new_paths = new_paths

    def begin(self, step: int) -> Wait:
        path = self.folder / (
            f"step-{step:06d}{self.suffix}" if self._new_paths else f"checkpoint{self.suffix}"
        )
        wait = self._begin(path, step)

        def done() -> None:
            wait()
            if self._new_paths:
                for old in sorted(self.folder.glob(f"step-*{self.suffix}"))[:-2]:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()

        return done

    def load(self) -> int:
        errors = []
        for path in sorted(self.folder.glob(f"*{self.suffix}"), reverse=True):
            try:
                return self._load(path)
            except BaseException as error:  # DCP raises one that is no Exception
                errors.append(f"{path.name}: {type(error).__name__}: {error}")
        raise RuntimeError("; ".join(errors) or "no file")

    @abstractmethod
    def _begin(self, path: Path, step: int) -> Wait: ...

    @abstractmethod
    def _load(self, path: Path) -> int: ...

    def _take(self, loaded: State) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])


class TorchSave(Peer):
    name = "torch.save"
    suffix = ".pt"

    def _begin(self, path: Path, step: int) -> Wait:
        torch.save({"state": self.state, "step": step}, path)
        return lambda: None

    def _load(self, path: Path) -> int:
        loaded = torch.load(path, weights_only=True)
        self._take(loaded["state"])
        return loaded["step"]


class Safetensors(Peer):
    name = "safetensors"
    suffix = ".safetensors"

    def _begin(self, path: Path, step: int) -> Wait:
        from safetensors.torch import save_file

        save_file(self.state, path, metadata={"step": str(step)})
        return lambda: None

    def _load(self, path: Path) -> int:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            self._take({name: file.get_tensor(name) for name in self.state})
            return int(file.metadata()["step"])


class DcpSave(Peer):
    name = "torch.distributed.checkpoint.save"

    def _begin(self, path: Path, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        dcp.save({"state": self.state, "step": step}, checkpoint_id=path)
        return lambda: None

    def _load(self, path: Path) -> int:
        import torch.distributed.checkpoint as dcp

        target = {"state": self.state, "step": -1}
        dcp.load(target, checkpoint_id=path)
        return target["step"]


class DcpAsyncSave(DcpSave):
    name = "torch.distributed.checkpoint.async_save"
    is_async = True

    def __init__(self, folder: Path, state: State, *, new_paths: bool) -> None:
        super().__init__(folder, state, new_paths=new_paths)
        join_group_of_one()  # async_save asks for a CPU backend

    def _begin(self, path: Path, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save({"state": self.state, "step": step}, checkpoint_id=path)
        return lambda: (future.result(), None)[1]


class TorchsnapshotTake(Peer):
    name = "torchsnapshot.Snapshot.take"

    def _begin(self, path: Path, step: int) -> Wait:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(path), {"state": StateDict(**self.state, step=step)})
        return lambda: None

    def _load(self, path: Path) -> int:
        from torchsnapshot import Snapshot, StateDict

        target = StateDict(**self.state, step=-1)
        Snapshot(str(path)).restore({"state": target})
        self._take({name: target[name] for name in self.state})
        return target["step"]


class TorchsnapshotAsyncTake(TorchsnapshotTake):
    name = "torchsnapshot.Snapshot.async_take"
    is_async = True

    def _begin(self, path: Path, step: int) -> Wait:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(path), {"state": StateDict(**self.state, step=step)})
        return lambda: (pending.wait(), None)[1]


class CprExt(Saver):
    """Ours: a Checkpointer; the first save is a base snapshot, the next ones partial."""

    name = "cpr_ext"
    is_async = True

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import cpr_ext
        from cpr_ext.saving import background_capture

        model = nn.Module()
        tables = [nn.EmbeddingBag(*state["weight.0"].shape) for _ in range(NUM_TABLES)]
        model.tables = nn.ModuleList(tables)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for index, table in enumerate(tables):
            table.weight.data = state[f"weight.{index}"]
            optimizer.state[table.weight]["sum"] = state[f"sum.{index}"]
        self.state = state
        self._all_rows = torch.arange(state["weight.0"].shape[0])
        background_capture.OVERLAP_BYTES = sys.maxsize  # fill() writes to the tables by hand
        self._checkpointer = cpr_ext.Checkpointer(
            model,
            optimizer,
            folder / "store",
            priority=cpr_ext.AllRows(),
            schedule=cpr_ext.EverySteps(1),
            num_shards=2,
        )
        self._optimizer, self._tables = optimizer, tables

    def begin(self, step: int) -> Wait:
        for index in range(NUM_TABLES):
            with self._checkpointer.writing_rows(f"tables.{index}", self._all_rows):
                pass
        self._checkpointer.step()
        assert self._checkpointer.step_count == step
        return lambda: (self._checkpointer.wait(), None)[1]

    def load(self) -> int:
        report = self._checkpointer.recover()
        if report.step == 0 and not report.segments_read:
            raise RuntimeError("the store is empty")
        if report.damaged_segments:
            raise RuntimeError(f"damage found: {report.damaged_segments[0].reason}")
        for index, table in enumerate(self._tables):
            self.state[f"weight.{index}"] = table.weight.data
            self.state[f"sum.{index}"] = self._optimizer.state[table.weight]["sum"]
        return report.step


class CprExtSync(CprExt):
    name = "cpr_ext, waiting for each save"
    is_async = False


PEERS: tuple[type[Peer], ...] = (
    TorchSave,
    Safetensors,
    DcpSave,
    DcpAsyncSave,
    TorchsnapshotTake,
    TorchsnapshotAsyncTake,
)
MODULES = (
    "cpr_ext.checkpointer",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torchsnapshot",
)
