"""A worker without parity, as all others see it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.process_group import Round
from cpr_ext.distributed.parity.placement import Group
from cpr_ext.distributed.parity.protocol import Report
from cpr_ext.state.dense_state import DensePart

_NOTHING_KEPT = "exact recovery was agreed on, and this worker has no parity"


class NoParity:
    """What a worker without parity does for it: nothing."""

    groups: tuple[Group, ...] = ()
    extra_state: Any = None
    nodes: tuple[int, ...] = ()  # of the group's ranks
    is_protected = True  # as far as this worker can be
    has_spoiled_rows = False  # of a worker that lost its rows, by a rebuild that did not end

    def attach(self, checkpointer: Checkpointer) -> None:
        """Protect the tables of a Checkpointer."""

    def report(self, *, is_live: bool) -> Report | None:
        """Report this worker's state when workers have met."""
        return None

    def note_machines(self, machines: Sequence[str]) -> None:
        """Note on which machine each worker of the new round is."""

    def connect(self, this_round: Round) -> None:
        """Connect the group in a new round."""

    def begin(self, state: int, extra_state: Any) -> None:
        """This worker holds rows and dense state as of ``state``, of which there is no parity."""

    def abandon_step(self) -> bool:
        """Put a live worker to the newest step that it has completed; True if it is known."""
        return False

    def encode_all(self, state: int) -> None:
        """Encode the parity of the whole group, whose members are at ``state``, and protect."""

    def go_back(self, state: int) -> None:
        """Return to an earlier state, which all agreed on."""
        raise AssertionError(_NOTHING_KEPT)

    def visiting(self, state: int) -> AbstractContextManager[None]:
        """Put the rows to an earlier state, which all agreed on, inside the block."""
        raise AssertionError(_NOTHING_KEPT)

    def whole_copy(self, state: int) -> DensePart:
        """Return the dense state of an earlier state."""
        raise AssertionError(_NOTHING_KEPT)

    def rebuild(
        self, reports: Sequence[Report], state: int, whole: DensePart, *, may_serve: bool
    ) -> int:
        """Decode the lost rows of the group, and put its worker to ``state``."""
        raise AssertionError(_NOTHING_KEPT)

    def encode_missing(self, reports: Sequence[Report], state: int) -> None:
        """Encode the parity that the group lacks, and protect."""

    def wait_until_rows_may_change(self) -> None:
        """Return once all holders have the deltas of all completed steps."""

    def finish_step(self, step: int) -> None:
        """This worker has completed a step."""

    def complete_rows(self) -> None:
        """Return once all rows of this worker are there."""

    def complete_deltas(self) -> None:
        """Return once all holders have the deltas of this worker."""

    def stop(self) -> None:
        """End the round."""

    def interrupt(self, of_round: Round) -> None:
        """Close the connections of a round; called from any thread."""
