"""The protocol of parity: what a worker may do when, and what workers agree on after a loss.

Pure functions and values. A test explores them in every interleaving
(``python_tests/distributed/parity/exploration.py``); the running code calls the same ones.

A *state* is a number of completed steps. Deltas belong to every ``stride``-th step: that of step
``n`` leads from state ``n - stride`` to ``n``. XORed again it leads back, so it must be applied
exactly once and in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from cpr_ext.distributed.parity.placement import Group, holders, part_held

# Newest deltas that everyone keeps: a survivor may be two ahead of the rows of a lost worker.
DEPTH = 2
PARITY = -1  # in place of a part: what the holder's own parity buffer contributes


class ProtocolError(AssertionError):
    """A bug: a delta out of order, or a way back that is not there."""


@dataclass(frozen=True)
class Log:
    """Deltas that were applied and are kept.

    Attributes:
        newest: the state that they lead to.
        oldest: the state to which they lead back.
        stride: steps from one delta to the next.
    """

    newest: int
    oldest: int
    stride: int = 1

    @property
    def next(self) -> int:
        """The step of the next delta."""
        return self.newest + self.stride


def begin(state: int, stride: int = 1) -> Log:
    """Return the log of rows, or of parity, that was just made."""
    return Log(state, state, stride)


def append(log: Log, step: int) -> Log:
    """Return the log with the delta of ``step``, the next one; forget the oldest."""
    if step != log.next:
        raise ProtocolError(f"the delta of step {step} came after that of step {log.newest}")
    return Log(step, max(log.oldest, step - DEPTH * log.stride), log.stride)


def undo_order(log: Log, state: int) -> list[int]:
    """Return the steps whose deltas lead back to ``state``, in order of application."""
    if not log.oldest <= state <= log.newest or (log.newest - state) % log.stride:
        raise ProtocolError(f"no way back to state {state} from {log}")
    return list(range(log.newest, state, -log.stride))


def state_of_parity(held: Mapping[int, Log]) -> int | None:
    """Return the state of which a holder's parity is; None: members' deltas in it differ.

    Rows that are rebuilt during training are decoded from parity of one state, and from peers' rows
    of the same state. :func:`undo_order` leads these back to it.
    """
    states = {log.newest for log in held.values()}
    return states.pop() if len(states) == 1 else None


def undone(log: Log, step: int) -> Log:
    """Return the log without the delta of ``step``, its newest."""
    if step != log.newest or step <= log.oldest:
        raise ProtocolError(f"the delta of step {step} cannot be taken back from {log}")
    return Log(step - log.stride, log.oldest, log.stride)


def may_change(own: Log, acknowledged: int) -> bool:
    """Return whether a worker may change rows: all holders have all completed deltas."""
    return acknowledged >= own.newest


def may_acknowledge(held: Mapping[int, Log], step: int) -> bool:
    """Return whether a holder may confirm the deltas of ``step`` of all members."""
    return all(log.newest >= step for log in held.values())


class Soundness(IntEnum):
    """Whether a worker's deltas say all that changed.

    ``SOUND``: they do. ``UNSOUND``: something else changed rows. ``ACCEPTED``: it did, and the
    worker counts its rows as they are: parity that is encoded now has them.
    """

    UNSOUND = 0
    SOUND = 1
    ACCEPTED = 2


def soundness(obstacle: str, *, wants_encoding: bool) -> Soundness:
    """Return the soundness of a worker's deltas."""
    if obstacle:
        return Soundness.UNSOUND
    return Soundness.ACCEPTED if wants_encoding else Soundness.SOUND


def encodes_again(members: Sequence[Soundness]) -> bool:
    """Return whether a group encodes its parity from the rows as they are now."""
    return Soundness.ACCEPTED in members and Soundness.UNSOUND not in members


@dataclass(frozen=True)
class Report:
    """What a worker says of itself when workers have met.

    Attributes:
        own: of its rows; None: it has lost them.
        held: by member, of the parity that it holds; empty: that is not encoded.
        obstacle: why its deltas do not say all that changed; empty: they do.
    """

    own: Log | None
    held: Mapping[int, Log] = field(default_factory=dict)
    obstacle: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        own = None if self.own is None else astuple(self.own)
        held = [[member, *astuple(log)] for member, log in self.held.items()]
        return {"own": own, "held": held, "obstacle": self.obstacle}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Report:
        """Invert :meth:`to_plain`."""
        own = None if plain["own"] is None else Log(*plain["own"])
        return cls(own, {member: Log(*log) for member, *log in plain["held"]}, plain["obstacle"])


