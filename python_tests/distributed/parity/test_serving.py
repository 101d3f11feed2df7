"""A worker trains while it is rebuilt: members in threads, one of them replaced."""

import threading
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import cpr_ext
from cpr_ext.distributed import Identity, Parity
from cpr_ext.distributed.collective import process_group
from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.collective.process_group import Round
from cpr_ext.distributed.collective.recovery_decision import Encode, Rebuild, Return, Status, decide
from cpr_ext.distributed.parity import encoding
from cpr_ext.distributed.parity.encoding import BackgroundEncoding
from cpr_ext.distributed.parity.member import ParityMember
from cpr_ext.distributed.parity.missing_rows import MissingRows
from cpr_ext.distributed.parity.protocol import Piece
from cpr_ext.errors import PeerLostError, UntrackedChangeWarning
from python_tests.distributed.parity.members import DIM, ROWS, Trainer, together
from python_tests.faults.memory_meter import MemoryMeter

GROUP = (0, 1, 2)
MACHINES = ("127.0.0.1",) * 3
NO_LOSSES = LossAccount.empty(3)
LOST = 1


class Reader(torch.nn.EmbeddingBag):
    """A kind whose lookups are not seen."""

    def forward(self, *arguments):
        return super().forward(*arguments)


class Member(Trainer):
    """A worker without the collectives of training.

    Args:
        unseen: the tables whose lookups are not seen.
    """

    def __init__(self, directory, rank, *, is_replacement=False, member=None, unseen=()):
        super().__init__(directory, seed=rank + 10 * is_replacement)
        for name in unseen:
            self.model[name].__class__ = Reader
        self.rank, self.fetched, self.is_replacement = rank, [], is_replacement
        with torch.no_grad():
            for value in self.model["dense"].parameters():
                value.fill_(0.5)
        identity = Identity(rank, 3, "localhost", 1, secret="known to the workers of this job only")
        parity = Parity(group_size=3, rebuild_bytes_per_second=1)
        self.member = member or ParityMember(identity, parity)
        self.member.attach(self.checkpointer)
        self.own = self.member._own
        right = self.own.missing.fetch

        def fetch(number, row_ids):
            self.fetched.append((number, row_ids.tolist()))
            right(number, row_ids)

        self.own.missing.fetch = fetch

    def values(self, step):
        generator = torch.Generator().manual_seed(100 * self.rank + step)
        return torch.rand(4, DIM + 5, generator=generator)

    def exchange(self, step):
        for value in self.model["dense"].parameters():
            value.grad.fill_(step)

    def finish(self, step):
        self.member.wait_until_rows_may_change()
        self.checkpointer.step(4)
        self.member.finish_step(step)

    def train_to(self, step):
        while self.checkpointer.step_count < step:
            self.train(self.checkpointer.step_count + 1)

    def begin(self, this_round):
        self.member.connect(this_round, MACHINES)
        self.member.encode(Encode(GROUP, begins=True), 0, None)

    def recover(self, this_round, decision, share):
        self.member.connect(this_round, MACHINES)
        for step in decision.steps:
            match step:
                case Return(state=state) if not self.is_replacement:
                    self.member.return_to(state)
                case Rebuild():
                    self.member.rebuild(step, share)
                case Encode():
                    self.member.encode(step, decision.step, None)
        self.train_to(decision.step)


