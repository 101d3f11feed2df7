"""Who holds the parity of whose rows: pure functions.

The members of a group are numbered. The shard of member ``m`` is cut into ``group_size - 1`` parts;
the parity of part ``j`` is with member ``(m + 1 + j) % group_size``. So each member holds one part
of every other member, XORed into one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpr_ext.errors import UsageError

Group = tuple[int, ...]


def place(world_size: int, group_size: int, hosts: Sequence[str | int]) -> tuple[Group, ...]:
    """Return the groups of a job, each on as many hosts as possible.

    Args:
        hosts: of each rank.

    Raises:
        UsageError: the groups do not fit the world, or hosts are not one for each rank.
    """
    if group_size > world_size or world_size % group_size:
        sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
        raise UsageError(
            f"group_size is {group_size}, but there are {world_size} workers, which must be a "
            f"multiple of it; possible here: {sizes or 'none'}"
        )
    if len(hosts) != world_size:
        raise UsageError(f"hosts names {len(hosts)} hosts; needed: one for each of {world_size}")
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    by_host = sorted(range(world_size), key=lambda rank: (order[hosts[rank]], rank))
    count = world_size // group_size
    # Dealt in turn: two of a group are on one host only if that has more workers than groups.
    return tuple(tuple(sorted(by_host[number::count])) for number in range(count))


def hosts_by_count(world_size: int, per_host: int) -> list[int]:
    """Hosts of ranks that are numbered host by host."""
    return [rank // max(1, per_host) for rank in range(world_size)]


def crowded(group: Group, hosts: Sequence[str | int]) -> dict[str | int, list[int]]:
    """Return which hosts have several members of a group, which does not survive their loss.

    Args:
        hosts: of each rank, where it is now.
    """
    found: dict[str | int, list[int]] = {}
    for rank in group:
        found.setdefault(hosts[rank], []).append(rank)
    return {host: ranks for host, ranks in found.items() if len(ranks) > 1}


def holders(group: Group, member: int) -> list[int]:
    """Return the members that hold parity of ``member``, in the order of its parts."""
    at, size = group.index(member), len(group)
    return [group[(at + 1 + part) % size] for part in range(size - 1)]


def part_held(group: Group, holder: int, member: int) -> int:
    """Return which part of ``member`` the parity of ``holder`` covers."""
    return holders(group, member).index(holder)


def cut(records: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """Bounds of about equal parts of a shard, in words; a record is in one part only.

    Args:
        records: of each table the number of rows, and the words of one.

    Returns:
        ``parts + 1`` bounds, ascending, from 0 to all words.
    """
    total = sum(rows * words for rows, words in records)
    bounds, begin = [0], 0
    for rows, words in records:
        end = begin + rows * words
        while len(bounds) < parts and (goal := len(bounds) * total // parts) < end:
            bounds.append(max(bounds[-1], begin + -(-(goal - begin) // words) * words))
        begin = end
    return [*bounds, *[total] * (parts + 1 - len(bounds))]
