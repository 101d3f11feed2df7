"""Parity that is encoded in ranges, between the steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from cpr_ext.distributed.parity.group_codec import GroupCodec

_LEAST_WORDS = 1 << 10  # of a range: a slow clock must not stop it


class BackgroundEncoding:
    """What a group has to encode yet; its members take the same ranges at the same steps.

    A range is encoded when all members have completed a step and none may change rows. Deltas are
    applied to all of the parity from the beginning: they keep ranges up to date that are encoded,
    and the others are overwritten.

    Args:
        holders: whose parity is encoded, one after the other.
        bytes_per_second: of the XORs over the group.
        done: called once all is encoded.
    """

    def __init__(
        self,
        codec: GroupCodec,
        holders: Sequence[int],
        bytes_per_second: int,
        done: Callable[[], None],
    ) -> None:
        self._codec = codec
        self._left = [(holder, 0, codec.parity_words(holder)) for holder in holders]
        self._words_per_second = bytes_per_second / 8
        self._done = done
        self._since = time.perf_counter()

    def wanted_words(self) -> int:
        """Return how many words may be encoded now, by this member's clock."""
        since, self._since = self._since, time.perf_counter()
        return max(_LEAST_WORDS, int(self._words_per_second * (self._since - since)))

    def encode(self, inner: dist.ProcessGroup, num_words: int) -> bool:
        """Encode as many words; return whether any are left.

        Args:
            num_words: the least that a member wants, so that all encode the same.
        """
        while num_words > 0 and self._left:
            holder, begin, end = self._left.pop(0)
            stop = min(end, begin + num_words)
            self._codec.encode(inner, holder, begin, stop)
            num_words -= stop - begin
            if stop < end:
                self._left.insert(0, (holder, stop, end))
        if not self._left:
            self._done()
        return bool(self._left)
