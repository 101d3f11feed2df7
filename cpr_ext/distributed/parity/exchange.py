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

from cpr_ext.distributed.collective.torch_private import time_out_of
from cpr_ext.distributed.parity.held_parity import KeptPart
from cpr_ext.distributed.parity.protocol import Soundness
from cpr_ext.errors import PeerLostError

_HEAD = 6  # step, whether deltas say all, words to encode, and the bytes of the own part's pieces
_WORDS, _SIZES, _XORED, _BROADCAST, *_PIECES = range(7)  # tags
# A reduction needs several times as much memory, which its threads keep: 1 MB.
_CHUNK_WORDS = 1 << 17
# gloo reduces in a ring: fair to every link, but a few bytes take as long as half a megabyte.
_DIRECT_WORDS = 1 << 16


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


def gather_numbers(inner: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    """Gather every member's numbers; each gives as many.

    They cross two hops, by way of the first member; gloo's ring needs one for each other member.
    """
    found = torch.zeros(inner.size(), len(numbers), dtype=torch.int64)
    found[inner.rank()] = torch.tensor(numbers, dtype=torch.int64)
    xor_to_root(inner, 0, found)
    broadcast_words(inner, 0, found)
    given: list[list[int]] = found.tolist()
    return given


def exchange(inner: dist.ProcessGroup, step: int, message: Message) -> dict[int, Message]:
    """Send a message; returns those of the other members, of the same step."""
    me, size = inner.rank(), inner.size()
    empty = torch.empty(0, dtype=torch.int64)
    pieces = message.own_part or (empty,) * len(_PIECES)
    flags = int(message.soundness), message.wanted_words
    head = [step, *flags, *(piece.numel() for piece in pieces)]
    sizes = [message.words.get(member, empty).numel() for member in range(size)]
    heads = gather_numbers(inner, [*head, *sizes])
    if any(other[0] != step for other in heads):
        raise RuntimeError(f"members exchange different steps: {[other[0] for other in heads]}")
    received, works = {}, []
    for member, other in enumerate(heads):
        if member == me:
            continue
        words = torch.empty(other[_HEAD + me], dtype=torch.int64)
        works.append(_receive(inner, words, member, _WORDS))
        found = received[member] = Message(Soundness(other[1]), {me: words}, wanted_words=other[2])
        if (member + 1) % size == me and other[3]:
            found.own_part, waits = _receive_part(inner, other[3:_HEAD], member)
            works += waits
    for member in ((me + 1 + number) % size for number in range(size - 1)):
        send_to(inner, member, message)
    _wait_for(inner, works)
    return received


def send_to(inner: dist.ProcessGroup, member: int, message: Message) -> None:
    """Send one member its share of a message."""
    _send(inner, message.words.get(member), member, _WORDS)
    if message.own_part is not None and member == (inner.rank() + 1) % inner.size():
        for piece, tag in zip(message.own_part, _PIECES, strict=True):
            _send(inner, piece, member, tag)


def acknowledge(inner: dist.ProcessGroup) -> None:
    """Wait until all members have called it."""
    with _minding():
        inner.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()


def hand_over(
    inner: dist.ProcessGroup, sender: int, receiver: int, part: KeptPart | None
) -> KeptPart:
    """Pass an own part from one member to another; the others need not call it."""
    if part is not None:
        sizes = torch.tensor([piece.numel() for piece in part])
        for values, tag in zip((sizes, *part), (_SIZES, *_PIECES), strict=True):
            _send(inner, values, receiver, tag)
        return part
    sizes = torch.empty(len(_PIECES), dtype=torch.int64)
    _wait_for(inner, [_receive(inner, sizes, sender, _SIZES)])
    received, works = _receive_part(inner, sizes.tolist(), sender)
    _wait_for(inner, works)
    return received


def xor_over_group(
    inner: dist.ProcessGroup,
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


def xor_to_root(inner: dist.ProcessGroup, root: int, words: torch.Tensor) -> None:
    """XOR the words of all members into those of ``root``; the others' may change, too."""
    if words.numel() <= _DIRECT_WORDS:
        return _xor_directly(inner, root, words)
    options = dist.ReduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.BXOR)
    options.rootRank = root
    with _minding():
        inner.reduce([words], options).wait()


def _xor_directly(inner: dist.ProcessGroup, root: int, words: torch.Tensor) -> None:
    if inner.rank() != root:
        return _send(inner, words, root, _XORED)
    others = [torch.empty_like(words) for _ in range(inner.size() - 1)]
    members = [member for member in range(inner.size()) if member != root]
    works = [_receive(inner, w, m, _XORED) for w, m in zip(others, members, strict=True)]
    for work, other in zip(works, others, strict=True):
        _wait_for(inner, [work])
        words ^= other


def broadcast_words(inner: dist.ProcessGroup, source: int, words: torch.Tensor) -> None:
    """Overwrite the words (n,) of all members by those of ``source``; meant for few."""
    if not words.numel():
        return
    if inner.rank() != source:
        _wait_for(inner, [_receive(inner, words, source, _BROADCAST)])
        return
    members = [member for member in range(inner.size()) if member != source]
    with _minding():
        works = [inner.send([words], member, _BROADCAST) for member in members]
    _wait_for(inner, works)


def _send(inner: dist.ProcessGroup, values: torch.Tensor | None, member: int, tag: int) -> None:
    if values is not None and values.numel():
        with _minding():
            inner.send([values], member, tag).wait(time_out_of(inner))


def _wait_for(inner: dist.ProcessGroup, works: Sequence[dist.Work | None]) -> None:
    """Wait for messages as long as for a collective; gloo's own time-out is that of connecting."""
    time_out = time_out_of(inner)
    with _minding():
        for work in works:
            if work is not None:
                work.wait(time_out)


def _receive_part(
    inner: dist.ProcessGroup, sizes: list[int], member: int
) -> tuple[KeptPart, list[dist.Work | None]]:
    header, content, checksums = (torch.empty(n, dtype=torch.uint8) for n in sizes)
    part = header, content, checksums
    return part, [_receive(inner, p, member, tag) for p, tag in zip(part, _PIECES, strict=True)]


def _receive(
    inner: dist.ProcessGroup, values: torch.Tensor, member: int, tag: int
) -> dist.Work | None:
    with _minding():
        return inner.recv([values], member, tag) if values.numel() else None


@contextmanager
def _minding() -> Iterator[None]:
    """Turn what gloo raises, which a lost member causes, into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        error.with_traceback(None)  # its frames refer to the connections
        raise PeerLostError(f"a member of a parity group was lost: {error}") from error
