"""Rows and parity that a group makes good in ranges, between the steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cpr_ext.distributed.collective.process_group import Members
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.group_codec import GroupCodec
from cpr_ext.distributed.parity.protocol import Piece

_LEAST_WORDS = 1 << 10  # of a range: a slow clock must not stop it


class BackgroundEncoding:
    """What a group has to decode and encode yet; its members take the same ranges at the same time.

    A range is made when all members have completed a step, from the rows and the parity of that
    state. Deltas are applied to all of the parity from the beginning: they keep ranges up to date
    that are encoded, and the others are overwritten.

    Args:
        pieces: one after the other; those of a lost worker first.
        bytes_per_second: of the XORs over the group.
        decoded: called after each range of lost rows, with whether it was the last one.
        done: called once all is made.

    Attributes:
        codec: what makes it.
    """

    def __init__(
        self,
        codec: GroupCodec,
        pieces: Sequence[Piece],
        bytes_per_second: int,
        done: Callable[[], None],
        decoded: Callable[[Piece, bool], None] = lambda piece, is_last: None,
    ) -> None:
        self.codec = codec
        self._left = list(pieces)
        self._words_per_second = bytes_per_second / 8
        self._done = done
        self._decoded = decoded
        self._since = time.perf_counter()

    @property
    def lost(self) -> int | None:
        """The worker whose rows are decoded next; None: only parity is left."""
        return self._left[0].lost if self._left else None

    @property
    def words_left(self) -> int:
        """How many words are left."""
        return sum(piece.end - piece.begin for piece in self._left)

    def wanted_words(self) -> int:
        """Return how many words may be made now, by this member's clock."""
        since, self._since = self._since, time.perf_counter()
        return max(_LEAST_WORDS, int(self._words_per_second * (self._since - since)))

    def encode(self, inner: Members, num_words: int, state: int) -> bool:
        """Decode or encode as many words; return whether any are left.

        Args:
            num_words: the least that a member wants, so that all make the same.
            state: the one from which they are made.
        """
        now, later = protocol.cut_off(self._left, num_words)
        for number, piece in enumerate(now):
            self.codec.run(inner, piece, state)
            left = [*now[number + 1 :], *later]
            if piece.lost is not None:
                self._decoded(piece, all(other.lost is None for other in left))
            self._left = left  # last, as a thread may wait for it
        if not self._left:
            self._done()
        return bool(self._left)
