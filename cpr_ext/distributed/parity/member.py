"""One worker's part in its parity group, over all rounds of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.process_group import Round
from cpr_ext.distributed.identity.worker_identity import LOCAL_WORLD_SIZE, Identity
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.connections import GroupConnections
from cpr_ext.distributed.parity.encoding import BackgroundEncoding
from cpr_ext.distributed.parity.exchange import (
    Message,
    exchange,
    gather_numbers,
    hand_over,
)
from cpr_ext.distributed.parity.group_codec import GroupCodec
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.late_rows import LateRows
from cpr_ext.distributed.parity.no_parity import NoParity
from cpr_ext.distributed.parity.options import Parity, require_same_options, shared_options
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import hosts_by_count, place
from cpr_ext.distributed.parity.protection import Protection
from cpr_ext.distributed.parity.protocol import Piece, Report, Soundness
from cpr_ext.distributed.parity.rebuild_plan import (
    exchange_pieces,
    note_decoded_first,
    pieces_of,
)
from cpr_ext.distributed.parity.rebuild_progress import RebuildProgress
from cpr_ext.distributed.parity.refusals import (
    refuse_unprotected,
    require_memory,
)
from cpr_ext.distributed.parity.sender import Sender
from cpr_ext.errors import PeerLostError, WorkersDifferError
from cpr_ext.metrics.parity_metrics import ParityMetrics
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.dense_state import DensePart

logger = logger_of("parity")

# Of parity that is encoded again because rows changed, unless the options say another rate.
_BYTES_PER_SECOND_AGAIN = 100_000_000


class ParityMember(NoParity):
    """Protects the rows of one worker, and holds parity of others'.

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
        self.nodes = tuple(sorted({rank // max(1, per_host) for rank in self._group}))
        self._parity = parity
        self._metrics = ParityMetrics()
        self._protection = Protection(identity.rank, self._group, self._metrics)
        self._progress = RebuildProgress(identity.rank, self._metrics)
        self._connections = GroupConnections(number, self._group, identity.rank)
        self._late = LateRows(self._group, identity.rank)
        self._obstacle = ""  # why a rebuild failed; it outlives the job that was being rebuilt
        self._held = HeldParity(parity.every_steps)
        self._later: list[Piece] = []  # lost rows that are decoded during training
        self._serves = False  # lookups wait for missing rows while training

    @property
    def is_protected(self) -> bool:  # type: ignore[override]
        """Whether any one worker of the group could be rebuilt now."""
        return self._metrics.protected

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
        self._protection.publish = checkpointer.rewinding.publish_metrics
        checkpointer.rewinding.hold_snapshots(self._late.may_save)
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

    def note_machines(self, machines: Sequence[str]) -> None:
        """Note on which machine each worker of the new round is."""
        self._protection.note_machines(machines)

    def connect(self, this_round: Round) -> None:
        """Connect the group in a new round; all its members call it.

        Raises:
            PeerLostError: not all did.
            WorkersDifferError: a member has other options, or its rows are cut otherwise than
                before.
        """
        self.stop()
        self._protection.end_until_encoded()
        inner = self._connections.connect(this_round)
        options = shared_options(self._parity)
        numbers = [self._late.was_bypassed, *options, *self._own.part_words]
        with self._connections.minding():
            found = gather_numbers(inner, numbers)
        was_bypassed = any(given[0] for given in found)
        first_size = 1 + len(options)
        require_same_options(self._group, [given[1:first_size] for given in found])
        sizes = [given[first_size:] for given in found]
        rate = self._parity.rebuild_bytes_per_second
        self._serves, self._later = rate is not None and not was_bypassed, []
        self._keep_alive_seconds = this_round.time_out.total_seconds() / 4
        self._codec = GroupCodec(
            *(self._group, self._rank, dict(zip(self._group, sizes, strict=True))),
            *(self._own, self._held, self._progress.note),
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

    def begin(self, state: int, extra_state: Any) -> None:
        """This worker holds rows and dense state as of ``state``, of which there is no parity."""
        self._held.forget()
        self._obstacle = ""
        self._own.begin(state, extra_state)

    def abandon_step(self) -> bool:
        """Put a live worker to the newest step that it has completed; True if it is known."""
        has_returned = self._own.abandon_step()
        self.extra_state = self._own.extra_state
        return has_returned

    def encode_all(self, state: int) -> None:
        """Encode the parity of the whole group, whose members are at ``state``, and protect."""
        self._progress.begin(self._bytes_to_encode(self._group))
        self._encode_all_of(self._group, state)

    def go_back(self, state: int) -> None:
        """Return to an earlier state, which all agreed on.

        Raises:
            PeerLostError: rows changed outside their optimizer; parity must not be used.
        """
        self._own.go_back(state)
        self.extra_state = self._own.extra_state
        self._held.go_back(state)
        if not self._serves:  # else rebuilt rows are looked at, bit by bit, during training
            self._own.find_wrong_rows()
        self._require_no_obstacle()

    @contextmanager
    def visiting(self, state: int) -> Iterator[None]:
        """Put the rows to an earlier state, which all agreed on, inside the block.

        Raises:
            PeerLostError: rows changed outside their optimizer; parity must not be used.
        """
        self._held.go_back(state)
        with self._own.visiting(state):
            self._own.find_wrong_rows()
            self._require_no_obstacle()
            yield

    def whole_copy(self, state: int) -> DensePart:
        """Return the dense state of an earlier state."""
        return self._own.whole_copy(state)

    def rebuild(
        self, reports: Sequence[Report], state: int, whole: DensePart, *, may_serve: bool
    ) -> int:
        """Decode the lost rows of the group, and put its worker to ``state``.

        Args:
            reports: of all workers, as they agreed by.
            whole: of a worker that kept its state.
            may_serve: rows may be left to be decoded during training.

        Returns:
            The rows that this worker gets.

        Raises:
            PeerLostError: a peer was lost, or the rebuilt rows are wrong.
        """
        is_lost = reports[self._rank].own is None
        self.has_spoiled_rows = is_lost
        rows = sum(table.num_embeddings for table in self._own.tables) if is_lost else 0
        to_decode = protocol.to_decode(reports, self._group)
        words = sum(self._codec.words(holder, lost) for lost, holder in to_decode)
        to_encode = protocol.to_encode(reports, self._group)
        self._progress.begin(8 * words + self._bytes_to_encode(to_encode), rows)
        with self._connections.minding():
            for lost in dict.fromkeys(lost for lost, _ in to_decode):
                self._rebuild(lost, state, whole, may_serve=may_serve and self._serves)
        self.has_spoiled_rows = is_lost and bool(self._later)
        return rows

    def _rebuild(self, lost: int, state: int, whole: DensePart, *, may_serve: bool) -> None:
        inner, at = self._connections.inner, self._group.index(lost)
        pieces: list[list[Piece]] = [[], []]
        if lost == self._rank:
            if may_serve:
                self._own.missing.begin()
            pieces = pieces_of(self._group, lost, self._own)
        now, self._later = exchange_pieces(inner, at, pieces)
        for piece in now:
            self._codec.run(inner, piece, state)
        if lost == self._rank:  # not before, as rows that are there are not overwritten
            note_decoded_first(self._own)
        self._hand_over_own_part(at, (at + 1) % len(self._group), state, whole, now)

    def encode_missing(self, reports: Sequence[Report], state: int) -> None:
        """Encode the parity that the group lacks, and protect."""
        self._encode_all_of(protocol.to_encode(reports, self._group), state)

    def complete_rows(self) -> None:
        """Return once all rows of this worker are there.

        Raises:
            PeerLostError: a peer was lost, or the rebuilt rows are wrong.
        """
        self._late.complete()

    def complete_deltas(self) -> None:
        """Return once all holders have the deltas of this worker; no message is under way then.

        Raises:
            PeerLostError: a peer was lost.
        """
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
        self._connections.release()

    def interrupt(self, of_round: Round) -> None:
        """Close the connections of a round; called from any thread."""
        self._connections.interrupt(of_round)

    def _encode_all_of(self, holders: Sequence[int], state: int) -> None:
        """Encode the parity of these members, now or during training, and send deltas."""
        parity, codec = self._parity, self._codec
        rate = parity.rebuild_bytes_per_second if self._later else parity.encode_bytes_per_second
        pieces = [*self._later, *map(codec.to_encode, holders)]
        encoding = None
        if self._rank in holders:
            self._begin_held(state)
        with self._connections.minding():
            if rate is not None and pieces:
                encoding = BackgroundEncoding(
                    codec, pieces, rate, self._note_encoded, self._note_decoded
                )
            else:
                for piece in pieces:
                    codec.run(self._connections.inner, piece, state)
            self._start_sending(state, encoding)
        if encoding is None:
            self._note_encoded()
            self._say_protection(state)

    @property
    def _rate_again(self) -> int:
        return self._parity.encode_bytes_per_second or _BYTES_PER_SECOND_AGAIN

    def _encode_again(self, state: int) -> BackgroundEncoding:
        """Return what encodes all parity of the group again; called from the sender's thread."""
        self._protection.end_for(self._held.obstacle)
        self._begin_held(state)
        self._own.wants_encoding = False
        self._progress.begin(self._bytes_to_encode(self._group))
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

    def _say_protection(self, step: int) -> None:
        if self._protection.say(step, self._held.words.nbytes):
            self._progress.end()

    def _bytes_to_encode(self, holders: Sequence[int]) -> int:
        return 8 * sum(self._codec.parity_words(holder) for holder in holders)

    def _hand_over_own_part(
        self, lost: int, keeper: int, state: int, whole: DensePart, there: Sequence[Piece]
    ) -> None:
        me = self._group.index(self._rank)
        if me == keeper:
            part = self._held.own_part(self._group[lost], state)
            hand_over(self._connections.inner, keeper, lost, part)
        elif me == lost:
            part = hand_over(self._connections.inner, keeper, lost, None)
            self._own.restore(state, whole, part, [self._late.words_of(piece) for piece in there])
            self._obstacle = self._own.obstacle
            self._require_no_obstacle()
            self.extra_state = self._own.extra_state

    def _require_no_obstacle(self) -> None:
        """Meet the others again, to say that parity must not be used."""
        if self._own.obstacle:
            raise PeerLostError(
                f"worker {self._rank}: {self._own.obstacle}; all take the store in place of parity"
            )

    def _start_sending(self, state: int, encoding: BackgroundEncoding | None) -> None:
        """Send deltas from now on: all members are at ``state``."""
        message = Message(Soundness.SOUND, {}, self._own.to_keep(state))
        for number, other in exchange(self._connections.inner, state, message).items():
            if other.own_part is not None:
                self._held.keep_own_part(self._group[number], state, other.own_part)
        self._metrics.begin_sending(state)
        self._late.sender = Sender(
            *(self._connections.inner, self._group, self._own, self._held),
            protocol.begin(state, self._parity.every_steps),
            self._metrics,
            self._connections.releasing(),
            encoding,
            self._keep_alive_seconds,
            self._encode_again,
        )
