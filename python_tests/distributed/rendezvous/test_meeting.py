"""Who waits at the rendezvous, and when a round is complete; who gets a rank: test_fencing.py."""

import pytest

from cpr_ext.distributed.rendezvous.meeting import (
    FIND_SECONDS,
    Claim,
    Meeting,
    MeetingError,
    SupersededError,
    UnknownRoundError,
)

LEASE = 5.0


def come(meeting, rank, token=None, *, now=0.0, visit=None, world_size=2, member=None, **shown):
    """One process waits; by default each token is another process, but "again-" are the same."""
    token = token or f"token-{rank}"
    member = member or token.removeprefix("again-").replace("token-", "")
    claim = Claim(rank, world_size, member, who=f"the process of {token}", **shown)
    visit = rank if visit is None else visit
    meeting.meet(claim, token, lease_seconds=LEASE, visit=visit, now=now)
    return meeting.is_member(token)


def test_a_round_is_complete_once_all_wait():
    meeting = Meeting()
    assert not come(meeting, 1)
    assert meeting.missing(2, 0.0) == [0]
    assert come(meeting, 0)
    assert meeting.is_member("token-1")
    first = meeting.round_id
    assert come(meeting, 0)  # one that asks again does not wait for the next round
    assert meeting.missing(2, 0.0) == [0, 1]
    # That one needs all of them again.
    assert not come(meeting, 0, "again-0")
    assert meeting.missing(2, 0.0) == [1]
    assert come(meeting, 1, "again-1")
    assert meeting.round_id != first
    assert not meeting.is_member("token-1")


def meet_as_three(meeting, prefix="again-", ranks=(0, 1, 2)):
    for rank in ranks:
        come(meeting, rank, f"{prefix}{rank}", member=str(rank), world_size=3)
    return all(meeting.is_member(f"{prefix}{rank}") for rank in ranks)


def test_a_place_is_given_away_only_if_its_holder_is_gone():
    meeting = Meeting()
    assert meet_as_three(meeting, prefix="first-")
    assert not meeting.take_over(2, "2", visit=9, now=0.0)  # it is connected
    assert not meeting.take_over(2, "1", visit=9, now=0.0)  # the lock is of another process
    meeting.leave(2, 0.0)
    assert meeting.take_over(2, "2", visit=9, now=0.0)
    assert not meeting.take_over(2, "2", visit=8, now=0.0)  # one at a time
    with pytest.raises(SupersededError):
        come(meeting, 2, "late", member="2", world_size=3, epoch=1)
    meeting.leave(9, 0.0)
    assert meeting.take_over(2, "2", visit=8, now=0.0)
    assert not meet_as_three(meeting, ranks=(0, 1))
    assert come(meeting, 2, "new", member="new", world_size=3, visit=8)


def test_who_closes_its_connection_or_is_silent_for_longer_than_its_lease_waits_no_more():
    meeting = Meeting()
    come(meeting, 0, visit=7)
    meeting.leave(8, 0.0)
    assert meeting.missing(2, 0.0) == [1]
    meeting.leave(7, 0.0)
    assert meeting.missing(2, 0.0) == [0, 1]
    come(meeting, 0, now=0.0)
    assert not come(meeting, 1, now=LEASE + 0.1)
    assert meeting.missing(2, LEASE + 0.1) == [0]
    assert come(meeting, 0, now=LEASE + 0.2)


def test_of_two_processes_of_one_rank_the_second_is_refused_unless_the_first_is_silent():
    meeting = Meeting()
    come(meeting, 1, "first", now=0.0)
    assert not come(meeting, 1, "second", now=1.0)
    assert not come(meeting, 1, "first", now=1.5)
    with pytest.raises(MeetingError, match="two processes are worker 1"):
        come(meeting, 1, "second", now=2.0)
    for now in (2.5, 3.5, 4.5, 5.5, 6.4, 6.6):
        come(meeting, 1, "replacement", now=now)
    assert come(meeting, 0, now=6.7)
    assert [meeting.is_member(each) for each in ("replacement", "first")] == [True, False]


def test_workers_that_disagree_on_their_number_are_told_so_and_epochs_grow_beyond_any_stores():
    meeting = Meeting()
    come(meeting, 0, world_size=2, seen=7)
    with pytest.raises(MeetingError, match="worker 1 says that there are 3 workers, others say 2"):
        come(meeting, 1, world_size=3)
    with pytest.raises(MeetingError, match="worker 2 of 2 cannot be"):
        come(meeting, 2, world_size=2)
    come(meeting, 1)
    assert meeting.epoch == 8


def met():
    """A job in its first round: member "0" has rank 0, on connection 0."""
    meeting = Meeting()
    come(meeting, 0), come(meeting, 1)
    assert meeting.epoch == 1
    return meeting, {"epoch": 1, "roster": meeting.roster}


def test_who_holds_a_rank_is_named_and_who_was_replaced_is_told_so():
    meeting, first = met()
    meeting.leave(0, 1.0)  # worker 0 dies
    assert not come(meeting, 0, "replacement", visit=10, now=1.0)
    assert not come(meeting, 1, "intruder", visit=9, now=1.0)
    assert meeting.held_by(Claim(1, 2, "intruder")) == "the process of token-1"
    assert come(meeting, 1, "again-1", now=1.0, **first)
    assert [meeting.is_member(each) for each in ("replacement", "intruder")] == [True, False]
    assert (meeting.epoch, meeting.roster) == (2, ("replacement", "1"))
    for now in (2.0, 100.0):
        replaced = r"worker 0 was replaced .* in round 1, and in a later"
        with pytest.raises(SupersededError, match=replaced):
            come(meeting, 0, "again-0", visit=11, now=now, **first)
    second = {"epoch": 2, "roster": meeting.roster}
    restarted = Meeting(knows_all_from=FIND_SECONDS)
    with pytest.raises(UnknownRoundError):
        come(restarted, 1, "again-1b", visit=1, epoch=2)
    assert restarted.held_by(Claim(1, 2, "intruder")) == ""  # as far as is known
    assert not come(restarted, 1, "again-1b", visit=1, member="1", now=1.0, **second)
    assert come(restarted, 0, "again", visit=3, member="replacement", now=FIND_SECONDS, **second)
    assert restarted.epoch == 3
    restarted = Meeting()
    assert not come(restarted, 0, "again-0", visit=12, **first)  # it cannot know better yet
    assert not come(restarted, 1, "again-1c", visit=1, member="1", **second)
    assert restarted.missing(2, 0.0) == [0]


def test_a_process_has_the_place_of_one_that_this_host_never_heard_of():
    _, first = met()
    meeting, newcomer = Meeting(knows_all_from=FIND_SECONDS), Claim(1, 2, "replacement")
    assert not meeting.replaces_unheard(newcomer, FIND_SECONDS)  # no round is known
    meeting.arrive(Claim(0, 2, "0", **first), visit=0, now=1.0)
    assert not meeting.replaces_unheard(newcomer, 2.9)  # its holder may return
    assert meeting.replaces_unheard(newcomer, FIND_SECONDS)
    assert not meeting.replaces_unheard(Claim(1, 2, "1", **first), FIND_SECONDS)  # it is that one
    meeting.arrive(Claim(1, 2, "1", **first), visit=1, now=3.5)
    meeting.leave(1, 4.0)  # its end was noticed here
    assert not meeting.replaces_unheard(newcomer, 5.0)