@dataclass(frozen=True)
class Verdict:
    """What workers agree on.

    Attributes:
        state: the one to which all return; None: parity does not suffice.
        obstacle: why it does not.
        groups: whose lost rows are rebuilt, if not all groups' are.
    """

    state: int | None
    obstacle: str = ""
    groups: tuple[Group, ...] = ()


def agree_on_rows(reports: Sequence[Report], groups: Sequence[Group]) -> Verdict:
    """Return which groups can rebuild their lost rows, and the newest state of which all can.

    A group whose parity does not suffice keeps no other from its own.
    """
    with_a_loss = [group for group in groups if any(reports[rank].own is None for rank in group)]
    alone = {group: agree_on_state(reports, [group]) for group in with_a_loss}
    able = tuple(group for group, verdict in alone.items() if verdict.state is not None)
    obstacle = next((each.obstacle for each in alone.values() if each.state is None), "")
    if not able:
        return Verdict(None, obstacle)
    together = agree_on_state(reports, able)
    if together.state is None:
        return together
    return Verdict(together.state, obstacle, able)


def agree_on_state(reports: Sequence[Report], groups: Sequence[Group]) -> Verdict:
    """Return the newest state that every worker can reach, lost ones by peers' parity.

    Args:
        groups: whose members must reach it.
    """
    if all(report.own is None for report in reports):
        return Verdict(None, "no worker kept its rows")
    for group in groups:
        missing = [rank for rank in group if reports[rank].own is None]
        if len(missing) > 1:
            return Verdict(None, f"workers {missing} of one parity group were lost together")
        for holder in group:
            if missing and holder not in missing and not reports[holder].held:
                return Verdict(None, f"the parity on worker {holder} was not complete")
    ranks = sorted(rank for group in groups for rank in group)
    for rank in ranks:
        if reports[rank].obstacle:
            return Verdict(None, f"worker {rank}: {reports[rank].obstacle}")
    logs = [log for rank in ranks for log in _logs(reports[rank])]
    state = min(log.newest for log in logs)
    if state < max(log.oldest for log in logs):
        return Verdict(None, f"not every worker can return to step {state}")
    return Verdict(state)


def _logs(report: Report) -> list[Log]:
    return [] if report.own is None else [report.own, *report.held.values()]


def to_decode(lost: Sequence[int], group: Group) -> list[tuple[int, int]]:
    """Return a group's lost parts in order: for each its worker and its parity's holder."""
    return [(rank, holder) for rank in group if rank in lost for holder in holders(group, rank)]


def to_encode(reports: Sequence[Report], group: Group) -> list[int]:
    """Return the members of a group whose parity must be encoded, in order."""
    return [rank for rank in group if not reports[rank].held]


class Piece(NamedTuple):
    """Words [begin, end) of what a group has to XOR, around the parity of one holder.

    Attributes:
        lost: the worker whose part is decoded; None: the parity itself is encoded.
    """

    holder: int
    lost: int | None
    begin: int
    end: int


def cut_off(pieces: Sequence[Piece], num_words: int) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of the next ``num_words`` words, in order, and those that are left."""
    now, left = [], list(pieces)
    while num_words > 0 and left:
        piece = left.pop(0)
        stop = min(piece.end, piece.begin + num_words)
        num_words -= stop - piece.begin
        now.append(piece._replace(end=stop))
        if stop < piece.end:
            left.insert(0, piece._replace(begin=stop))
    return now, left


def contribution(group: Group, rank: int, holder: int, lost: int | None) -> int | None:
    """Return what ``rank`` gives to an XOR over the group around the parity of ``holder``.

    Args:
        lost: the worker whose part is decoded; None: the parity itself is encoded.

    Returns:
        A part of its shard, ``PARITY``, or None for nothing.
    """
    if rank == holder:
        return None if lost is None else PARITY
    return None if rank == lost else part_held(group, holder, rank)
