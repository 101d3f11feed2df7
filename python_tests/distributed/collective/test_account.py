"""The account of lost samples, beside a model that knows the fate of every sample."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.collective.recovery_decision import Status, decide

BATCH = 2


class Process:
    """What one process knows: its position and rows if it is live, and what it has told."""

    def __init__(self, world_size):
        self.is_live, self.samples, self.rows = False, 0, frozenset()
        self.account = None
        self.told = [0] * world_size
        self.known = None  # by rank, what was lost before anybody told this process


class World:
    """Workers, their stores, and of which samples the rows of each worker have the effect."""

    def __init__(self, world_size):
        self.size = world_size
        self.processes = [Process(world_size) for _ in range(world_size)]
        self.stores = [(0, frozenset())] * world_size
        self.agreed = 0  # where all have met
        self.recover()

    def train(self, behind=()):
        """A step; workers ``behind`` are interrupted in it, so that a recovery must follow."""
        for rank, process in enumerate(self.processes):
            if rank not in behind:
                new = range(process.samples, process.samples + BATCH)
                process.samples, process.rows = process.samples + BATCH, process.rows | set(new)

    def save(self, rank):
        process = self.processes[rank]
        self.stores[rank] = (process.samples, process.rows)

    def lose(self, ranks):
        for rank in ranks:
            self.processes[rank] = Process(self.size)

    def recover(self, incomplete=()):
        """All meet; a death at the end leaves the processes ``incomplete`` as they were."""
        empty = LossAccount.empty(self.size)
        decision = decide(
            [
                Status(p.is_live, p.samples if p.is_live else self.stores[rank][0], (), "partial",
                       p.account or empty)
                for rank, p in enumerate(self.processes)
            ]
        )  # fmt: skip
        samples, held = decision.step, []
        # Else all go back, and train other samples of the same numbers: see the last test.
        assume(samples >= self.agreed)
        self.agreed = samples
        for rank, process in enumerate(self.processes):
            if not process.is_live:
                process.samples, process.rows = self.stores[rank]
            held.append(process.samples)
        for process in self.processes:
            if process.account is None:
                process.account = decision.account
                process.known = self.known_to(decision)
        for rank, process in enumerate(self.processes):
            if rank not in incomplete:
                account = decision.account.going_back_to(samples).add(held, samples)
                lost = account.beyond(process.account.going_back_to(samples))
                process.account = account
                process.told = [a + b for a, b in zip(process.told, lost, strict=True)]
                process.is_live, process.samples = True, samples

    def known_to(self, decision):
        """What a new process takes for told: what others count, and older holes that they know."""
        veterans = [process for process in self.processes if process.known is not None]
        if not veterans:
            return [set(range(at)) - rows for at, rows in self.stores]
        counted = [
            {sample for begin, end in spans for sample in range(begin, end)}
            for spans in decision.account.counted
        ]
        return [
            told.union(*(process.known[rank] for process in veterans))
            for rank, told in enumerate(counted)
        ]

    def check(self):
        for process in self.processes:
            for rank, other in enumerate(self.processes):
                missing = set(range(other.samples)) - other.rows
                assert process.told[rank] == len(missing - process.known[rank])


@st.composite
def stories(draw):
    size = draw(st.integers(1, 4))
    ranks = st.sets(st.integers(0, size - 1))
    event = st.one_of(
        st.tuples(st.just("train"), st.integers(1, 3)),
        st.tuples(st.just("save"), st.integers(0, size - 1)),
        st.tuples(st.just("lose"), ranks, ranks, st.lists(st.tuples(ranks, ranks), max_size=2)),
    )
    return size, draw(st.lists(event, max_size=30))


@settings(max_examples=400, deadline=None)
@given(stories())
def test_every_process_tells_each_lost_sample_once_in_any_order_of_losses(story):
    size, events = story
    world = World(size)
    for event in events:
        if event[0] == "train":
            for _ in range(event[1]):
                world.train()
        elif event[0] == "save":
            world.save(event[1])
        else:
            _, victims, behind, interruptions = event
            world.train(behind - victims)
            world.lose(victims)
            for more_victims, incomplete in interruptions:
                world.recover(incomplete | more_victims)
                world.lose(more_victims)
            world.recover()
            world.check()
    world.recover()
    world.check()


def test_a_job_that_goes_back_tells_nothing_of_samples_that_it_trains_again():
    """Workers 0 and 2 trained and told of the rows that the others lack; then both were lost."""
    told = LossAccount.empty(3).add([2, 0, 2], 2)
    waiting = LossAccount.empty(3)  # worker 1 was not there when they told
    again = told.united(waiting).going_back_to(0).add([0, 0, 0], 0)
    assert again.beyond(waiting.going_back_to(0)) == (0, 0, 0)
    account = LossAccount.empty(2).add([10, 40], 60)
    assert account.going_back_to(50).counted == (((10, 50),), ((40, 50),))
    assert account.going_back_to(10).counted == ((), ())
