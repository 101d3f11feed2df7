"""What members of a parity group send each other; each call is made by all members.

Members are numbered in their group here. Everything crosses as numbers and raw bytes. Each call
raises PeerLostError if a member is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cpr_ext.distributed.collective.process_group import Members
from cpr_ext.distributed.parity.held_parity import KeptPart
from cpr_ext.distributed.parity.protocol import Soundness
from cpr_ext.errors import PeerLostError

_HEAD = 6  # step, whether deltas say all, words to encode, and the bytes of the own part's pieces
# A reduction needs several times as much memory, which its threads keep: 1 MB.
_CHUNK_WORDS = 1 << 17
# gloo reduces in a ring: fair to every link, but a few bytes take as long as half a megabyte.
_DIRECT_WORDS = 1 << 16
_NO_WORDS, _NO_BYTES = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)


@dataclass
class Message:
    """What one member sends for a step.

    Attributes:
        soundness: whether the deltas say all that changed.
        words: by member, a delta.
        wanted_words: of parity, which may be encoded in this step.
        own_part: for the next member, which keeps it; None: nothing.
    """

    soundness: Soundness
    words: dict[int, torch.Tensor]
    own_part: KeptPart | None = None
    wanted_words: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that it sends."""
        return sum(values.nbytes for values in (*self.words.values(), *(self.own_part or ())))


def trade(
    inner: Members, given: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Send each member its values (n,), of one dtype; returns what each has sent.

    Args:
        sizes: by member, how many values it sends to this one.
    """
    found, counts = given[0].new_empty(sum(sizes)), [values.numel() for values in given]
    with _minding():
        options = dist.AllToAllOptions()
        inner.alltoall_base(found, torch.cat(list(given)), list(sizes), counts, options).wait()
    return list(torch.split(found, list(sizes)))


def gather_numbers(inner: Members, numbers: list[int]) -> list[list[int]]:
    """Gather every member's numbers; each gives as many."""
    size = inner.size()
    own = torch.tensor(numbers, dtype=torch.int64)
    return [values.tolist() for values in trade(inner, [own] * size, [len(numbers)] * size)]


def exchange(inner: Members, step: int, message: Message) -> dict[int, Message]:
    """Send a message; returns those of the other members, of the same step."""
    me, size = inner.rank(), inner.size()
    pieces = message.own_part or (_NO_BYTES,) * 3
    flags = int(message.soundness), message.wanted_words
    words = [message.words.get(member, _NO_WORDS) for member in range(size)]
    head = [step, *flags, *(piece.numel() for piece in pieces)]
    heads = gather_numbers(inner, [*head, *(some.numel() for some in words)])
    if any(other[0] != step for other in heads):
        raise RuntimeError(f"members exchange different steps: {[other[0] for other in heads]}")
    found = trade(inner, words, [other[_HEAD + me] for other in heads])
    received = {
        member: Message(Soundness(other[1]), {me: found[member]}, wanted_words=other[2])
        for member, other in enumerate(heads)
        if member != me
    }
    if any(other[3] for other in heads):
        before = (me - 1) % size
        part = _pass_part(inner, {(me + 1) % size: pieces}, {before: heads[before][3:_HEAD]})
        received[before].own_part = part if heads[before][3] else None
    return received


def _pass_part(
    inner: Members, given: dict[int, KeptPart], sizes: dict[int, list[int]]
) -> KeptPart | None:
    """Send own parts to members; returns what comes from one, of whose pieces the sizes are."""
    own = [_NO_BYTES] * inner.size()
    for member, part in given.items():
        own[member] = torch.cat(part[::-1])  # checksums are first: they are read as words
    found = trade(inner, own, [sum(sizes.get(member, ())) for member in range(inner.size())])
    for member, of_it in sizes.items():
        checksums, content, header = torch.split(found[member], of_it[::-1])
        return header, content, checksums
    return None


def acknowledge(inner: Members) -> None:
    """Wait until all members have called it."""
    with _minding():
        inner.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()


def hand_over(inner: Members, sender: int, receiver: int, part: KeptPart | None) -> KeptPart | None:
    """Pass an own part from one member to another, to which it is returned."""
    sizes = torch.tensor([piece.numel() for piece in part or (_NO_BYTES,) * 3])
    broadcast_words(inner, sender, sizes)
    is_receiver = inner.rank() == receiver
    given = {} if part is None else {receiver: part}
    return _pass_part(inner, given, {sender: sizes.tolist()} if is_receiver else {})


def xor_over_group(
    inner: Members,
    words_range: tuple[int, int],
    root: int,
    give: Callable[[int, torch.Tensor], None],
    take: Callable[[int, torch.Tensor], None],
    note: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """XOR what all members give, in pieces.

    Args:
        words_range: from the first word's place to the end.
        root: the member that takes the result.
        give: fills in this member's words from a place on; they are zero before.
        take: is given the result, with its place.
        note: gets the bytes of each piece that is done.
    """
    buffer = torch.empty(
        max(0, min(_CHUNK_WORDS, words_range[1] - words_range[0])), dtype=torch.int64
    )
    for begin in range(*words_range, _CHUNK_WORDS):
        words = buffer[: words_range[1] - begin].zero_()
        give(begin, words)
        xor_to_root(inner, root, words)
        if inner.rank() == root:
            take(begin, words)
        note(words.nbytes)


def xor_to_root(inner: Members, root: int, words: torch.Tensor) -> None:
    """XOR the words of all members into those of ``root``; the others' may change, too."""
    if words.numel() <= _DIRECT_WORDS:
        return _xor_directly(inner, root, words)
    options = dist.ReduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.BXOR)
    options.rootRank = root
    with _minding():
        inner.reduce([words], options).wait()


def _xor_directly(inner: Members, root: int, words: torch.Tensor) -> None:
    me, members = inner.rank(), range(inner.size())
    given = [words if member == root != me else _NO_WORDS for member in members]
    for other in trade(inner, given, [words.numel() * (me == root != m) for m in members]):
        if other.numel():
            words ^= other


def broadcast_words(inner: Members, source: int, words: torch.Tensor) -> None:
    """Overwrite the words (n,) of all members by those of ``source``; meant for few."""
    me, members = inner.rank(), range(inner.size())
    given = [words.view(-1) if me == source != member else _NO_WORDS for member in members]
    found = trade(inner, given, [words.numel() * (m == source != me) for m in members])
    if me != source:
        words.copy_(found[source].view_as(words))


@contextmanager
def _minding() -> Iterator[None]:
    """Turn what gloo raises, which a lost member causes, into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a member of a parity group was lost: {error}") from error