class Job:
    """Members and, beside each, a worker that nobody kills."""

    def __init__(self, directory):
        self.directory, self.rounds = directory, 0
        self.members = [Member(directory / str(rank), rank) for rank in GROUP]
        this_round = self.next_round()
        together(*(partial(member.begin, this_round) for member in self.members))

    def next_round(self):
        self.rounds += 1
        self.round = Round(HashStore(), timedelta(seconds=60), "127.0.0.1")
        return self.round

    def train_to(self, step):
        together(*(partial(member.train_to, step) for member in self.members))

    def stop(self):
        together(*(member.member.stop for member in self.members))

    def replace(self, rank, **options):
        """End the round, and begin another one with a replacement of one member."""
        self.stop()
        old = self.members[rank]
        old.checkpointer.session.events.listeners.clear()
        directory = self.directory / f"replacement-{self.rounds}"
        self.members[rank] = Member(directory, rank, is_replacement=True, **options)
        return self.recover()

    def recover(self):
        reports = [m.member.report(is_live=not m.is_replacement) for m in self.members]
        statuses = [
            Status(r.own is not None, r.own.newest if r.own else 0, (), "exact", NO_LOSSES, r)
            for r in reports
        ]
        decision, this_round = decide(statuses, [GROUP]), self.next_round()
        assert decision.recovery == "exact"
        whole = Future()

        def share(part):
            if part is not None:
                whole.set_result(part)
            return whole.result(timeout=60)

        together(*(partial(m.recover, this_round, decision, share) for m in self.members))
        for member in self.members:
            member.is_replacement = False
        return decision.step


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_LEAST_WORDS", 20)  # of 185, so that it takes some steps
    job = Job(tmp_path / "job")
    yield job
    job.stop()


@pytest.fixture
def right(tmp_path):
    """Workers that nobody kills, by rank."""
    members = [Member(tmp_path / f"right-{rank}", rank) for rank in GROUP]
    for member in members:
        member.own.begin(0, None)
    return members


def require_right(job, right, step):
    for member, expected in zip(job.members, right, strict=True):
        expected.train_to(step)
        assert torch.equal(member.words(), expected.words()), member.rank
        assert torch.equal(member.model["dense"].weight, expected.model["dense"].weight)


def test_a_replacement_trains_while_it_is_rebuilt_bit_for_bit(job, right):
    """Its lookups get what they need first, the rest comes in ranges; then all are protected."""
    job.train_to(2)
    state = job.replace(LOST)
    job.train_to(state + 2)
    assert job.members[LOST].own.missing.is_any
    state = job.replace(LOST)  # lost in turn, it is rebuilt from what it had changed
    assert state in (2, 3, 4)
    replacement = job.members[LOST]
    assert replacement.own.missing.is_any
    assert replacement.member.has_spoiled_rows
    job.train_to(state + 3)
    assert replacement.own.missing.is_any
    assert len({number for number, _ in replacement.fetched}) == 2
    assert [member.fetched for member in job.members if member.rank != LOST] == [[], []]
    job.train_to(25)
    assert not replacement.own.missing.is_any
    assert not replacement.member.has_spoiled_rows
    assert all(member.member._metrics.protected for member in job.members)
    require_right(job, right, 25)
    assert job.replace(0) in (24, 25)  # from parity that the first replacement encoded
    job.train_to(30)
    job.members[0].member._late.complete()
    require_right(job, right, 30)


def test_who_waits_for_a_holder_hears_that_the_round_is_over(job, monkeypatch):
    """Gloo does not end what waits for the rest of a message, though the connection has ended."""
    job.train_to(2)
    waits = job.members[0]
    with monkeypatch.context() as amid_a_message:
        amid_a_message.setattr(process_group, "close_connections", lambda stores: None)
        threading.Timer(0.5, waits.member.interrupt, [job.round]).start()
        with pytest.raises(PeerLostError, match="the round has ended"):
            waits.train_to(4)


def test_a_snapshot_waits_for_all_rows_and_one_that_is_asked_for_gets_them(job, right):
    job.train_to(3)
    state = job.replace(LOST)
    replacement = job.members[LOST]
    saver = replacement.checkpointer._saver
    replacement.checkpointer.schedule = cpr_ext.EverySteps(1)
    job.train_to(state + 2)
    assert saver.begin_if_due() is None
    assert replacement.own.missing.is_any
    step = replacement.optimizers[0].step

    def step_and_save():
        step()
        replacement.handle = replacement.checkpointer.save("base")
        replacement.optimizers[0].step = step

    replacement.optimizers[0].step = step_and_save
    job.train_to(state + 3)
    assert replacement.own.missing.is_any
    assert replacement.handle.state == "requested"  # in a step, it waits for all rows
    replacement.checkpointer.save("base")
    assert not replacement.own.missing.is_any
    job.train_to(state + 4)
    assert replacement.handle.wait_until_done(60)
    require_right(job, right, state + 4)


