"""Whether the stores of a job fit together: one model, all parts of its tables, one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cpr_ext._native import native
from cpr_ext.recovery.restore import read_dense
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.position import Position
from cpr_ext.wings.tools.maintenance.whole_tables import Member

_MOST_NAMED = 4


@dataclass(frozen=True)
class MemberPart:
    """Facts of the dense part of one store, without its tensors, as there may be many stores.

    Attributes:
        table_keys: the table of each ``state_dict()`` name that is one.
        tensors: dtype, shape and CRC32C of the others.
        wrapped: paths of modules that wrappers hold; None: an earlier release did not note them.
    """

    member: Member
    position: Position
    table_keys: dict[str, str]
    tensors: dict[str, tuple[torch.dtype, torch.Size, int]]
    wrapped: list[str] | None


def read_parts(members: Sequence[Member]) -> list[MemberPart]:
    """Read the dense part of each store's snapshot.

    Raises:
        DamageError: one is damaged (named).
    """
    found = []
    for member in members:
        tree = read_dense(member.reader, member.record).tree()
        tensors = {
            name: (value.dtype, value.shape, _crc(value))
            for name, value in tree["model"].items()
            if isinstance(value, torch.Tensor)
        }
        wrapped = tree.get("wrapped")
        position = read_position(tree)
        found.append(MemberPart(member, position, tree["table_keys"], tensors, wrapped))
    return found


def dense_faults(parts: Sequence[MemberPart]) -> list[str]:
    """Return where dense parts are not of one model, one sentence each."""
    found = []
    first = _form(parts[0])
    for part in parts[1:]:
        own = _form(part)
        names = sorted(n for n in first.keys() | own.keys() if first.get(n) != own.get(n))
        if names:
            found.append(
                f"worker {part.member.worker} has another model than worker "
                f"{parts[0].member.worker}: {_listed(names)} differ"
            )
    return found


def newest(parts: Sequence[MemberPart]) -> MemberPart:
    """Return the store that got furthest; all workers would take its dense part."""
    return max(parts, key=lambda part: part.position.step)


def notes(parts: Sequence[MemberPart]) -> list[str]:
    """Return what is no fault, but must be known of the stores; one sentence each."""
    found = several_steps({part.member.worker: part.position.step for part in parts})
    source = newest(parts)
    for part in parts:
        if part is source or part.position.step != source.position.step:
            continue
        who = f"workers {source.member.worker} and {part.member.worker}"
        if part.position.num_samples != source.position.num_samples:
            samples = f"{source.position.num_samples} and {part.position.num_samples}"
            found.append(f"{who} are at step {source.position.step} after {samples} samples")
        names = [n for n, value in source.tensors.items() if part.tensors.get(n) != value]
        if names:
            found.append(
                f"{who} hold other values of {_listed(names)} at step {source.position.step}: "
                "right for buffers, such as those of batch norm; replicas of a parameter are equal"
            )
    return found


def several_steps(step_of: Mapping[int | str, int]) -> list[str]:
    """Return a note if the newest snapshots of workers are of different steps."""
    steps: dict[int, list[int | str]] = {}
    for worker, step in step_of.items():
        steps.setdefault(step, []).append(worker)
    if len(steps) < 2:
        return []
    said = "; ".join(f"{step}: {_named(steps[step])}" for step in sorted(steps))
    return [f"the newest snapshots are of different steps ({said}), as partial recovery allows"]


def step_of_all(members: Sequence[Member]) -> int | None:
    """Return the step of all rows; None if rows are of several, after partial snapshots."""
    steps = {member.record.last_step for member in members}
    is_complete = all(member.record.is_complete for member in members)
    return steps.pop() if len(steps) == 1 and is_complete else None


def _form(part: MemberPart) -> dict[str, object]:
    return {name: (dtype, shape) for name, (dtype, shape, _) in part.tensors.items()}


def _crc(value: torch.Tensor) -> int:
    content = value.contiguous().reshape(-1).view(torch.uint8)
    return int(native.crc32c(content.numpy()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:_MOST_NAMED]) + more


def _named(workers: Sequence[int | str]) -> str:
    return f"{'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))}"
