"""What a training run tells outside its store: which states it had, saved, and was promised.

A line is one short append, so that the journal of a killed process is whole up to its last line.

    captured STORE SEQ FIRST COMPLETE   a snapshot of state SEQ is captured; each of its rows is as
                                        in some state from FIRST to SEQ
    acknowledged STORE SEQ              it is committed, the run was told
    leaving STORE SEQ                   the run goes back to the snapshot of state SEQ
    resumed STORE SEQ AT                it has gone back to it (SEQ -1: to nothing), and is in AT
    reported TEXT                       the library told of a failure
    over                                the fault is over
    done                                at the end of the run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from python_tests.faults.model import State, as_recovered

NOTHING = -1


class Journal:
    """Appends to a journal and its states.

    Args:
        directory: of the journal, not in the store.
        on_line: called after each line is written.
    """

    def __init__(self, directory: Path, on_line: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._on_line = on_line
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(directory / "journal", flags)
        self._states = os.open(directory / "states", flags)
        self.num_states = 0
        self.num_lines = 0

    def write(self, *words: object) -> None:
        """Append one line."""
        os.write(self._lines, (" ".join(map(str, words)).replace("\n", " ") + "\n").encode())
        self.num_lines += 1
        self._on_line()

    def record(self, state: State) -> int:
        """Append a state of the run; returns its number, SEQ in lines."""
        os.write(self._states, state.to_bytes())
        self.num_states += 1
        return self.num_states - 1


class States:
    """The states of a journal by number."""

    def __init__(self, directory: Path) -> None:
        self._content = (directory / "states").read_bytes()
        self._size = State.size_bytes()

    def __getitem__(self, seq: int) -> State:
        return State.from_bytes(self._content[seq * self._size : (seq + 1) * self._size])

    def explain(self, state: State, seq: int, first: int) -> str:
        """Why ``state`` is not that of snapshot SEQ, whose rows go back to FIRST; '' if it is."""
        wanted = self[seq]
        if state.dense != wanted.dense:
            return f"its dense part is not that of state {seq}"
        for table, rows in state.rows.items():
            history = [self[s].rows[table] for s in range(first, seq + 1)]
            for row_id, row in enumerate(rows):
                if not any(
                    row in (old[row_id], as_recovered(table, old[row_id])) for old in history
                ):
                    return (
                        f"row {row_id} of '{table}' is in none of the states {first} to {seq} "
                        f"({self._search(table, row_id, row)})"
                    )
        return ""

    def _search(self, table: str, row_id: int, row: bytes) -> str:
        count = len(self._content) // self._size
        found = [s for s in range(count) if self[s].rows[table][row_id] == row]
        return f"it is as in states {found[0]} to {found[-1]}" if found else "it never was so"


def read_lines(directory: Path) -> list[str]:
    """All whole lines of a journal."""
    path = directory / "journal"
    return path.read_text().splitlines() if path.exists() else []


@dataclass
class Promise:
    """What a store may hold, by all that its journal says.

    Attributes:
        allowed: states whose snapshot ``recover()`` may find; NOTHING: an empty store.
        complete: those that ``recover(mode="full")`` may find.
        first: of each snapshot, the oldest state its rows may come from.
        broken: what was found broken by the run itself.
    """

    allowed: list[int] = field(default_factory=lambda: [NOTHING])
    complete: list[int] = field(default_factory=lambda: [NOTHING])
    first: dict[int, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def read_promise(lines: Sequence[str], store: str, states: States) -> Promise:
    """What ``store`` may hold after these lines of the journal."""
    promise = Promise()
    is_complete: dict[int, bool] = {}
    for line in lines:
        event, *words = line.split()
        if not words or words[0] != store:
            continue
        seq, *more = map(int, words[1:])
        if event == "captured":
            promise.first[seq], is_complete[seq] = more[0], bool(more[1])
            promise.allowed.append(seq)
            if is_complete[seq]:
                promise.complete.append(seq)
        elif event == "acknowledged":
            # Nothing older than it any more; what was captured later may be there already.
            promise.allowed = promise.allowed[promise.allowed.index(seq) :]
            if is_complete[seq] and more[0]:  # after a base that failed, no check can be made
                promise.complete = promise.complete[promise.complete.index(seq) :]
        elif event == "leaving":
            promise.allowed.append(seq)
        elif event == "resumed":
            if seq not in promise.allowed:
                promise.broken.append(f"{line}: allowed were {promise.allowed}")
            elif seq != NOTHING:
                why = states.explain(states[more[0]], seq, promise.first[seq])
                promise.broken += [f"{line}: {why}"] if why else []
            promise.allowed = [seq]
            promise.complete = [s for s in promise.complete if s <= seq] or [NOTHING]
    return promise
