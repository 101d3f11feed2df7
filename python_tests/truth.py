"""A training loop beside a plain reference: copies of everything at every step.

A step's label is not one state but several: whatever changes a table outside of an optimizer, after
``step()``, belongs to the step that has just been labelled. So the reference keeps a copy of all
moments at which a call of the Checkpointer could capture something, by their labels.
"""

import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import cpr_ext
from cpr_ext.errors import (
    SnapshotError,
    SnapshotFailedWarning,
    StoreError,
    UntrackedChangeWarning,
    UsageError,
)
from cpr_ext.state.table import shard_row_range
from python_tests.helpers import (
    TABLE_OPTIMIZERS,
    clone,
    copy_rows,
    copy_state,
    die,
    differences,
    read_chunks,
    shard_records,
    short_windows,
)

ROWS = {"a": 1600, "b": 600}
NEVER = 10**9


class OwnForward(nn.Embedding):
    """Takes a mask, not row ids, as the positions of some language models do."""

    def forward(self, mask):
        rows = mask.nonzero().view(-1) + 2
        return F.embedding(rows, self.weight, sparse=self.sparse)


class Model(nn.Module):
    def __init__(self, sparse, *, is_tied, seed):
        super().__init__()
        self.a = nn.Embedding(ROWS["a"], 8, sparse=sparse[0])
        self.b = OwnForward(ROWS["b"], 4, sparse=sparse[1])
        self.head = nn.Linear(4, 2)
        self.decoder = nn.Linear(8, ROWS["a"], bias=False) if is_tied else None
        if is_tied:
            self.decoder.weight = self.a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids, mask):
        self.seen += 1
        b = self.b(mask)
        a = self.a(ids)
        loss = a.sin().sum() + self.head(b.sin()).square().mean()
        if self.decoder is not None:
            loss = loss + 0.01 * self.decoder(a[:2]).sin().sum()
        return loss


@dataclass(frozen=True)
class Setup:
    """How one example trains and saves.

    Attributes:
        kinds: optimizers of the tables, by ``TABLE_OPTIMIZERS``.
        sparse: whether the tables' gradients are.
        is_shared: one optimizer, of the first kind, has both tables.
        is_tied: table a's weight is a linear layer's, too.
        has_short_windows: capture that overlaps training gets a chunk done in each window.
    """

    kinds: tuple[str, str]
    sparse: tuple[bool, bool]
    is_shared: bool
    is_tied: bool
    has_short_windows: bool
    options: dict


@dataclass
class Moment:
    """All that there is, at a moment.

    Attributes:
        touched: by table, when each row was last changed, as gradients say.
    """

    time: int
    rows: dict
    state: dict
    touched: dict


def same_rows(left, right):
    """Which rows (n,) of two mappings from array names to tensors are equal in every bit."""
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    same = None
    for name, one in left.items():
        count = one.shape[0]
        bits = [
            t.detach().contiguous().view(torch.uint8).reshape(count, -1)
            for t in (one.reshape(count, -1), right[name].reshape(count, -1))
        ]
        equal = (bits[0] == bits[1]).all(dim=1)
        same = equal if same is None else same & equal
    return same


