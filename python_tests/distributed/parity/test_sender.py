"""The thread that trades deltas: what it promises the training thread, also when members leave."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from cpr_ext.distributed.collective.connections import close_connections
from cpr_ext.distributed.parity import exchange, row_requests
from cpr_ext.distributed.parity.sender import Sender
from cpr_ext.errors import PeerLostError
from cpr_ext.saving.metrics import ParityMetrics
from python_tests.distributed.parity.members import Trainer, connected, formed, holding, together

PAIR = (4, 7)  # ranks


@pytest.fixture
def pair(tmp_path):
    """Trainers, what each holds of the other, and their senders: a mirror."""
    torch.manual_seed(0)
    trainers = [Trainer(tmp_path / str(n), parts=1, seed=n) for n in range(2)]
    held = [holding(trainers[0].own.layout.num_words, other) for other in PAIR[::-1]]
    for trainer in trainers:
        trainer.own.begin(0)
    senders = [
        Sender(
            *(group, PAIR, trainer.own, parity, trainer.own.log, ParityMetrics()),
            partial(close_connections, [addresses]),
        )
        for trainer, parity, (group, addresses) in zip(trainers, held, formed(2), strict=True)
    ]
    yield trainers, held, senders
    for sender in senders:
        sender.stop()


def train(pair, step, *members):
    """A step of these members, or of both."""
    for n in members or (0, 1):
        pair[0][n].train(step)
        pair[2][n].submit(step)


def test_at_the_end_no_delta_is_under_way(pair):
    _, held, senders = pair
    senders[0].wait_until_sent()  # nothing was submitted
    train(pair, 1, 0)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(senders[0].wait_until_sent)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        train(pair, 1, 1)
        waiting.result(60)
    assert senders[0].acknowledged == held[0].logs[PAIR[1]].newest == 1
    senders[1].stop()
    train(pair, 2, 0)
    with pytest.raises(PeerLostError):
        senders[0].wait_until_sent()


def test_nothing_is_applied_once_a_sender_has_stopped(pair):
    """The other's wait ends, also one that has begun."""
    _, held, senders = pair
    train(pair, 1, 1)
    leaver = threading.Timer(0.3, senders[0].stop)
    leaver.start()
    with pytest.raises(PeerLostError, match=r"parity group \[4, 7\]"):
        senders[1].wait_until(lambda acked: acked >= 1)
    leaver.join()
    train(pair, 1, 0)
    assert held[0].logs[PAIR[1]].newest == 0
    assert not any(parity.words.any() for parity in held)
    with pytest.raises(PeerLostError, match="the round has ended"):
        senders[0].wait_until(lambda acked: acked >= 1)


def test_members_at_different_steps_are_an_error():
    def send(rank, group):
        with pytest.raises(RuntimeError, match=r"different steps: \[3, 4\]"):
            exchange.exchange(group, 3 + rank, exchange.Message(True, {}))

    together(*(partial(send, *member) for member in enumerate(connected(2))))


@pytest.mark.parametrize("direct_words", [0, 7, 1 << 16], ids=["ring", "mixed", "direct"])
def test_an_xor_over_the_group_reaches_its_root_in_pieces(monkeypatch, direct_words):
    monkeypatch.setattr(exchange, "_CHUNK_WORDS", 10)
    monkeypatch.setattr(exchange, "_DIRECT_WORDS", direct_words)
    values = torch.randint(-(2**62), 2**62, (3, 25))
    got = torch.zeros(25, dtype=torch.int64)

    def call(rank, group):
        exchange.xor_over_group(
            *(group, (3, 25), 1),
            lambda begin, words: words.copy_(values[rank, begin : begin + words.numel()]),
            lambda begin, words: got[begin : begin + words.numel()].copy_(words),
        )

    together(*(partial(call, *member) for member in enumerate(connected(3))))
    assert torch.equal(got[3:], (values[0] ^ values[1] ^ values[2])[3:])
    assert not got[:3].any()


def late(seconds, call):
    time.sleep(seconds)
    return call()


def test_members_wait_for_a_late_one_as_long_as_for_a_collective():
    """Not only as long as they may take to connect."""
    groups = connected(3, connect_seconds=1.0)
    calls = [partial(exchange.gather_numbers, groups[rank], [rank]) for rank in range(3)]
    calls[0] = partial(late, 1.5, calls[0])
    assert together(*calls) == [[[0], [1], [2]]] * 3

    def give(rank):
        words = {other: torch.full((3,), rank) for other in range(3) if other != rank}
        message = exchange.Message(True, words, (torch.ones(9).byte(),) * 3)
        found = exchange.exchange(groups[rank], 1, message)
        return {other: message.words[rank].tolist() for other, message in found.items()}

    found = together(partial(give, 0), partial(give, 1), partial(late, 1.5, partial(give, 2)))
    assert found == [{m: [m] * 3 for m in range(3) if m != rank} for rank in range(3)]
    asks = [partial(row_requests.exchange_request, group, 1, None) for group in groups]
    assert together(asks[0], partial(late, 1.5, asks[1]), asks[2]) == [None] * 3


@pytest.mark.parametrize("direct_words", [0, 1 << 16], ids=["ring", "direct"])
def test_whoever_waits_for_an_xor_hears_of_a_member_that_leaves(monkeypatch, direct_words):
    monkeypatch.setattr(exchange, "_DIRECT_WORDS", direct_words)
    groups = connected(3)

    def leave():
        time.sleep(0.2)
        groups[1] = None

    def wait(group):
        with pytest.raises(PeerLostError, match="gloo"):
            exchange.xor_to_root(group, 0, torch.zeros(5, dtype=torch.int64))

    root = groups[0]
    together(leave, lambda: wait(root))


def test_a_request_reaches_all_members_whatever_its_length():
    groups, long = connected(2), row_requests._SHORT_WORDS + 1

    def ask(*own):
        asks = zip(groups, own, strict=True)
        return together(*(partial(row_requests.exchange_request, g, 1, each) for g, each in asks))

    for words in (*map(torch.arange, (0, 3, long - 1, long)), None):
        own = row_requests.RowRequest(words)
        found = ask(None, own)
        assert found[1] is own
        assert found[0].words is None if words is None else torch.equal(found[0].words, words)
    assert ask(None, None) == [None, None]


def test_rows_are_described_by_the_parts_that_hold_them():
    request = row_requests.describe_rows([0, 10, 10, 40], torch.tensor([2, 8, 10, 13]), 3)
    assert request.tolist() == [0, 3, 2, 2, 8, 2, 3, 2, 0, 3]
