"""The connections of a parity group, in one round after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from cpr_ext.distributed.collective.process_group import ReformableGroup, Round
from cpr_ext.distributed.parity.placement import Group
from cpr_ext.errors import PeerLostError


class GroupConnections:
    """Connects the members of a group; of a round that is over, nothing refers to them.

    Args:
        number: of the group.
        rank: of this worker.
    """

    def __init__(self, number: int, group: Group, rank: int) -> None:
        self._name = f"parity-{number}"
        self._group = group
        self._me = group.index(rank)
        self._network: ReformableGroup | None = None
        self._inner: dist.ProcessGroup | None = None
        self._round = 0

    @property
    def inner(self) -> dist.ProcessGroup:
        """Those of this round."""
        assert self._inner is not None
        return self._inner

    def connect(self, this_round: Round) -> dist.ProcessGroup:
        """Connect the group in a new round; all its members call it.

        Raises:
            PeerLostError: not all did.
        """
        if self._network is None:
            self._network = ReformableGroup(self._me, len(self._group), self._name)
        self._round += 1
        self._network.configure(this_round)
        self._inner = self._network.connect()
        return self._inner

    def release(self) -> None:
        """Close them."""
        self._release(self._round)

    def releasing(self) -> Callable[[], None]:
        """Return what closes those of this round, whenever it is called; from any thread."""
        return partial(self._release, self._round)

    def interrupt(self, of_round: Round) -> None:
        """Close those of a round; called from any thread."""
        if self._network is not None:
            self._network.interrupt(of_round)

    @contextmanager
    def minding(self) -> Iterator[None]:
        """Turn what a lost member causes into PeerLostError."""
        try:
            yield
        except RuntimeError as error:
            error.with_traceback(None)  # its frames refer to the connections
            raise PeerLostError(f"parity group {list(self._group)}: {error}") from error

    def _release(self, of_round: int) -> None:
        if of_round == self._round and self._network is not None:
            self._inner = None
            self._network.abort()
