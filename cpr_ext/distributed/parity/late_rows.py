"""Rows of a lost worker that its group decodes during training."""

from __future__ import annotations

import torch

from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, part_held
from cpr_ext.distributed.parity.protocol import Piece
from cpr_ext.distributed.parity.row_requests import RowRequest, describe_rows
from cpr_ext.distributed.parity.sender import Sender
from cpr_ext.errors import PeerLostError


class LateRows:
    """Has the group decode rows of one worker when it needs them, and checks what was decoded.

    Args:
        rank: of the worker.

    Attributes:
        sender: of this round; None: it has not begun, or has ended.
        own: the worker's rows.
        was_bypassed: something read missing rows past the tables' modules.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self.sender: Sender | None = None
        self.own: OwnRows
        self.was_bypassed = False
        self._group = group
        self._rank = rank

    def attach(self, own: OwnRows) -> None:
        """Follow the rows of a new job."""
        self.own = own
        own.missing.note_bypassed = self._note_bypassed

    def fetch(self, number: int, row_ids: torch.Tensor) -> None:
        """Have the group decode missing rows (n,) of the table at a position.

        Raises:
            PeerLostError: a peer was lost, or the round has ended.
        """
        missing = self.own.missing
        if self.sender is None:
            raise PeerLostError(f"parity group {list(self._group)}: the round has ended")
        places = missing.places(number, row_ids)

        def take(words: torch.Tensor) -> None:
            self.own.layout.scatter(places, words)
            missing.note_rows(number, row_ids)

        described = describe_rows(self.own.bounds, places, missing.width(number))
        self.sender.fetch(RowRequest(described, take))

    def complete(self) -> None:
        """Return once all rows are there.

        Raises:
            PeerLostError: a peer was lost, or the rebuilt rows are wrong.
        """
        if self.own.missing.is_any and self.sender is not None:
            self.sender.fetch(RowRequest(None))

    def may_save(self, waits: bool) -> bool:
        """Return whether all rows are there for a snapshot; ``waits``: see to it that they are."""
        if waits:
            self.complete()
        return not self.own.missing.is_any

    def check(self, piece: Piece, *, is_last: bool) -> None:
        """Compare rows that were decoded with their checksums; what is wrong is an obstacle."""
        own, missing = self.own, self.own.missing
        end = own.layout.num_words if is_last else self.words_of(piece)[1]
        own.find_wrongly_rebuilt(missing.below, end)
        if not own.obstacle:
            missing.below = end
            if is_last:
                missing.end()

    def words_of(self, piece: Piece) -> tuple[int, int]:
        """Return the words of the worker's shard of which a piece is."""
        first = self.own.bounds[part_held(self._group, piece.holder, self._rank)]
        return first + piece.begin, first + piece.end

    def _note_bypassed(self) -> None:
        self.was_bypassed = True
