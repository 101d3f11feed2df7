"""Which agent has which node of a job, and which agents stand by. No I/O; times are given.

An agent, such as torchrun's, starts the workers of one node and starts them again. It keeps its
node while it is connected. Another agent takes over the node of one that has ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cpr_ext.distributed.rendezvous.meeting import MeetingError


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
                self._holders[node] = self._agents[visit].token
                del self._free_since[node]
        return given

    def hand_on(self, token: str) -> dict[int, int]:
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
                self._holders[node] = agent.token
                return {visit: node}
        return {}

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

        def may_have(agent: Agent) -> bool:
            if agent.had == node:
                return True
            if agent.only not in (None, node) or now < self.knows_all_from:
                return False
            is_fresh = agent.only == node or not crowd[agent.machine]
            return is_fresh or now >= self._free_since[node] + agent.adopt_seconds

        def rank(visit: int) -> tuple[bool, bool, int, float]:
            agent = idle[visit]
            return agent.had != node, agent.only != node, crowd[agent.machine], agent.since

        return min((visit for visit, a in idle.items() if may_have(a)), key=rank, default=None)
