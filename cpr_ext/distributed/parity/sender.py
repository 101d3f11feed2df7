"""The thread that sends the delta of each step to its holders, and holds those of others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from cpr_ext.distributed.collective.process_group import Members
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.encoding import BackgroundEncoding
from cpr_ext.distributed.parity.exchange import Message, acknowledge, exchange
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.own_rows import OwnRows
from cpr_ext.distributed.parity.placement import Group, part_held
from cpr_ext.distributed.parity.protocol import Log, Soundness
from cpr_ext.distributed.parity.row_requests import NOTHING_YET, RowRequest, exchange_request
from cpr_ext.errors import PeerLostError
from cpr_ext.saving.metrics import ParityMetrics

_JOIN_SECONDS = 10.0


class Sender:
    """Trades the deltas of completed steps, one after the other, for one round.

    The thread has the group's connections closed whenever it ends, so that no member waits for this
    one. To close them is gloo's only way to end a wait.

    Args:
        inner: the group's connections in this round; nothing else uses them meanwhile.
        group: its members' ranks.
        log: of the state from which all members begin.
        metrics: of what is sent and acknowledged.
        encoding: of rows and parity that the group lacks, if that is done meanwhile.
        keep_alive_seconds: after which a member that has no request says so.
        encode_again: returns what encodes all parity of the group from the rows of a state.
        release: closes the connections; called from any thread, repeatedly.
    """

    def __init__(
        self,
        inner: Members,
        group: Group,
        own: OwnRows,
        held: HeldParity,
        log: Log,
        metrics: ParityMetrics,
        release: Callable[[], None],
        encoding: BackgroundEncoding | None = None,
        keep_alive_seconds: float = 5.0,
        encode_again: Callable[[int], BackgroundEncoding | None] = lambda state: None,
    ) -> None:
        self._inner = inner
        self._group = group
        self._me = inner.rank()
        self._rank = group[self._me]
        self._release = release
        self._metrics = metrics
        self._encoding = encoding
        self._own = own
        self._held = held
        self._changed = threading.Condition()
        self._submitted = self._acknowledged = log.newest
        self._stride = log.stride
        self._error: BaseException | None = None
        self._is_stopped = False
        self._request: RowRequest | None = None  # that nobody has served yet
        self._keep_alive_seconds = keep_alive_seconds
        self._encode_again = encode_again
        self._thread = threading.Thread(target=self._run, name="cpr_ext-parity", daemon=True)
        self._thread.start()

    @property
    def acknowledged(self) -> int:
        """The newest step whose deltas all holders have."""
        return self._acknowledged

    @property
    def is_rebuilding(self) -> bool:
        """Whether rows of a lost worker are decoded during training."""
        return self._lost is not None

    def submit(self, step: int) -> None:
        """Send the own delta of ``step``, which is complete."""
        with self._changed:
            self._submitted = step
            self._changed.notify_all()

    def wait_until(self, is_ready: Callable[[int], bool]) -> None:
        """Return once ``is_ready`` of the newest acknowledged step.

        Raises:
            PeerLostError: a member was lost meanwhile.
        """
        with self._changed:
            self._wait_while(lambda: not is_ready(self._acknowledged))

    def wait_until_sent(self) -> None:
        """Return once all holders have the deltas of all submitted steps.

        Raises:
            PeerLostError: a member was lost meanwhile.
        """
        with self._changed:
            self._wait_while(lambda: self._acknowledged < self._submitted)

    def fetch(self, request: RowRequest) -> None:
        """Return once the group has decoded these rows of this worker, which is being rebuilt.

        Raises:
            PeerLostError: a member was lost meanwhile.
        """
        with self._changed:
            self._request = request
            self._changed.notify_all()
            self._wait_while(lambda: self._request is request and self._lost == self._rank)
            self._request = None

    def end_waits(self) -> None:
        """Have all that waits for this sender end: the round is over, whatever gloo waits for."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread; nothing is applied any more when this returns.

        A thread that waits for a member ends when that one leaves, too.
        """
        self.end_waits()
        self._release()
        self._thread.join(_JOIN_SECONDS)

    def _wait_while(self, is_waiting: Callable[[], bool]) -> None:
        with self._inner.waiting():
            while is_waiting():
                if isinstance(self._error, PeerLostError):
                    raise PeerLostError(f"parity group {list(self._group)}: {self._error}")
                if self._error is not None:
                    raise self._error
                if self._is_stopped:
                    raise PeerLostError(f"parity group {list(self._group)}: the round has ended")
                self._changed.wait()

    @property
    def _lost(self) -> int | None:
        """The worker whose rows are decoded during training, if any is."""
        return None if self._encoding is None else self._encoding.lost

    def _run(self) -> None:
        try:
            self._serve(self._acknowledged)
            while (step := self._next()) is not None:
                if not self._trade(step):
                    return
                with self._changed:
                    self._acknowledged = step
                    self._changed.notify_all()
                self._serve(step)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._release()

    def _next(self) -> int | None:
        with self._changed:
            while not self._is_stopped and self._submitted <= self._acknowledged:
                self._changed.wait()
            return None if self._is_stopped else self._acknowledged + self._stride

    def _has_stopped(self) -> bool:
        return self._is_stopped

    def _trade(self, step: int) -> bool:
        # The own deltas and the parity are the training thread's once this is stopped.
        with self._changed:
            if self._has_stopped():
                return False
            message = self._pack(step)
        received = exchange(self._inner, step, message)
        with self._changed:
            if self._has_stopped():
                return False
            self._note_changes(received)
            obstacle = self._own.obstacle or self._held.obstacle
            if self._lost is not None and obstacle:
                raise PeerLostError(f"rows cannot be rebuilt from their peers any more: {obstacle}")
            all_parcels = (message, *received.values())
            encodes_again = protocol.encodes_again([p.soundness for p in all_parcels])
            if encodes_again:
                self._encoding = self._encode_again(step)
            for member, other in received.items():
                self._hold(self._group[member], step, other, is_in_parity=not encodes_again)
            assert protocol.may_acknowledge(self._held.logs, step)
        self._encode(min(p.wanted_words for p in all_parcels), step)
        acknowledge(self._inner)
        self._metrics.note_acknowledged(step, message.num_bytes)
        return True

    def _pack(self, step: int) -> Message:
        words = {
            number: self._own.message(step, part_held(self._group, holder, self._rank))
            for number, holder in enumerate(self._group)
            if holder != self._rank
        }
        wanted_words = self._encoding.wanted_words() if self._encoding is not None else 0
        own = self._own
        soundness = protocol.soundness(own.obstacle, wants_encoding=own.wants_encoding)
        return Message(soundness, words, own.to_keep(step), wanted_words)

    def _encode(self, num_words: int, state: int) -> None:
        """Decode and encode something before rows may change again, or while training waits."""
        encoding = self._encoding
        if encoding is not None and not encoding.encode(self._inner, num_words, state):
            self._encoding = None
        with self._changed:
            self._changed.notify_all()

    def _serve(self, state: int) -> None:
        """Decode what a lost worker's lookups need, until that has completed the step after."""
        while (encoding := self._encoding) is not None and (lost := self._lost) is not None:
            assert protocol.state_of_parity(self._held.logs) == state
            own = self._next_request(state) if lost == self._rank else None
            if self._has_stopped():
                return
            inner = self._inner
            request = exchange_request(inner, self._group.index(lost), own)
            if request is None or self._has_stopped():
                return
            if request.words is None:
                self._encode(encoding.words_left, state)
            elif request.words.numel():
                words = encoding.codec.decode_rows(inner, lost, request.words, state)
                if lost == self._rank:
                    self._answer(request, words)

    def _next_request(self, state: int) -> RowRequest | None:
        """Return the own request; None: the step after ``state`` is complete."""
        with self._changed:
            if self._request is None and self._submitted <= state and not self._is_stopped:
                self._changed.wait(self._keep_alive_seconds)
            if self._request is None and self._submitted > state:
                return None
            return self._request or NOTHING_YET

    def _answer(self, request: RowRequest, words: torch.Tensor) -> None:
        with self._changed:
            if not self._has_stopped():
                request.take(words)
                self._request = None
            self._changed.notify_all()

    def _note_changes(self, messages: dict[int, Message]) -> None:
        for member, message in messages.items():
            if message.soundness != Soundness.SOUND and not self._held.obstacle:
                rank = self._group[member]
                self._held.obstacle = f"rows of worker {rank} changed outside their optimizer"

    def _hold(self, member: int, step: int, message: Message, *, is_in_parity: bool) -> None:
        if message.own_part is not None:
            self._held.keep_own_part(member, step, message.own_part)
        if is_in_parity:
            self._held.receive(member, step, message.words[self._me])
