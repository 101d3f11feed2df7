"""Requests of a worker that is rebuilt during training: which rows its group decodes now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from cpr_ext.distributed.collective.process_group import Members
from cpr_ext.distributed.parity.exchange import broadcast_words

# Heads in place of the number of words that follow.
_STEP_IS_COMPLETE, _EVERYTHING = -2, -1
_SHORT_WORDS = 1 << 10  # of a request, which follow its head at once


@dataclass(eq=False)
class RowRequest:
    """What the lost worker needs before it can train on.

    Attributes:
        words: see ``GroupCodec.decode_rows``; None: everything that is left.
        take: gets the words of the rows, on the sender's thread.
    """

    words: torch.Tensor | None
    take: Callable[[torch.Tensor], None] = lambda words: None


NOTHING_YET = RowRequest(torch.empty(0, dtype=torch.int64))


def describe_rows(bounds: Sequence[int], places: torch.Tensor, width: int) -> torch.Tensor:
    """Return the request of rows for ``GroupCodec.decode_rows``.

    Args:
        bounds: of the shard's parts, in words.
        places: the words of the shard at which rows (n,) begin, ascending.
        width: words of a row.
    """
    firsts = torch.searchsorted(places, torch.tensor(bounds)).tolist()
    blocks = []
    for part, (first, last) in enumerate(pairwise(firsts)):
        if first < last:
            blocks.append(torch.tensor([part, width, last - first]))
            blocks.append(places[first:last] - bounds[part])
    return torch.cat(blocks)


def exchange_request(inner: Members, source: int, request: RowRequest | None) -> RowRequest | None:
    """Return the request of member ``source`` on all members; None: it has completed its step.

    Args:
        request: of this member; the others' is not looked at.
    """
    head = _STEP_IS_COMPLETE
    message = torch.zeros(1 + _SHORT_WORDS, dtype=torch.int64)
    if request is not None:
        head = _EVERYTHING if request.words is None else request.words.numel()
        if request.words is not None and head <= _SHORT_WORDS:
            message[1 : 1 + head] = request.words
    message[0] = head
    broadcast_words(inner, source, message)
    head = int(message[0])
    if head == _STEP_IS_COMPLETE:
        return None
    if inner.rank() != source:
        words = message[1 : 1 + max(0, head)].clone()
        if head > _SHORT_WORDS:
            words = torch.empty(head, dtype=torch.int64)
        request = RowRequest(None if head == _EVERYTHING else words)
    assert request is not None
    if head > _SHORT_WORDS and request.words is not None:
        broadcast_words(inner, source, request.words)
    return request
