"""Which agent has which node of a job, and which agents stand by. No I/O; times are given.

An agent, such as torchrun's, starts the workers of one node and starts them again. It keeps its
node while it is connected. Another agent takes over the node of one that has ended. What was
adopted by a machine that has another node moves on once a fresh machine is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from cpr_ext.distributed.rendezvous.meeting import MeetingError

STEADY_SECONDS = 10.0  # that an agent has stood by before a living one leaves a node to it


@dataclass(frozen=True)
class Agent:
    """How an agent offers itself.

    Attributes:
        token: distinguishes agents.
        num_nodes: of the job, as it knows it.
        machine: on which it runs.
        since: when it came.
        had: the node that it has had; None: none.
        only: the one node that it takes; None: any.
        adopt_seconds: so long it leaves a free node to agents on machines that have none. If it is
            above 0, such agents also get the node later.
    """

    token: str
    num_nodes: int
    machine: str
    since: float
    had: int | None = None
    only: int | None = None
    adopt_seconds: float = 0.0


class Nodes:
    """The nodes of one job.

    Args:
        knows_all_from: by this time each living agent has connected to this host.
    """

    def __init__(self, knows_all_from: float = float("-inf")) -> None:
        self.knows_all_from = knows_all_from
        self._agents: dict[int, Agent] = {}  # by connection
        self._holders: dict[int, str] = {}  # tokens, by node
        self._cut_off: set[str] = set()  # holders that vanished without closing their connection
        self._free_since: dict[int, float] = {}
        self._held_since: dict[int, float] = {}
        self._apart: dict[int, set[int]] = defaultdict(set)  # from which others a node is kept
        self._ready: set[str] = set()
        self._over: set[str] = set()

    def attend(self, agent: Agent, visit: int) -> None:
        """Note that an agent is connected.

        Raises:
            MeetingError: others say another number of nodes, or have no such node.
        """
        said = next((other.num_nodes for other in self._agents.values()), agent.num_nodes)
        if agent.num_nodes != said:
            raise MeetingError(
                f"an agent says that there are {agent.num_nodes} nodes, others say {said}; give "
                "all the same --nnodes"
            )
        if agent.only is not None and not 0 <= agent.only < said:
            raise MeetingError(f"there is no node {agent.only} of {said}: they count from 0")
        self._agents[visit] = agent
        self._cut_off.discard(agent.token)

    def leave(self, visit: int, *, is_cut_off: bool = False) -> None:
        """Note that a connection is closed, or that nothing is heard through it."""
        if (agent := self._agents.pop(visit, None)) is None:
            return
        self._ready.discard(agent.token)
        if is_cut_off and agent.token in self._holders.values():
            self._cut_off.add(agent.token)

    def is_replaced(self, visit: int) -> bool:
        """Return whether another agent has the node that this one had when it came."""
        agent = self._agents[visit]
        return agent.had is not None and self._holders.get(agent.had) not in (None, agent.token)

    def note_ready(self, token: str) -> None:
        """Note that the workers of an agent wait for its node."""
        self._ready.add(token)

    def keep_apart(self, nodes: Iterable[int]) -> None:
        """Note that these nodes are better on different machines: they protect each other."""
        found = set(nodes)
        for node in found:
            self._apart[node] |= found - {node}

    def end(self) -> list[int]:
        """Note that the job is over: the agents whose connections are returned are not needed."""
        self._over = {agent.token for agent in self._agents.values()}
        return list(self._agents)

    def is_over(self, token: str) -> bool:
        """Return whether the job of this agent is done."""
        return token in self._over

    def node_of(self, token: str) -> int | None:
        """Return the node of an agent; None: it stands by."""
        return next((node for node, holder in self._holders.items() if holder == token), None)

    def assign(self, now: float) -> dict[int, int]:
        """Give free nodes to agents that stand by; fresh machines come before crowded ones.

        Returns:
            The nodes that were given, by connection.
        """
        given: dict[int, int] = {}
        for node in range(self._num_nodes):
            if self._is_held(node):
                continue
            self._free_since.setdefault(node, now)
            if (visit := self._choose(node, now)) is not None:
                given[visit] = node
                self._give(node, visit, now)
                del self._free_since[node]
        return given

    def move(self, now: float) -> dict[int, int | None]:
        """Take an adopted node from a machine that has several, and give it to a fresh machine.

        Nothing moves while a node is free. One node moves at a time: the caller knows when the
        job can lose one.

        Returns:
            By connection, the node that an agent has now; None: it has it no more. Or nothing.
        """
        if now < self.knows_all_from or not all(map(self._is_held, range(self._num_nodes))):
            return {}
        crowd = self._crowd()
        visits = {agent.token: visit for visit, agent in self._agents.items()}
        guests = [
            (self._held_since[node], node, visits[holder])
            for node, holder in self._holders.items()
            if holder in visits and self._is_guest(self._agents[visits[holder]], crowd)
        ]
        for _, node, visit in sorted(guests, reverse=True):
            for other, agent in self._idle().items():
                is_steady = agent.token in self._ready and now >= agent.since + STEADY_SECONDS
                if is_steady and not crowd[agent.machine] and agent.only in (None, node):
                    self._give(node, other, now)
                    return {visit: None, other: node}
        return {}

    def hand_on(self, token: str, now: float) -> dict[int, int]:
        """Give the node of an agent whose workers died to one on its machine whose workers wait.

        Returns:
            The node, by connection; or nothing.
        """
        self._ready.discard(token)
        node = self.node_of(token)
        machine = next((a.machine for a in self._agents.values() if a.token == token), None)
        for visit, agent in self._idle().items():
            is_ready = agent.machine == machine and agent.token in self._ready
            if node is not None and is_ready and agent.only in (None, node):
                self._give(node, visit, now)
                return {visit: node}
        return {}

    def _give(self, node: int, visit: int, now: float) -> None:
        self._holders[node], self._held_since[node] = self._agents[visit].token, now

    def _is_guest(self, agent: Agent, crowd: Counter[str]) -> bool:
        return agent.adopt_seconds > 0 and agent.only is None and crowd[agent.machine] > 1

    def _crowd(self) -> Counter[str]:
        """Return how many nodes machines have."""
        holding = set(self._holders.values())
        return Counter(a.machine for a in self._agents.values() if a.token in holding)

    def _idle(self) -> dict[int, Agent]:
        holding = set(self._holders.values())
        return {visit: a for visit, a in self._agents.items() if a.token not in holding}

    @property
    def _num_nodes(self) -> int:
        return next((agent.num_nodes for agent in self._agents.values()), 0)

    def _is_held(self, node: int) -> bool:
        holder = self._holders.get(node)
        if any(agent.token == holder for agent in self._agents.values()):
            return True
        # If most are cut off, it is rather this side that is.
        gone = self._cut_off.intersection(self._holders.values())
        return holder in gone and len(gone) >= len(self._agents)

    def _choose(self, node: int, now: float) -> int | None:
        crowd, idle = self._crowd(), self._idle()
        others = {self._holders.get(other) for other in self._apart[node]}
        risky = {a.machine for a in self._agents.values() if a.token in others}

        def may_have(agent: Agent) -> bool:
            if agent.had == node:
                return True
            if agent.only not in (None, node) or now < self.knows_all_from:
                return False
            is_fresh = agent.only == node or not crowd[agent.machine]
            return is_fresh or now >= self._free_since[node] + agent.adopt_seconds

        def rank(visit: int) -> tuple[bool, bool, bool, bool, int, float]:
            agent = idle[visit]
            is_bound, is_crowded = agent.only == node, crowd[agent.machine] > 0
            is_risky = agent.machine in risky
            order = (is_crowded, is_risky, crowd[agent.machine], agent.since)
            return agent.had != node, not is_bound, *order

        return min((visit for visit, a in idle.items() if may_have(a)), key=rank, default=None)