class TrueRun:
    """Trains, saves and fails; every claim of the library is compared with the reference.

    Attributes:
        is_past_step: an optimizer has stepped, and ``step()`` was not called since.
        was_changed_outside: tables were changed by something else than their optimizer.
        counts_too_many: tables count as changed as a whole for once, also those of their rows that
            a snapshot in flight has saved since.
    """

    def __init__(self, directory, setup):
        self.directory = directory
        self.setup = setup
        self.moments = {}
        self.is_past_step = False
        self.was_changed_outside = False
        self.counts_too_many = False
        self.counts = {"complete": 0, "chunks": 0, "snapshots": 0, "stale_known": 0}
        self._time = 0
        self._checked = set()
        self._seed = 0
        self._begin()

    # --- the life of a process ---

    def _begin(self):
        self._seed += 1
        self.model = Model(self.setup.sparse, is_tied=self.setup.is_tied, seed=self._seed)
        weights = [[self.model.a.weight], [self.model.b.weight]]
        if self.setup.is_shared:
            weights = [[*weights[0], *weights[1]]]
        self.optimizers = [
            TABLE_OPTIMIZERS[kind][0](each)
            for kind, each in zip(self.setup.kinds, weights, strict=False)
        ]
        self.optimizers.append(torch.optim.Adam(self.model.head.parameters()))
        self.touched = {n: torch.zeros(rows, dtype=torch.int64) for n, rows in ROWS.items()}
        self.ckpt = cpr_ext.Checkpointer(
            self.model, self.optimizers, self.directory, **self.setup.options
        )
        self.is_past_step = False
        self._has_unseen_change = False
        torch.manual_seed(self._seed)

    def end(self):
        """End the process between two calls."""
        die(self.ckpt)
        snapshot = self.ckpt._saver.in_flight
        if snapshot is not None and snapshot.state == "capturing":
            snapshot.cancel("killed")  # else its writer outlives the kill
        self.ckpt._watch.detach()
        self.ckpt._saver.close()
        for _, table in self.tables():
            assert not table.optimizer._optimizer_step_pre_hooks

    def tables(self):
        return [(table.name, table) for table in self.ckpt.tables]

    @contextmanager
    def _watched(self):
        with (
            warnings.catch_warnings(record=True) as caught,
            short_windows(self.setup.has_short_windows),
        ):
            warnings.simplefilter("always")
            yield
        for each in caught:
            if issubclass(each.category, UntrackedChangeWarning | SnapshotFailedWarning):
                is_left = self.is_past_step and "close() in the middle of" in str(each.message)
                assert is_left or self.was_changed_outside, each.message

    # --- training ---

    def batch(self, seed, count=12, *, is_training=True):
        """Forward and backward."""
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.rand(count, generator=generator) ** 2 * ROWS["a"]).long()
        mask = torch.rand(ROWS["b"] - 2, generator=generator) < 0.02
        mask[seed % 7] = True
        self.model.train(is_training)
        return self.model(ids, mask)

    def backward(self, seed, **options):
        with self._watched():
            self.batch(seed, **options).backward()

    def evaluate(self, seed):
        with self._watched():
            self.batch(seed)

    def fail_forward(self, seed):
        """The second lookup of a batch fails."""
        with self._watched():
            try:
                self.model.b(torch.ones(3, dtype=torch.bool))
                self.model(torch.tensor([seed % ROWS["a"], ROWS["a"]]), torch.ones(3) > 0)
            except IndexError:
                return
        raise AssertionError("no IndexError")

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _note_gradients(self, optimizer):
        self._time += 1
        for name, table in self.tables():
            gradient = table.weight.grad
            if table.optimizer is not optimizer:
                continue
            if not table.updates_only_looked_up_rows():
                self.touched[name][:] = self._time
            if gradient is None:
                continue
            if gradient.is_sparse:
                rows = gradient._indices()[0]
            else:
                rows = (gradient != 0).any(dim=1).nonzero().view(-1)
            self.touched[name][rows] = self._time

    def optimizer_step(self, index, *, closure_seed=None, closure_fails=False):
        optimizer = self.optimizers[index % len(self.optimizers)]

        def closure():
            self.zero_grad()
            loss = self.batch(closure_seed)
            loss.backward()
            if closure_fails:
                raise ArithmeticError
            self._note_gradients(optimizer)
            return loss

        self.is_past_step = True
        self._has_unseen_change = False
        with self._watched():
            if closure_seed is None:
                self._note_gradients(optimizer)
                optimizer.step()
                return
            try:
                optimizer.step(closure)
            except ArithmeticError:
                assert closure_fails

    def optimizers_step(self):
        for index in range(len(self.optimizers)):
            self.optimizer_step(index)

    def set_momentum(self, momentum):
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.SGD) and not any(self.setup.sparse):
                optimizer.param_groups[0]["momentum"] = momentum
                self.counts_too_many = True

    def change_outside(self, name, how):
        """Change a table by something else than its optimizer."""
        table = dict(self.tables())[name]
        optimizer, weight = table.optimizer, table.weight
        states = list(table.row_states().values())
        with torch.no_grad():
            if how == "clamp":
                weight.clamp_(-0.5, 0.5)
            elif how == "reset_row":
                weight[3] = 0.25
            elif how == "load_state_dict":
                self.model.load_state_dict(
                    {key: value + value.new_ones(()) for key, value in self._own_state().items()}
                )
            elif how == "state" and states:
                states[0].mul_(0.5)
            elif how == "state_row" and states:
                states[-1][5] = 1.5
            elif how == "optimizer_load_state_dict":
                optimizer.load_state_dict(clone(optimizer.state_dict()))
            else:
                return
        self._time += 1
        self.was_changed_outside = self._has_unseen_change = self.counts_too_many = True
        for each in ROWS if how == "load_state_dict" else [name]:
            self.touched[each][:] = self._time

    def _own_state(self):
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    # --- calls of the Checkpointer ---

    def note(self, step):
        """The model is now as it is at this step."""
        self._time += 1
        moment = Moment(
            self._time,
            copy_rows(self.ckpt.tables),
            copy_state(self.model, self.optimizers),
            clone(self.touched),
        )
        self.moments.setdefault(step, []).append(moment)

    def _note_here(self):
        if not self.is_past_step:
            self.note(self.ckpt.step_count)

    def step(self):
        self.note(self.ckpt.step_count + 1)
        before = self.ckpt.step_count
        with self._watched():
            self.ckpt.step()
        assert self.ckpt.step_count == before + 1
        self.is_past_step = False
        self.check()

    def save(self, kind):
        self._note_here()
        with self._watched():
            snapshot = self.ckpt.save(kind)
        assert (snapshot.state == "requested") == self.is_past_step
        self.check()

    def wait(self, timeout_seconds=None):
        self._note_here()
        with self._watched():
            try:
                is_done = self.ckpt.wait(timeout_seconds)
            except UsageError:
                assert self.is_past_step
            except SnapshotError:
                assert self.was_changed_outside
            else:
                if is_done and timeout_seconds is None:
                    assert self.ckpt._saver.in_flight is None
        self.check()

    def close(self):
        """Close, and begin a new process."""
        self._note_here()
        with self._watched():
            try:
                self.ckpt.close()
            except SnapshotError as error:
                if "in the middle of step" in str(error):
                    assert self.is_past_step
                else:
                    assert self.was_changed_outside
        self.check()

    # --- what was claimed ---

    def check(self):
        """Compare what was committed since with the reference."""
        saver = self.ckpt._saver
        if saver.in_flight is not None and saver.in_flight.state == "captured":
            return  # manifests may change this moment
        if not self.was_changed_outside:
            failures = self.ckpt.metrics.failures
            assert all("close() in the middle of" in each for each in failures), failures
        for _, _, path in shard_records(self.ckpt.store):
            if path not in self._checked:
                self._checked.add(path)
                self._check_segment(path)
        for record in self.ckpt.store.dense.segments:
            if record.is_complete and ("complete", record.snapshot) not in self._checked:
                self._checked.add(("complete", record.snapshot))
                self._check_complete(record)

    def _check_segment(self, path):
        self.counts["snapshots"] += 1
        for chunk in read_chunks(path):
            self.counts["chunks"] += 1
            assert chunk.step in self.moments, (path, chunk.step)
            found = [
                same_rows(chunk.arrays, _rows_of(moment, chunk.table, chunk.row_ids))
                for moment in self.moments[chunk.step]
                if moment.rows[chunk.table].keys() == chunk.arrays.keys()
            ]
            wrong = min((int((~same).sum()) for same in found), default=-1)
            assert wrong == 0, f"{path}: {wrong} rows of '{chunk.table}' not of step {chunk.step}"

    def stored_rows(self, snapshot=NEVER):
        """The rows of the store as of a snapshot: {table: (steps (n,), {array: tensor})}."""
        rows = {}
        for _, record, path in shard_records(self.ckpt.store):
            if record.snapshot > snapshot:
                continue
            for chunk in read_chunks(path):
                steps, arrays = rows.setdefault(
                    chunk.table, (torch.full((ROWS[chunk.table],), -1), {})
                )
                steps[chunk.row_ids] = chunk.step
                for name, values in chunk.arrays.items():
                    whole = torch.zeros(len(steps), *values.shape[1:], dtype=values.dtype)
                    arrays.setdefault(name, whole)[chunk.row_ids] = values
        return rows

    def _check_complete(self, record):
        self.counts["complete"] += 1
        stored = self.stored_rows(record.snapshot)
        wrong = [
            {
                name: int((~same_rows(stored[name][1], moment.rows[name])).sum())
                for name in ROWS
                if moment.rows[name].keys() == stored[name][1].keys()
            }
            for moment in self.moments[record.last_step]
        ]
        assert any(w.keys() == ROWS.keys() and not any(w.values()) for w in wrong), (
            f"snapshot {record.snapshot} calls itself complete at step {record.last_step}: {wrong}"
        )

    # --- failures ---

    def recover_process(self, mode):
        """Begin anew as a process does whose predecessor has ended; returns the report."""
        self._begin()
        points = [r for r in self.ckpt.store.dense.segments if r.is_complete]
        if mode == "full" and not points and not self.ckpt.store.is_empty:
            try:
                self.ckpt.recover(mode="full")
            except StoreError as error:
                assert "no full-recovery point" in str(error)  # noqa: PT017
                mode = "partial"
        return self.recover(mode)

    def recover(self, mode):
        """Restore everything, in a live model or a new one."""
        store = self.ckpt.store
        with self._watched():
            try:
                report = self.ckpt.recover(mode=mode)
            except StoreError as error:
                if not any(each in str(error) for each in ("nothing to go back to", "no full-")):
                    raise
                return None
        self.is_past_step = False
        self._has_unseen_change = False
        self._checked.clear()
        self.moments = {s: each for s, each in self.moments.items() if s <= report.step}
        if store.is_empty:
            assert report.step == 0
            self.moments.clear()
        else:
            self._check_recovered(mode, report)
        for touched in self.touched.values():
            touched[:] = 0
        self.note(report.step)
        self.check()
        return report

    def _check_recovered(self, mode, report):
        rows, state = copy_rows(self.ckpt.tables), copy_state(self.model, self.optimizers)
        assert report.rows_missing == 0
        assert report.damaged_segments == []
        moments = self.moments[report.step]
        if mode == "full":
            found = [differences(state, moment.state) for moment in moments]
            assert any(not each for each in found), [each[:4] for each in found]
            assert report.rows_stale == 0
            return
        stored = self.stored_rows()
        for name in ROWS:
            known = stored[name][1]
            assert same_rows({k: rows[name][k] for k in known}, known).all(), name
        if report.rows_stale is None:
            return
        self.counts["stale_known"] += 1
        bounds = [
            self._stale_bounds(stored, moment)
            for moment in moments
            if not differences(_dense(state), _dense(moment.state))
        ]
        assert any(least <= report.rows_stale <= most for least, most in bounds), (
            f"rows_stale={report.rows_stale}, true: {bounds}"
        )

    def _stale_bounds(self, stored, moment, ranges=None):
        """Rows that differ from what is stored; and those that were changed since it was."""
        least = most = 0
        for name, (steps, arrays) in stored.items():
            begin, end = ranges[name] if ranges else (0, ROWS[name])
            if arrays.keys() != moment.rows[name].keys():
                return NEVER, -1  # not the moment that was captured
            differ = ~same_rows(arrays, moment.rows[name])
            since = torch.tensor(
                [
                    min((m.time for m in self.moments.get(step, ())), default=0)
                    for step in steps.tolist()
                ]
            )
            least += int(differ[begin:end].sum())
            most += int((differ | (moment.touched[name] > since))[begin:end].sum())
        return least, NEVER if self.counts_too_many else most

    def lose_shards(self, shards):
        """Overwrite the rows of shards of the live model, and recover them."""
        if self.ckpt.store.is_empty:
            return
        self.ckpt._saver.pause()
        ranges = {
            name: [shard_row_range(ROWS[name], shard, self.ckpt.num_shards) for shard in shards]
            for name in ROWS
        }
        before = Moment(0, copy_rows(self.ckpt.tables), {}, clone(self.touched))
        dense_before = _dense(copy_state(self.model, self.optimizers))
        with torch.no_grad():
            for name, table in self.tables():
                for begin, end in ranges[name]:
                    table.weight[begin:end] = float("nan")
        with self._watched():
            report = self.ckpt.recover(shards=shards)
        assert not differences(_dense(copy_state(self.model, self.optimizers)), dense_before)
        after, stored = copy_rows(self.ckpt.tables), self.stored_rows()
        self._time += 1
        least = most = 0
        for name in ROWS:
            lost = torch.zeros(ROWS[name], dtype=torch.bool)
            known = stored[name][1]
            for begin, end in ranges[name]:
                lost[begin:end] = True
            restored = same_rows({k: after[name][k] for k in known}, known)
            assert restored[lost].all(), name
            assert same_rows(after[name], before.rows[name])[~lost].all(), name
            # The optimizer may have made state since that no snapshot has yet.
            before.rows[name] = {k: before.rows[name][k] for k in known}
            for begin, end in ranges[name]:
                bounds = self._stale_bounds({name: stored[name]}, before, {name: (begin, end)})
                least, most = least + bounds[0], most + bounds[1]
            self.touched[name][lost] = 0
            self.touched[name][~lost] = self._time
        if report.rows_stale is not None and not self._has_unseen_change:
            self.counts["stale_known"] += 1
            assert least <= report.rows_stale <= most, (report.rows_stale, least, most)
        self._checked.clear()
        self.check()

    def finish(self):
        """Both recoveries of what the end of the process leaves behind."""
        self.end()
        copy = self.directory.with_name("copy")
        shutil.copytree(self.directory, copy)
        moments, directory = dict(self.moments), self.directory
        self.recover_process("partial")
        self.end()
        self.moments, self.directory = moments, copy
        self._checked.clear()
        self.recover_process("full")
        self.end()
        self.directory = directory


def _rows_of(moment, table, row_ids):
    return {name: array[row_ids] for name, array in moment.rows[table].items()}


def _dense(state):
    """The part of a copied state that belongs to no row."""
    weights = {"a.weight", "b.weight", "decoder.weight"}
    return {
        "model": {name: value for name, value in state["model"].items() if name not in weights},
        "head": state["optimizers"][-1],
        "torch": state["torch"],
    }
