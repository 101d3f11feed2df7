"""Who has which node, without any process."""

import pytest

from cpr_ext.distributed.rendezvous.meeting import MeetingError
from cpr_ext.distributed.rendezvous.nodes import Agent, Nodes


def come(nodes, visit, *, machine=None, now=0.0, num_nodes=2, **more):
    token = f"agent {visit}"
    nodes.attend(Agent(token, num_nodes, machine or f"machine {visit}", now, **more), visit)


def some(number, num_nodes=2):
    """Agents, the first of which have the nodes."""
    nodes = Nodes()
    for visit in range(number):
        come(nodes, visit, num_nodes=num_nodes)
    assert nodes.assign(0.0) == {visit: visit for visit in range(num_nodes)}
    return nodes


def returns(nodes, visit=3):
    nodes.attend(Agent("agent 1", 2, "machine 1", 2.0, had=1), visit)


def test_nodes_go_to_agents_as_they_come_and_the_others_stand_by():
    nodes = some(3)
    assert nodes.assign(4.0) == {}
    assert [nodes.node_of(f"agent {visit}") for visit in range(3)] == [0, 1, None]
    nodes.leave(1)
    assert nodes.assign(5.0) == {2: 1}
    returns(nodes)  # it stands by, and hears that another has its node
    assert nodes.assign(6.0) == {}
    assert [nodes.is_replaced(visit) for visit in (0, 2, 3)] == [False, False, True]


def test_an_agent_that_returns_before_a_standby_came_keeps_its_node():
    nodes = some(2)
    nodes.leave(1)
    returns(nodes)
    assert nodes.assign(2.0) == {}
    assert nodes.node_of("agent 1") == 1


def test_a_host_that_was_started_again_waits_for_agents_that_have_nodes():
    nodes = Nodes(knows_all_from=5.0)
    come(nodes, 0, now=1.0)
    come(nodes, 1, now=2.0, had=0)
    assert nodes.assign(2.0) == {1: 0}
    assert nodes.assign(4.9) == {}
    assert nodes.assign(5.0) == {0: 1}


def test_an_agent_that_takes_one_node_only_comes_before_others():
    nodes = Nodes()
    come(nodes, 0, now=0.0), come(nodes, 1, now=1.0, only=0)
    assert nodes.assign(1.0) == {1: 0, 0: 1}
    nodes.leave(0)
    come(nodes, 2, now=2.0, only=0)
    assert nodes.assign(2.0) == {}


def test_a_fresh_machine_comes_before_a_crowded_one_which_waits_as_long_as_it_says():
    nodes = Nodes()
    for visit in (0, 1):
        come(nodes, visit, machine="a", now=visit, adopt_seconds=5.0)
    assert nodes.assign(1.0) == {0: 0}
    assert nodes.assign(5.9) == {}
    come(nodes, 2, machine="b", now=5.9, adopt_seconds=5.0)
    assert nodes.assign(5.9) == {2: 1}
    nodes.leave(2)
    assert nodes.assign(10.0) == {}
    assert nodes.assign(15.0) == {1: 1}


def test_nodes_of_those_that_are_cut_off_are_given_away_by_a_majority_only():
    for num_cut_off, given in ((1, 1), (2, 0)):
        nodes = some(4, num_nodes=3)
        for visit in range(num_cut_off):
            nodes.leave(visit, is_cut_off=True)
        assert len(nodes.assign(1.0)) == given


def test_machines_that_vanished_and_were_replaced_count_no_more():
    nodes = some(9)
    for visit in range(7):  # one after the other, until two agents are left
        nodes.leave(visit, is_cut_off=True)
        assert len(nodes.assign(1.0)) == 1
    assert {nodes.node_of("agent 7"), nodes.node_of("agent 8")} == {0, 1}


def test_the_node_of_dead_workers_goes_to_an_agent_beside_them_whose_workers_wait():
    nodes = Nodes()
    come(nodes, 0, machine="here"), come(nodes, 1, machine="there")
    come(nodes, 2, machine="there"), come(nodes, 3, machine="here")
    nodes.assign(0.0)
    for visit in range(3):
        nodes.note_ready(f"agent {visit}")
    assert nodes.hand_on("agent 0") == {}  # nobody waits beside it
    nodes.note_ready("agent 3")
    assert nodes.hand_on("agent 0") == {3: 0}
    assert nodes.node_of("agent 0") is None
    assert nodes.hand_on("agent 3") == {}  # the workers of agent 0 do not wait yet
    assert nodes.hand_on("agent 0") == {}


def test_agents_that_do_not_fit_are_refused_and_the_end_is_for_those_that_are_there():
    nodes = Nodes()
    come(nodes, 0)
    with pytest.raises(MeetingError, match="there are 3 nodes, others say 2; give all the same"):
        come(nodes, 1, num_nodes=3)
    with pytest.raises(MeetingError, match="no node 2 of 2: they count from 0"):
        come(nodes, 1, only=2)
    come(nodes, 1)
    nodes.end()
    come(nodes, 2)
    assert [nodes.is_over(f"agent {visit}") for visit in range(3)] == [True, True, False]
