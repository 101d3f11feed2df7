"""Decodes rows, and encodes parity, by XORs over a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from cpr_ext.distributed.collective.process_group import Members
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.exchange import xor_over_group, xor_to_root
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, holders, part_held
from cpr_ext.distributed.parity.protocol import PARITY, Piece


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

    def to_encode(self, holder: int) -> Piece:
        """Return all of the parity that a member holds."""
        return Piece(holder, None, 0, self.parity_words(holder))

    def run(self, inner: Members, piece: Piece, state: int) -> None:
        """Decode or encode a piece; parity and rows are those of ``state``."""
        root = piece.holder if piece.lost is None else piece.lost
        take = self._take_parity
        if piece.lost is not None:
            take = partial(self._own.write, part_held(self._group, piece.holder, piece.lost))
        xor_over_group(
            inner,
            (piece.begin, piece.end),
            self._group.index(root),
            partial(self._give, piece, state),
            take,
            self._note,
        )

    def decode_rows(
        self, inner: Members, lost: int, request: torch.Tensor, state: int
    ) -> torch.Tensor:
        """Decode single rows of ``lost``; what the others get is of no use.

        Args:
            request: for each part with such rows its number, the words of a row, how many rows,
                and their places. A place is a word of the part; they are ascending.
            state: of parity and rows.

        Returns:
            The words of the rows, one after the other.
        """
        given, at, numbers = [], 0, request.tolist()
        while at < len(numbers):
            part, width, count = numbers[at : at + 3]
            places = request[at + 3 : at + 3 + count]
            given.append(
                self._give_rows(holders(self._group, lost)[part], lost, places, width, state)
            )
            at += 3 + count
        words = torch.cat(given)
        xor_to_root(inner, self._group.index(lost), words)
        return words

    def _give(self, piece: Piece, state: int, begin: int, words: torch.Tensor) -> None:
        given = protocol.contribution(self._group, self._rank, piece.holder, piece.lost)
        if given == PARITY:
            words.copy_(self._held.words[begin : begin + words.numel()])
        elif given is not None:
            self._own.read(state, given, begin, words)

    def _give_rows(
        self, holder: int, lost: int, places: torch.Tensor, width: int, state: int
    ) -> torch.Tensor:
        given = protocol.contribution(self._group, self._rank, holder, lost)
        if given is None:
            return torch.zeros(places.numel() * width, dtype=torch.int64)
        if given == PARITY:
            return self._held.words[(places.unsqueeze(1) + torch.arange(width)).view(-1)]
        return self._own.gather(state, given, places, width)

    def _take_parity(self, begin: int, words: torch.Tensor) -> None:
        self._held.words[begin : begin + words.numel()].copy_(words)
