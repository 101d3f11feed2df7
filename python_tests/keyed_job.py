"""A job whose ids come and go: its slots, its map, and what each id's row was at every step."""

from collections import OrderedDict

import torch
from torch import nn

import cpr_ext
from python_tests.helpers import open_checkpointer

TABLE = "items"
SLOTS, DIM = 60, 4


class SlotMap:
    """Gives each id a slot, that of the id used least recently if none is free."""

    def __init__(self, num_slots):
        self.key = torch.full((num_slots,), -1)
        self.used = torch.zeros(num_slots, dtype=torch.int64)
        self.num_evicted = 0
        self.rebuild()

    def rebuild(self):
        order = self.used.argsort(stable=True).tolist()
        held = [(int(self.key[slot]), slot) for slot in order if self.key[slot] >= 0]
        self.slots = OrderedDict(held)
        self.free = [slot for slot in range(len(self.key)) if self.key[slot] < 0]
        self.clock = int(self.used.max())

    def __call__(self, ids):
        """Return the slots of ids, and those of them that were given to new ones."""
        new = []
        for number in ids:
            if number not in self.slots:
                if not self.free:
                    self.num_evicted += 1
                    self.free.append(self.slots.popitem(last=False)[1])
                self.slots[number] = self.free.pop()
                self.key[self.slots[number]] = number
                new.append(self.slots[number])
            self.slots.move_to_end(number)
            self.clock += 1
            self.used[self.slots[number]] = self.clock
        return torch.tensor([self.slots[n] for n in ids]), torch.tensor(new, dtype=torch.int64)


class KeyedJob:
    """Trains on ids of which most are new; remembers every state that the row of an id had."""

    def __init__(self, directory, *, num_slots=SLOTS, seed=0, scores=False, keyed=True, **options):
        torch.manual_seed(seed)
        bag = nn.EmbeddingBag(num_slots, DIM, mode="sum", sparse=True)
        self.model = nn.Sequential(bag, nn.Linear(DIM, 1))
        self.weight = bag.weight
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.3)
        self.map = SlotMap(num_slots)
        self.history = {}
        self.keys_at = {}
        keys = cpr_ext.SlotKeys(
            self.map.key, {"used": self.map.used} if scores else None, on_restored=self.map.rebuild
        )
        table = cpr_ext.Table(
            TABLE, bag.weight, self.optimizer, [bag], keys=keys if keyed else None
        )
        options = {
            "save_at_close": False,
            "schedule": cpr_ext.EverySteps(5, when_busy="wait"),
            **options,
        }
        self.ckpt = open_checkpointer(
            self.model, self.optimizer, directory, tables=[table], **options
        )

    @property
    def state(self):
        return self.optimizer.state[self.weight]["sum"]

    def rows(self):
        """Return weight and state by key."""
        return {
            int(key): (self.weight[slot].tolist(), self.state[slot].tolist())
            for slot, key in enumerate(self.map.key)
            if key >= 0
        }

    def train(self, num_steps, *, new_ids=3):
        for _ in range(num_steps):
            self.step(self.batch(self.ckpt.step_count, new_ids))

    def batch(self, step, new_ids=3):
        draw = torch.Generator().manual_seed(step)
        hot = torch.randint(0, 12, (4,), generator=draw)
        fresh = torch.randint(10**12, 2**62, (new_ids,), generator=draw)
        return [*dict.fromkeys([*hot.tolist(), *fresh.tolist()])]

    def step(self, ids):
        slots, new = self.map(ids)
        with self.ckpt.writing_rows(TABLE, new), torch.no_grad():
            self.weight[new] = 0.1
            self.state[new] = 0
        self.optimizer.zero_grad()
        self.model(slots[None]).square().sum().backward()
        self.optimizer.step()
        self.remember(self.ckpt.step_count + 1)
        self.ckpt.step()

    def remember(self, step):
        rows = self.rows()
        self.keys_at[step] = set(rows)
        for key, row in rows.items():
            self.history.setdefault(key, []).append(row)

    def end(self):
        """End as a killed process does: what is not committed is lost."""
        self.ckpt.wait()
        self.ckpt.close()
        return self

    def foreign(self, rows):
        """Return the keys of recovered rows that are no state of that key in this run."""
        return [key for key, row in rows.items() if row not in self.history.get(key, [])]