def test_rows_that_are_read_past_the_modules_end_the_step_and_are_rebuilt_first(job, right):
    job.train_to(3)
    state = job.replace(LOST)
    replacement = job.members[LOST]
    weight = replacement.model["large"].weight
    torch.nn.functional.embedding_bag(
        torch.arange(ROWS).view(1, ROWS), weight, sparse=True
    ).sum().backward()
    with pytest.raises(PeerLostError, match=r"table 'large'.*were read past its modules"):
        replacement.optimizers[0].step()
    replacement.optimizers[0].zero_grad()
    assert job.replace(LOST, member=replacement.member) == state  # as its rows are spoiled
    replacement = job.members[LOST]
    assert not replacement.own.missing.is_any
    job.train_to(state + 3)
    assert replacement.fetched == []
    require_right(job, right, state + 3)


def errors_of(job):
    """Those with which members stop training."""
    errors = []

    def train(member):
        try:
            member.train_to(60)
        except PeerLostError as error:
            errors.append(str(error))
            member.member.stop()

    together(*(partial(train, member) for member in job.members))
    return errors


def test_a_peer_whose_rows_change_outside_its_optimizer_ends_the_rebuild(job):
    job.train_to(8)  # PyTorch's counters are known then
    job.replace(LOST)
    with torch.no_grad():
        job.members[0].model["large"].weight[3] += 1.0
    with pytest.warns(UntrackedChangeWarning):
        errors = errors_of(job)
    assert any("cannot be rebuilt from their peers" in error for error in errors)
    assert job.members[LOST].member.has_spoiled_rows
    said = job.members[0].member.report(is_live=True).obstacle
    assert "was changed outside its optimizer" in said


def test_damaged_parity_is_found_before_the_group_counts_as_protected(job):
    job.train_to(3)
    job.stop()
    job.members[0].member._held.words[2] ^= 1
    state = job.replace(LOST)
    assert len(errors_of(job)) == 3
    replacement = job.members[LOST].member
    assert replacement.has_spoiled_rows
    replacement.attach(job.members[LOST].checkpointer)
    obstacle = replacement.report(is_live=False).obstacle
    assert obstacle.startswith("its rebuilt rows differ from their checksums: table"), state


@pytest.mark.parametrize("unseen", [("large", "small"), ("small",)])
def test_tables_whose_lookups_cannot_be_seen_are_rebuilt_before_training(job, right, unseen):
    job.train_to(3)
    state = job.replace(LOST, unseen=unseen)
    replacement = job.members[LOST]
    assert replacement.own.missing.is_any == (len(unseen) == 1)
    job.train_to(state + 2)
    fetched = {("large", "small")[number] for number, _ in replacement.fetched}
    assert fetched == {"large", "small"} - set(unseen)
    job.train_to(state + 25)
    require_right(job, right, state + 25)


def test_a_rebuild_begins_without_touching_memory_for_each_row():
    rows = 100_000_000
    layout = SimpleNamespace(num_words=rows, records=[(rows, 1)])
    missing, memory = MissingRows(layout, [], None), MemoryMeter()
    missing.begin()
    assert missing.find(0, torch.tensor([5, rows - 1, rows])).tolist() == [5, rows - 1]
    assert memory.grown_bytes() < 20 << 20  # two bytes were read, in pages of 2 MB perhaps


def test_a_member_wants_what_its_rate_allows(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(encoding.time, "perf_counter", lambda: now[0])
    made = BackgroundEncoding(None, [], 8_000_000, lambda: None)
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
