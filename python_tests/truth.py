"""A training loop whose snapshots and recoveries a plain reference checks.

A step's label is not one state but several: whatever changes a table outside of an optimizer, after
``step()``, belongs to the step that has just been labelled. So the reference keeps a copy of all
moments at which a call of the Checkpointer could capture something, by their labels.
"""

import shutil

import torch

from cpr_ext.errors import StoreError
from cpr_ext.state.table import shard_row_range
from python_tests.helpers import clone, copy_rows, copy_state, differences, read_chunks, row_records
from python_tests.truth_model import NEVER, ROWS, Moment, same_rows
from python_tests.truth_training import TrueTraining


class TrueRun(TrueTraining):
    """A training loop whose snapshots and recoveries are compared with the reference."""

    def check(self):
        """Compare what was committed since with the reference."""
        saver = self.ckpt._saver
        if saver.in_flight is not None and saver.in_flight.state == "captured":
            return  # manifests may change this moment
        if not self.was_changed_outside:
            failures = self.ckpt.metrics.failures
            assert all("close() in the middle of" in each for each in failures), failures
        for _, path in row_records(self.ckpt.store):
            if path not in self._checked:
                self._checked.add(path)
                self._check_segment(path)
        for record in self.ckpt.store.manifest.dense:
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
        for record, path in row_records(self.ckpt.store):
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
        points = [r for r in self.ckpt.store.manifest.dense if r.is_complete]
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
