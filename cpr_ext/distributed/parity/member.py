"""One worker's part in its parity group, over all rounds of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.process_group import Members, ReformableGroup, Round
from cpr_ext.distributed.collective.recovery_decision import Encode, Rebuild
from cpr_ext.distributed.identity.worker_identity import LOCAL_WORLD_SIZE, Identity
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.encoding import BackgroundEncoding
from cpr_ext.distributed.parity.exchange import (
    Message,
    broadcast_words,
    exchange,
    gather_numbers,
    hand_over,
)
from cpr_ext.distributed.parity.group_codec import GroupCodec
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, holders, hosts_by_count, part_held, place
from cpr_ext.distributed.parity.protection import Protection
from cpr_ext.distributed.parity.protocol import Piece, Report, Soundness
from cpr_ext.distributed.parity.refusals import refuse_unprotected, require_memory
from cpr_ext.distributed.parity.row_requests import RowRequest, describe_rows
from cpr_ext.distributed.parity.sender import Sender
from cpr_ext.errors import PeerLostError, WorkersDifferError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.metrics import ParityMetrics
from cpr_ext.state.dense_state import DensePart

logger = logger_of("parity")

# Of parity that is encoded again because rows changed, unless the options say another rate.
_BYTES_PER_SECOND_AGAIN = 100_000_000


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


def exchange_pieces(inner: Members, source: int, pieces: list[list[Piece]]) -> list[list[Piece]]:
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


class ParityMember:
    """Protects the rows of one worker, and holds parity of others'.

    Attributes:
        groups: all parity groups of the job.
        nodes: of the ranks of its own.
        values: the caller's, of the state that was returned to or rebuilt last.
        has_spoiled_rows: it lost its rows, and a rebuild of them did not end.

    Raises:
        UsageError: the groups do not fit the job.
    """

    def __init__(self, identity: Identity, parity: Parity) -> None:
        per_host = int(os.environ.get(LOCAL_WORLD_SIZE) or 1)
        hosts = parity.hosts or hosts_by_count(identity.world_size, per_host)
        self.groups = place(identity.world_size, parity.group_size, hosts)
        self._rank = identity.rank
        number = next(n for n, group in enumerate(self.groups) if identity.rank in group)
        self._group = self.groups[number]
        self._parity = parity
        self._metrics = ParityMetrics()
        self._protection = Protection(identity.rank, self._group, self._metrics)
        self._own_rebuild = (0, 0.0)  # how many rows of this worker, and since when
        me = self._group.index(identity.rank)
        self._network = ReformableGroup(me, len(self._group), f"parity-{number}")
        self._late = LateRows(self._group, identity.rank)
        self._obstacle = ""  # why a rebuild failed; it outlives the job that was being rebuilt
        self._held = HeldParity(parity.every_steps)
        self._later: list[Piece] = []  # lost rows that are decoded during training
        self._serves = False  # lookups wait for missing rows while training
        self.values: dict[str, Any] = {}
        self.has_spoiled_rows = False

    def attach(self, checkpointer: Checkpointer) -> None:
        """Protect the tables of a Checkpointer, from the first :meth:`begin` on.

        Raises:
            UsageError: a table cannot be protected, or memory does not suffice.
        """
        refuse_unprotected(checkpointer.tables, self._parity)
        require_memory(checkpointer.tables, self._parity)
        self._held.forget()
        self.has_spoiled_rows = False
        checkpointer.metrics.parity = self._metrics
        checkpointer.session.events.may_begin.append(self._late.may_save)
        self._own = OwnRows(
            checkpointer,
            parts=len(self._group) - 1,
            delta_bytes=self._parity.delta_bytes,
            wait=self.wait_until_rows_may_change,
            stride=self._parity.every_steps,
            fetch=None if self._parity.rebuild_bytes_per_second is None else self._late.fetch,
        )
        self._late.attach(self._own)

    def report(self, *, is_live: bool) -> Report:
        """Report this worker's state when workers have met."""
        if not is_live:
            return Report(None, {}, self._obstacle)
        obstacle = self._own.obstacle or self._held.obstacle
        return Report(self._own.log, self._held.logs if self._held.is_encoded else {}, obstacle)

    def connect(self, this_round: Round, machines: Sequence[str]) -> None:
        """Connect the group in a new round; all its members call it.

        Args:
            machines: the address of each worker of the job.

        Raises:
            PeerLostError: not all did.
            WorkersDifferError: its rows are cut otherwise than before.
        """
        self.stop()
        self._round = this_round
        self._protection.note_machines(machines)
        self._protection.end_until_encoded()
        self._network.configure(this_round)
        inner = self._inner = self._network.connect()
        numbers = [self._late.was_bypassed, *self._own.part_words]
        found = gather_numbers(inner, numbers)
        was_bypassed = any(given[0] for given in found)
        sizes = [given[1:] for given in found]
        rate = self._parity.rebuild_bytes_per_second
        self._serves, self._later = rate is not None and not was_bypassed, []
        self._keep_alive_seconds = this_round.time_out.total_seconds() / 4
        self._codec = GroupCodec(
            *(self._group, self._rank, dict(zip(self._group, sizes, strict=True))),
            *(self._own, self._held, self._metrics.note_rebuilt),
        )
        self._own.rest_seconds = self._bytes_to_encode(self._group) / self._rate_again
        words = self._codec.parity_words(self._rank)
        if not self._held.logs:
            self._held.words = torch.empty(words, dtype=torch.int64)
        elif self._held.words.numel() != words:
            raise WorkersDifferError(
                f"the rows of parity group {list(self._group)} need {words} words of parity on "
                f"worker {self._rank}, {self._held.words.numel()} before; start all again"
            )

    def return_to(self, state: int | None) -> None:
        """Put a worker that kept its rows to an earlier state, or to its newest complete one.

        Args:
            state: which all agreed on; None: the newest step that this worker has completed.

        Raises:
            PeerLostError: rows changed outside their optimizer; parity must not be used.
        """
        if state is None:
            self._own.abandon_step()
        else:
            self._own.go_back(state)
            self._held.go_back(state)
            if not self._serves:  # else rebuilt rows are looked at, bit by bit, during training
                self._own.find_wrong_rows()
        self.values = self._own.values
        if state is not None:
            self._require_no_obstacle()

    def rebuild(self, step: Rebuild, share: Callable[[DensePart | None], DensePart]) -> int:
        """Decode the lost rows of the group, and put its worker to their state.

        Rows may be left to be decoded during training, if survivors are at that state, too.

        Args:
            share: gives all workers what one has of the dense state.

        Returns:
            The rows that this worker gets.

        Raises:
            PeerLostError: a peer was lost, the rebuilt rows are wrong, or rows of a survivor
                changed outside their optimizer.
        """
        is_lost, takes_part = self._rank in step.lost, self._group in step.groups
        with ExitStack() as visit:
            if step.visits and takes_part and not is_lost:
                self._held.go_back(step.state)
                visit.enter_context(self._own.visiting(step.state))
                self._own.find_wrong_rows()
                self._require_no_obstacle()
            if step.lost:
                has_it = self._rank == step.source
                whole = share(self._own.shared_copy(step.state) if has_it else None)
            if not takes_part:
                return 0
            self.has_spoiled_rows = is_lost
            rows = sum(table.num_embeddings for table in self._own.tables) if is_lost else 0
            to_decode = protocol.to_decode(step.lost, self._group)
            words = sum(self._codec.words(holder, lost) for lost, holder in to_decode)
            self._begin_rebuild(8 * words + self._bytes_to_encode(step.lacking), rows)
            for lost in dict.fromkeys(lost for lost, _ in to_decode):
                self._rebuild(lost, step, whole)
        self.has_spoiled_rows = is_lost and bool(self._later)
        return rows

    def _rebuild(self, lost: int, step: Rebuild, whole: DensePart) -> None:
        inner, at = self._inner, self._group.index(lost)
        pieces: list[list[Piece]] = [[], []]
        if lost == self._rank:
            if self._serves and not step.visits:
                self._own.missing.begin()
            pieces = pieces_of(self._group, lost, self._own)
        now, self._later = exchange_pieces(inner, at, pieces)
        for piece in now:
            self._codec.run(inner, piece, step.state)
        if lost == self._rank:  # not before, as rows that are there are not overwritten
            note_decoded_first(self._own)
        self._hand_over_own_part(at, (at + 1) % len(self._group), step.state, whole, now)

    def encode(self, step: Encode, state: int, values: dict[str, Any] | None) -> None:
        """Encode the parity that the group lacks, now or during training, and send deltas.

        Args:
            state: of the rows and the dense part of all members.
            values: of the caller, who has not seen them yet.
        """
        if step.begins:
            self._held.forget()
            self._obstacle = ""
            self._own.begin(state, values)
            self._begin_rebuild(self._bytes_to_encode(step.lacking))
        parity, codec = self._parity, self._codec
        rate = parity.rebuild_bytes_per_second if self._later else parity.encode_bytes_per_second
        lacking = [rank for rank in self._group if rank in step.lacking]
        pieces = [*self._later, *map(codec.to_encode, lacking)]
        encoding = None
        if self._rank in lacking:
            self._begin_held(state)
        if rate is not None and pieces:
            encoding = BackgroundEncoding(
                codec, pieces, rate, self._note_encoded, self._note_decoded
            )
        else:
            for piece in pieces:
                codec.run(self._inner, piece, state)
        self._start_sending(state, encoding)
        if encoding is None:
            self._note_encoded()
            self._say_protection(state)

    def complete(self) -> None:
        """Return once all rows of this worker are there, and all holders have its deltas.

        No message is under way then.

        Raises:
            PeerLostError: a peer was lost, or the rebuilt rows are wrong.
        """
        self._late.complete()
        if (sender := self._late.sender) is not None:
            sender.wait_until_sent()

    def wait_until_rows_may_change(self) -> None:
        """Return once all holders have the deltas of all completed steps.

        Raises:
            PeerLostError: one was lost.
        """
        own, sender = self._own, self._late.sender
        if sender is not None and own.log is not None:
            sender.wait_until(partial(protocol.may_change, own.log))

    def finish_step(self, step: int) -> None:
        """This worker has completed a step: keep it, and send its delta if it has one."""
        sender = self._late.sender
        self._metrics.completed_step = step
        has_delta = self._own.finish_step(step)
        if has_delta and sender is not None:  # which has sent all before
            changed = self._own.accept_changes(step, may_accept=not sender.is_rebuilding)
            self._held.obstacle = changed or self._held.obstacle
        if obstacle := self._own.obstacle or self._held.obstacle:
            self._protection.end_for(obstacle)
        self._say_protection(step)
        if has_delta and sender is not None:
            sender.submit(step)

    def stop(self) -> None:
        """End the round: peers that wait for this worker hear of it."""
        sender, self._late.sender = self._late.sender, None
        if sender is not None:
            sender.stop()
        self._protection.end()
        self._network.abort()

    def interrupt(self, of_round: Round) -> None:
        """Close the connections of a round, and end what waits for it; called from any thread."""
        sender = self._late.sender
        if sender is not None and self._round is of_round:
            sender.end_waits()
        self._network.interrupt(of_round)

    @property
    def _rate_again(self) -> int:
        return self._parity.encode_bytes_per_second or _BYTES_PER_SECOND_AGAIN

    def _encode_again(self, state: int) -> BackgroundEncoding:
        """Return what encodes all parity of the group again; called from the sender's thread."""
        self._protection.end_for(self._held.obstacle)
        self._begin_held(state)
        self._own.wants_encoding = False
        self._begin_rebuild(self._bytes_to_encode(self._group))
        pieces = [*map(self._codec.to_encode, self._group)]
        return BackgroundEncoding(self._codec, pieces, self._rate_again, self._note_encoded)

    def _begin_held(self, state: int) -> None:
        others = [rank for rank in self._group if rank != self._rank]
        self._held.begin(state, others, is_encoded=False)

    def _note_decoded(self, piece: Piece, is_last: bool) -> None:
        """Check rows of this worker that are there now; called from the sender's thread."""
        if piece.lost != self._rank:
            return
        self._late.check(piece, is_last=is_last)
        self._obstacle = self._own.obstacle
        self._require_no_obstacle()
        if is_last:
            self.has_spoiled_rows = False

    def _note_encoded(self) -> None:
        """Note that all parity of the group is encoded; called from any thread."""
        self._held.is_encoded = True
        if not (self._own.obstacle or self._held.obstacle):
            self._protection.begin()

    def _begin_rebuild(self, num_bytes: int, own_rows: int = 0) -> None:
        self._metrics.begin_rebuild(num_bytes)
        self._own_rebuild = own_rows, time.perf_counter()

    def _say_protection(self, step: int) -> None:
        if not self._protection.say(step, self._held.words.nbytes):
            return
        self._metrics.end_rebuild()
        rows, begun = self._own_rebuild
        if rows:
            logger.info(
                "worker %d was rebuilt from its peers' memory: %d rows in %.1f s; its parity group "
                "is protected again",
                *(self._rank, rows, time.perf_counter() - begun),
            )

    def _bytes_to_encode(self, lacking: Sequence[int]) -> int:
        return 8 * sum(self._codec.parity_words(rank) for rank in self._group if rank in lacking)

    def _hand_over_own_part(
        self, lost: int, keeper: int, state: int, whole: DensePart, there: Sequence[Piece]
    ) -> None:
        me = self._group.index(self._rank)
        kept = self._held.own_part(self._group[lost], state) if me == keeper else None
        part = hand_over(self._inner, keeper, lost, kept)
        if part is not None:
            self._own.restore(state, whole, part, [self._late.words_of(piece) for piece in there])
            self._obstacle = self._own.obstacle
            self._require_no_obstacle()
            self.values = self._own.values

    def _require_no_obstacle(self) -> None:
        """Meet the others again, to say that parity must not be used."""
        if self._own.obstacle:
            raise PeerLostError(
                f"worker {self._rank}: {self._own.obstacle}; all take the store in place of parity"
            )

    def _start_sending(self, state: int, encoding: BackgroundEncoding | None) -> None:
        """Send deltas from now on: all members are at ``state``."""
        message = Message(Soundness.SOUND, {}, self._own.to_keep(state))
        for number, other in exchange(self._inner, state, message).items():
            if other.own_part is not None:
                self._held.keep_own_part(self._group[number], state, other.own_part)
        self._metrics.begin_sending(state)
        self._late.sender = Sender(
            *(self._inner, self._group, self._own, self._held),
            protocol.begin(state, self._parity.every_steps),
            self._metrics,
            partial(self._network.interrupt, self._round),
            encoding,
            self._keep_alive_seconds,
            self._encode_again,
        )
