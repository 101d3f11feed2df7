"""Who waits at the rendezvous, and when a round is complete."""

import pytest

from cpr_ext.distributed.rendezvous.meeting import Meeting, MeetingError

LEASE = 5.0


def come(meeting, rank, token=None, *, now=0.0, visit=None, world_size=2):
    token = token or f"token-{rank}"
    meeting.meet(
        rank,
        world_size,
        token,
        lease_seconds=LEASE,
        visit=rank if visit is None else visit,
        now=now,
    )
    return meeting.is_member(token)


def test_a_round_is_complete_once_all_wait():
    meeting = Meeting()
    assert not come(meeting, 1)
    assert meeting.missing(2, 0.0) == [0]
    assert come(meeting, 0)
    assert meeting.is_member("token-1")
    first = meeting.round_id
    assert first
    # The next round needs all of them again.
    assert not come(meeting, 0, "again-0")
    assert meeting.missing(2, 0.0) == [1]
    assert come(meeting, 1, "again-1")
    assert meeting.round_id != first
    assert not meeting.is_member("token-1")


def test_a_member_that_asks_again_is_not_waiting_for_the_next_round():
    meeting = Meeting()
    come(meeting, 0), come(meeting, 1)
    assert come(meeting, 0)
    assert meeting.missing(2, 0.0) == [0, 1]


def test_who_closes_its_connection_waits_no_more():
    meeting = Meeting()
    come(meeting, 0, visit=7)
    meeting.leave(8)
    assert meeting.missing(2, 0.0) == [1]
    meeting.leave(7)
    assert meeting.missing(2, 0.0) == [0, 1]
    assert not come(meeting, 1)


def test_who_is_silent_for_longer_than_its_lease_waits_no_more():
    meeting = Meeting()
    come(meeting, 0, now=0.0)
    assert not come(meeting, 1, now=LEASE + 0.1)
    assert meeting.missing(2, LEASE + 0.1) == [0]
    assert come(meeting, 0, now=LEASE + 0.2)


def test_of_two_living_processes_of_one_rank_the_second_is_refused():
    meeting = Meeting()
    come(meeting, 1, "first", now=0.0)
    assert not come(meeting, 1, "second", now=1.0)
    assert not come(meeting, 1, "first", now=1.5)
    with pytest.raises(MeetingError, match="two processes are worker 1"):
        come(meeting, 1, "second", now=2.0)
    come(meeting, 0, now=2.0)
    assert meeting.is_member("first")


def test_the_replacement_of_a_process_that_vanished_silently_takes_its_seat():
    meeting = Meeting()
    come(meeting, 1, "vanished", now=0.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 5.1):
        come(meeting, 1, "replacement", now=now)
    assert come(meeting, 0, now=5.2)
    assert meeting.is_member("replacement")
    assert not meeting.is_member("vanished")


def test_workers_that_disagree_on_their_number_are_told_so():
    meeting = Meeting()
    come(meeting, 0, world_size=2)
    with pytest.raises(MeetingError, match="worker 1 says that there are 3 workers, others say 2"):
        come(meeting, 1, world_size=3)
    with pytest.raises(MeetingError, match="worker 2 of 2 cannot be"):
        come(meeting, 2, world_size=2)
