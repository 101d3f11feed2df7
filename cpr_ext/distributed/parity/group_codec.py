"""Decodes rows, and encodes parity, by XORs over a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, part_held
from cpr_ext.distributed.parity.protocol import PARITY
from cpr_ext.distributed.parity.trade import xor_over_group


class GroupCodec:
    """One member's part in it. All members make the same calls, in the same order.

    Args:
        sizes: by member, the words of each part of its rows.
        note: gets the bytes of each piece that is done.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        sizes: Mapping[int, Sequence[int]],
        own: OwnRows,
        held: HeldParity,
        note: Callable[[int], None],
    ) -> None:
        self._group = group
        self._rank = rank
        self._sizes = sizes
        self._own = own
        self._held = held
        self._note = note

    def words(self, holder: int, member: int) -> int:
        """Return the words of a member's rows whose parity is with ``holder``."""
        return self._sizes[member][part_held(self._group, holder, member)]

    def parity_words(self, holder: int) -> int:
        """Return the words of the parity that a member holds."""
        return max(self.words(holder, rank) for rank in self._group if rank != holder)

    def decode(self, inner: dist.ProcessGroup, lost: int, holder: int) -> None:
        """Decode the rows of ``lost`` whose parity is with ``holder``."""
        part = part_held(self._group, holder, lost)
        xor_over_group(
            inner,
            (0, self.words(holder, lost)),
            self._group.index(lost),
            partial(self._give, holder, lost),
            partial(self._own.write, part),
            self._note,
        )

    def encode(self, inner: dist.ProcessGroup, holder: int, begin: int, end: int) -> None:
        """Encode the words [begin, end) of the parity that a member holds."""
        xor_over_group(
            inner,
            (begin, end),
            self._group.index(holder),
            partial(self._give, holder, None),
            self._take_parity,
            self._note,
        )

    def _give(self, holder: int, lost: int | None, begin: int, words: torch.Tensor) -> None:
        given = protocol.contribution(self._group, self._rank, holder, lost)
        if given == PARITY:
            words.copy_(self._held.words[begin : begin + words.numel()])
        elif given is not None:
            self._own.read(given, begin, words)

    def _take_parity(self, begin: int, words: torch.Tensor) -> None:
        self._held.words[begin : begin + words.numel()].copy_(words)
