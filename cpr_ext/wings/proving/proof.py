"""The result of a proof, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpr_ext.wings.proving.judgement import Difference


@dataclass(frozen=True)
class Proof:
    """What was tried, and what came out.

    Attributes:
        program: the script.
        steps: that were trained.
        kills: steps after which the process was killed.
        compared: how many values were compared at the last step, by kind.
        difference: the first one; None: there is none, the loop is proven.
        options: of the user's Checkpointer that were replaced: their losses are known.
        warnings: of cpr_ext, while it trained.
        incomplete: kills before which even a snapshot of all rows was not called complete.
        world_size: processes of the job.
    """

    program: str
    steps: int
    kills: Sequence[int]
    compared: Mapping[str, int]
    difference: Difference | None
    options: Mapping[str, Any]
    warnings: Sequence[str]
    incomplete: Sequence[int]
    world_size: int = 1

    @property
    def is_proven(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def __str__(self) -> str:
        lines = [f"{'proven' if self.is_proven else 'NOT proven'}: {self.program}"]
        if self.difference is not None:
            lines += str(self.difference).splitlines()
        else:
            kills = ", ".join(map(str, self.kills))
            who = "the process" if self.world_size == 1 else f"all {self.world_size} processes"
            values = ", ".join(f"{n} ({number})" for n, number in self.compared.items() if number)
            lines += [
                f"  {who} trained {self.steps} steps, and again with kills after step {kills}",
                "  after each kill a new process had every bit back, at once and after each step",
                f"  compared after each step: {values}",
                *self._not_proven(),
            ]
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def _not_proven(self) -> list[str]:
        lost = [
            f"  not proven: what snapshots lose by {name}={value}; here they hold all rows that "
            "changed, in every bit"
            for name, value in self.options.items()
        ]
        return [
            *lost,
            "  not proven: kills elsewhere than after step(), which go back to such a snapshot",
            f"  not proven: state that matters only after step {self.steps}",
            *(
                f"  no snapshot after step {step} was called complete, see the warnings"
                for step in self.incomplete
            ),
        ]
