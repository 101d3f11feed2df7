"""Parity that is encoded in ranges while deltas arrive: right once all of it is encoded."""

import pytest
import torch

from cpr_ext.distributed.parity import encoding
from cpr_ext.distributed.parity.encoding import BackgroundEncoding
from cpr_ext.distributed.parity.group_codec import GroupCodec
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.protocol import Log, Piece
from python_tests.distributed.parity.members import Trainer, connected, together

PAIR = (0, 1)


class Member:
    """Of a mirror; trades deltas by hand."""

    def __init__(self, directory, rank, inner):
        self.trainer = Trainer(directory / str(rank), parts=1, seed=rank)
        self.trainer.own.begin(0)
        self.inner, self.held, self.noted, self.ends = inner, HeldParity(), [], []
        sizes = dict.fromkeys(PAIR, self.trainer.own.part_words)
        self.codec = GroupCodec(PAIR, rank, sizes, self.trainer.own, self.held, self.noted.append)
        self.held.words = torch.full((self.codec.parity_words(rank),), 7)  # of before
        self.held.begin(0, [1 - rank], is_encoded=False)
        pieces = [self.codec.to_encode(holder) for holder in PAIR]
        self.encoding = BackgroundEncoding(self.codec, pieces, 800, lambda: self.ends.append(1))

    def encode(self, num_words):
        state = self.trainer.own.log.newest
        return lambda: self.encoding.encode(self.inner, num_words, state)


@pytest.fixture
def members(tmp_path):
    inners = connected(2)
    return [Member(tmp_path, rank, inners.pop(0)) for rank in PAIR]


def step_of(members, step):
    for member in members:
        member.trainer.train(step)
    for rank, member in enumerate(members):
        member.held.receive(1 - rank, step, members[1 - rank].trainer.own.message(step, 0))


def test_ranges_that_are_encoded_between_steps_follow_the_deltas(members):
    words = members[0].codec.parity_words(0)
    steps = 0
    known = {}
    while not members[0].ends:
        steps += 1
        step_of(members, steps)
        known[steps] = [member.trainer.words() for member in members]
        left = together(*(member.encode(words // 3) for member in members))
        assert left == [not members[0].ends] * 2
    assert steps == 7  # two parities in thirds, and what is left
    assert [sum(member.noted) for member in members] == [16 * words] * 2
    for rank, member in enumerate(members):
        assert torch.equal(member.held.words, known[steps][1 - rank])
        member.held.is_encoded = True
        member.held.go_back(steps - 2)
        assert torch.equal(member.held.words, known[steps - 2][1 - rank])
        assert member.held.logs == {1 - rank: Log(steps - 2, steps - 2)}


def test_parity_that_is_not_all_encoded_leads_nowhere_back(members):
    step_of(members, 1)
    together(*(member.encode(10) for member in members))
    for member in members:
        member.held.go_back(0)
        assert (member.held.logs, member.held.is_encoded) == ({}, False)


def test_a_member_wants_what_its_rate_allows(members, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(encoding.time, "perf_counter", lambda: now[0])
    made = BackgroundEncoding(members[0].codec, [], 8_000_000, lambda: None)
    now[0] = 0.25
    assert made.wanted_words() == 250_000
    now[0] = 0.5
    assert made.wanted_words() == 250_000
    assert made.wanted_words() == 1024  # never nothing


def test_a_worker_counts_as_lost_until_its_rows_are_there():
    """A lookup that waits for them must not end before."""
    seen = []

    class Codec:
        def run(self, inner, piece, state):
            seen.append(made.lost)

    pieces = [Piece(1, 0, 0, 4), Piece(0, None, 0, 4)]
    made = BackgroundEncoding(
        Codec(), pieces, 1, lambda: None, lambda piece, is_last: seen.append((made.lost, is_last))
    )
    assert not made.encode(None, 100, 0)
    assert seen == [0, (0, True), None]
