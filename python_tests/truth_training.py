"""A training loop next to a plain reference: every action, and copies of every moment."""

import warnings
from contextlib import contextmanager

import torch

from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, UntrackedChangeWarning, UsageError
from python_tests.helpers import (
    TABLE_OPTIMIZERS,
    clone,
    copy_rows,
    copy_state,
    die,
    open_checkpointer,
    short_windows,
)
from python_tests.truth_model import ROWS, Model, Moment


class TrueTraining:
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
        self.ckpt = open_checkpointer(
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
            snapshot.give_up("killed")  # else its writer outlives the kill
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
                text = str(each.message)
                is_left = self.is_past_step and "close() in the middle of" in text
                assert is_left or self.was_changed_outside, text

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
        if any(table.optimizer is optimizer for _, table in self.tables()):
            self._has_unseen_change = False  # a step of no table looks at none
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

    def check(self):
        """Compare what was committed since with the reference; of a subclass."""
        raise NotImplementedError
