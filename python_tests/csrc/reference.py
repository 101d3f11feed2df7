"""Every operation of tracking and selection in plain numpy and Python: the oracle of the tests.

Written for clarity alone. ``take`` returns what ``put_back`` wants, as the native TakenRows does.
"""

import numpy as np

HIGHEST_COUNT = 2**32 - 1
SMALLEST_CHANGE = np.finfo(np.float32).tiny
MASK = 2**64 - 1


def top_rows(scores, k):
    """The k highest non-zero scores, ties by lowest row id, as ascending row ids."""
    order = sorted(range(len(scores)), key=lambda row_id: (-scores[row_id], row_id))
    return sorted(row_id for row_id in order[: max(0, k)] if scores[row_id] != 0)


class Ranking:
    """As top_rows, for sizes where a Python sort is too slow: one sort serves every k."""

    def __init__(self, scores):
        order = np.lexsort((np.arange(len(scores)), -scores.astype(np.float64)))
        self._row_ids = order[scores[order] != 0]

    def top(self, k):
        return np.sort(self._row_ids[: max(0, k)])


def row_change(now, before):
    """L2 norm of the difference of two rows, summed as the native code does, as float32."""
    wide = np.float64 if now.dtype == np.float64 else np.float32
    step = now.astype(wide) - before.astype(wide)
    return np.float32(np.sqrt(np.sum(step * step, dtype=wide)))


def mix_bits(bits):
    """Of an int, or of each number of an array of uint64."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def random_below(size, seed, num_drawn):
    """The random number after ``num_drawn`` others, from 0 to size - 1."""
    return mix_bits((seed + (num_drawn + 1) * 0x9E3779B97F4A7C15) & MASK) * size >> 64


class Tracker:
    """What all trackers have in common; ``score`` is what they differ in."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.dirty = set()

    def observe(self, indices):
        self.dirty.update(indices)

    def dirty_rows(self, begin, end):
        return sorted(row_id for row_id in self.dirty if begin <= row_id < end)

    def score(self, row_id, weight):
        return 1

    def select(self, begin, end, k, weight=None):
        row_ids = self.dirty_rows(begin, end)
        chosen = top_rows([self.score(row_id, weight) for row_id in row_ids], k)
        return [row_ids[position] for position in chosen]

    def take(self, row_ids, weight=None):
        taken = [(row_id, self.score(row_id, weight)) for row_id in row_ids if row_id in self.dirty]
        self.dirty.difference_update(row_ids)
        return taken

    def put_back(self, taken):
        self.dirty.update(row_id for row_id, _ in taken)


class Turn:
    """Where the last selection of a range began, as a number of rows passed, and what was taken."""

    def __init__(self, begin, end):
        self.range = range(begin, end)
        self.begin = self.end = 0
        self.is_selecting = False

    def in_order(self):
        """(position, row) of a whole round of the range, from where the last selection began."""
        size = len(self.range)
        return [(at, self.range[at % size]) for at in range(self.begin, self.begin + size)]


class DirtyRows(Tracker):
    """All dirty rows score the same, so they take turns: a selection begins behind the last one."""

    def __init__(self, num_rows):
        super().__init__(num_rows)
        self.turns = {}

    def select(self, begin, end, k, weight=None):
        if begin == end:
            return []
        turn = self.turns.setdefault((begin, end), Turn(begin, end))
        turn.begin = turn.end
        turn.is_selecting = True
        return sorted([row for _, row in turn.in_order() if row in self.dirty][: max(0, k)])

    def take(self, row_ids, weight=None):
        taken = Taken(super().take(row_ids))
        if isinstance(row_ids, range):  # all rows of a range: no selection
            return taken
        for turn in self.turns.values():
            passed = [at + 1 for at, row in turn.in_order() if row in row_ids]
            if not passed:
                continue
            taken.begins.append((turn, turn.begin))
            if turn.is_selecting:
                turn.end = max(turn.end, *passed)
        return taken

    def put_back(self, taken):
        super().put_back(taken)
        for turn, begin in taken.begins:
            turn.begin = turn.end = min(turn.begin, begin)
            turn.is_selecting = False
        taken.begins.clear()


class Taken(list):
    """(row, score) of rows that were dirty, and where the selections they are of began."""

    def __init__(self, rows):
        super().__init__(rows)
        self.begins = []


class AccessCounter(Tracker):
    def __init__(self, num_rows):
        super().__init__(num_rows)
        self.count = [0] * num_rows

    def observe(self, indices):
        super().observe(indices)
        for row_id in indices:
            self.count[row_id] = min(HIGHEST_COUNT, self.count[row_id] + 1)

    def score(self, row_id, weight):
        return self.count[row_id]

    def take(self, row_ids, weight=None):
        taken = super().take(row_ids)
        for row_id in row_ids:
            self.count[row_id] = 0
        return taken

    def put_back(self, taken):
        super().put_back(taken)
        for row_id, count in taken:
            self.count[row_id] = min(HIGHEST_COUNT, self.count[row_id] + count)


class RowSampler(Tracker):
    def __init__(self, num_rows, capacity, period, seed):
        super().__init__(num_rows)
        self.capacity, self.period, self.seed = min(capacity, num_rows), period, seed
        self.num_drawn = 0
        self.num_observed = 0
        self.sample = []

    def observe(self, indices):
        super().observe(indices)
        for row_id in indices:
            if self.is_sampled(self.num_observed):
                self.add(row_id)
            self.num_observed += 1

    def is_sampled(self, number):
        """One of each ``period`` lookups is: at a random place, drawn again after 32 of them."""
        run, place = number // (32 * self.period), number % self.period
        return place == random_below(self.period, ~self.seed & MASK, run)

    def add(self, row_id):
        if row_id in self.sample:
            return
        if len(self.sample) < self.capacity:
            self.sample.append(row_id)
            return
        self.sample[random_below(self.capacity, self.seed, self.num_drawn)] = row_id
        self.num_drawn += 1

    def score(self, row_id, weight):
        return int(row_id in self.sample)

    def select(self, begin, end, k, weight=None):
        """Sampled rows first, then others that are dirty; among those of a kind by a hash."""
        salt = mix_bits(self.seed ^ mix_bits(self.num_observed))
        row_ids = self.dirty_rows(begin, end)
        sampled = set(self.sample)
        scores = [
            (mix_bits((salt + row_id) & MASK) >> 33) | 1 | ((row_id in sampled) << 31)
            for row_id in row_ids
        ]
        return [row_ids[position] for position in top_rows(scores, k)]

    def take(self, row_ids, weight=None):
        taken = super().take(row_ids)
        self.sample = [row_id for row_id in self.sample if row_id in self.dirty]
        return taken

    def put_back(self, taken):
        super().put_back(taken)
        for row_id, sampled in taken:
            if sampled:
                self.add(row_id)


class ChangeMeter(Tracker):
    def __init__(self, weight):
        super().__init__(len(weight))
        self.baseline = weight.copy()
        self.carried = {}

    def score(self, row_id, weight):
        change = row_change(weight[row_id], self.baseline[row_id])
        change = np.float32(change + self.carried.get(row_id, np.float32(0)))
        return max(change, SMALLEST_CHANGE)

    def take(self, row_ids, weight=None):
        taken = super().take(row_ids, weight)
        for row_id in row_ids:
            self.baseline[row_id] = weight[row_id]
            self.carried.pop(row_id, None)
        return taken

    def put_back(self, taken):
        super().put_back(taken)
        for row_id, change in taken:
            self.carried[row_id] = np.float32(self.carried.get(row_id, np.float32(0)) + change)
