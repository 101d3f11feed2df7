"""The parity that a member holds of the others' rows, and the way back to its newest states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cpr_ext._native import native
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.protocol import DEPTH, Log

# What a peer keeps of a worker's state, in addition to parity: header and content of its own part
# of the dense state, and the checksums of its rows; (n,) uint8 each.
KeptPart = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class HeldParity:
    """One buffer, into which a part of every other member is XORed.

    Args:
        stride: steps from one delta to the next.

    Attributes:
        words: the buffer, int64.
        logs: by member, the deltas in it; empty: it is of no state.
        is_encoded: all of it is encoded.
        obstacle: why deltas do not say all that a member changed; empty: they do.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self.words = torch.empty(0, dtype=torch.int64)
        self.logs: dict[int, Log] = {}
        self.is_encoded = False
        self.obstacle = ""
        self._messages: dict[tuple[int, int], torch.Tensor] = {}  # by member and step
        self._own_parts: dict[tuple[int, int], KeptPart] = {}  # by member and state

    def forget(self) -> None:
        """It is of no state."""
        self.logs, self.is_encoded, self.obstacle = {}, False, ""
        self._messages.clear()
        self._own_parts.clear()

    def begin(self, state: int, members: Iterable[int], *, is_encoded: bool = True) -> None:
        """Record that the buffer holds the parity of the members' rows of ``state``.

        Args:
            is_encoded: it does now, else it will while deltas are received.
        """
        self.forget()
        self.is_encoded = is_encoded
        self.logs = {member: protocol.begin(state, self._stride) for member in members}

    def receive(self, member: int, step: int, message: torch.Tensor) -> None:
        """Apply the delta of a member's step, and keep it."""
        log = protocol.append(self.logs[member], step)
        native.apply_delta(message, self.words)
        self._messages[member, step] = message
        self.logs[member] = log
        self._messages.pop((member, log.oldest), None)

    def keep_own_part(self, member: int, state: int, part: KeptPart) -> None:
        """Keep what no other worker has of a member's state."""
        self._own_parts[member, state] = part
        for known in [key for key in self._own_parts if key[0] == member]:
            if known[1] < state - DEPTH * self._stride:
                del self._own_parts[known]

    def own_part(self, member: int, state: int) -> KeptPart:
        """Return what was kept of a member's state."""
        return self._own_parts[member, state]

    def go_back(self, state: int) -> None:
        """Return to an earlier state of all members."""
        if not self.is_encoded:
            return self.forget()
        for member in self.logs:
            for step in protocol.undo_order(self.logs[member], state):
                self._undo_step(member, step)
        self._own_parts = {k: part for k, part in self._own_parts.items() if k[1] <= state}

    def _undo_step(self, member: int, step: int) -> None:
        native.apply_delta(self._messages.pop((member, step)), self.words)
        self.logs[member] = protocol.undone(self.logs[member], step)
