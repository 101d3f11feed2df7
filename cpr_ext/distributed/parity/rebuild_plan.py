"""Which rows of a lost worker are rebuilt before training resumes, and which during it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpr_ext.distributed.parity.exchange import broadcast_words
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, holders
from cpr_ext.distributed.parity.protocol import Piece

_FIELDS = len(Piece._fields)


def pieces_of(group: Group, lost: int, own: OwnRows) -> list[list[Piece]]:
    """Return the pieces to decode before and during training, each in ascending order.

    Tables whose lookups cannot wait come before; if no row is missing, all do.
    """
    missing = own.missing
    if not missing.is_any:
        return [_pieces_within(group, lost, own, 0, own.layout.num_words), []]
    pieces: list[list[Piece]] = [[], []]
    for number in range(len(own.layout.records)):
        waits = missing.is_served(number)
        pieces[waits] += _pieces_within(group, lost, own, *missing.span(number))
    if not pieces[True]:
        missing.end()
    return pieces


def note_decoded_first(own: OwnRows) -> None:
    """Note that the rows are there that are decoded before training, and no others."""
    if own.missing.is_any:
        for number in range(len(own.layout.records)):
            if not own.missing.is_served(number):
                own.missing.note_table(number)


def exchange_pieces(
    inner: dist.ProcessGroup, source: int, pieces: list[list[Piece]]
) -> list[list[Piece]]:
    """Return the pieces that member ``source`` gives, on all members."""
    counts = torch.tensor([len(some) for some in pieces])
    broadcast_words(inner, source, counts)
    numbers = torch.tensor([piece for some in pieces for piece in some], dtype=torch.int64)
    if inner.rank() != source:
        numbers = torch.empty(int(counts.sum()), _FIELDS, dtype=torch.int64)
    if numbers.numel():
        broadcast_words(inner, source, numbers)
    found = [Piece(*values) for values in numbers.tolist()]
    before = int(counts[0])
    return [found[:before], found[before:]]


def _pieces_within(group: Group, lost: int, own: OwnRows, begin: int, end: int) -> list[Piece]:
    """Return the words [begin, end) of the shard, cut by the holders of their parity."""
    found = []
    bounds = zip(holders(group, lost), own.bounds, own.bounds[1:], strict=False)
    for holder, first, last in bounds:
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            found.append(Piece(holder, lost, start - first, stop - first))
    return found
