"""Random training loops beside a reference that copies everything at every step.

Whatever a loop does, and wherever it ends: recovery equals the reference, every saved row is as it
was at the step that its chunk names, and no snapshot or report claims more than that.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import cpr_ext
from cpr_ext.checkpointer.session import Session
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.saved_hashes import SavedHashes
from cpr_ext.tracking.gradient_rows import GradientRows
from cpr_ext.tracking.outside_changes import OutsideChanges, TableVersions
from cpr_ext.tracking.table_watch import TableWatch
from python_tests.truth import TrueRun
from python_tests.truth_model import ROWS, Setup

KINDS = {
    "sgd": (True, False),
    "adagrad": (True, False),
    "rowwise_adagrad": (True, False),
    "sparse_adam": (True,),
    "sgd_momentum": (False,),
    "adam": (False,),
}
PRIORITIES = [
    cpr_ext.AllRows(),
    cpr_ext.AllRows(0.3),
    cpr_ext.MostFrequentlyUsed(0.05),
    cpr_ext.MostFrequentlyUsed(0.9),
]
SEEDS = st.integers(0, 10_000)
SHARDS = st.sets(st.integers(0, 1), min_size=1)
OUTSIDE = [
    "clamp",
    "reset_row",
    "load_state_dict",
    "state",
    "state_row",
    "optimizer_load_state_dict",
]


@st.composite
def setups(draw):
    kinds = tuple(draw(st.sampled_from(sorted(KINDS))) for _ in range(2))
    sparse = tuple(draw(st.sampled_from(KINDS[kind])) for kind in kinds)
    return Setup(
        kinds,
        sparse,
        is_shared=draw(st.booleans()) and len({*zip(kinds, sparse, strict=True)}) == 1,
        is_tied=draw(st.booleans()) and not sparse[0],
        has_short_windows=draw(st.booleans()),
        options={
            "priority": draw(st.sampled_from(PRIORITIES)),
            "schedule": cpr_ext.EverySteps(
                draw(st.sampled_from([1, 2, 5, 1000])),
                when_busy=draw(st.sampled_from(["delay", "wait"])),
            ),
            "overlap": draw(st.sampled_from(["always", "never"])),
            "num_shards": draw(st.integers(1, 2)),
            "store": cpr_ext.StoreOptions(rebase_after=draw(st.sampled_from([None, 2.0]))),
            "staging": cpr_ext.StagingOptions(
                slot_bytes=draw(st.sampled_from([56 << 10, 1 << 20])),
                num_threads=1,
                direct_io=False,
            ),
        },
    )


class TrainingLoops(RuleBasedStateMachine):
    """Each rule is something that a user's loop may do."""

    run = None

    @initialize(setup=setups())
    def begin(self, setup):
        self.folder = tempfile.TemporaryDirectory()
        self.run = TrueRun(Path(self.folder.name) / "store", setup)

    def teardown(self):
        if self.run is None:
            return
        try:
            if sys.exc_info()[0] is None:
                self.run.finish()
        finally:
            self.folder.cleanup()

    @rule(seed=SEEDS, count=st.integers(1, 4), is_training=st.booleans())
    def train(self, seed, count, is_training):
        for number in range(count):
            self.run.zero_grad()
            self.run.backward(seed + number, is_training=is_training)
            self.run.optimizers_step()
            self.run.step()

    @rule(seed=SEEDS, calls_step=st.booleans())
    def accumulate(self, seed, calls_step):
        self.run.zero_grad()
        for number in range(3):
            self.run.backward(seed + number)
            if calls_step and number < 2:
                self.run.step()
        self.run.optimizers_step()
        self.run.step()

    @rule(seed=SEEDS, is_training=st.booleans(), zero_grad=st.booleans())
    def backward(self, seed, is_training, zero_grad):
        if zero_grad:
            self.run.zero_grad()
        self.run.backward(seed, is_training=is_training)

    @rule(seed=SEEDS)
    def evaluate(self, seed):
        self.run.evaluate(seed)

    @rule(seed=SEEDS)
    def fail_forward(self, seed):
        self.run.fail_forward(seed)

    @rule(index=st.integers(0, 2), seed=st.none() | SEEDS, fails=st.booleans())
    def optimizer_step(self, index, seed, fails):
        self.run.optimizer_step(index, closure_seed=seed, closure_fails=fails)

    @rule()
    def step(self):
        self.run.step()

    @rule(kind=st.sampled_from(["partial", "base"]))
    def save(self, kind):
        if self.run.ckpt.step_count > 0:
            self.run.save(kind)

    @rule(timeout_seconds=st.sampled_from([None, 0.0, 0.001]))
    def wait(self, timeout_seconds):
        self.run.wait(timeout_seconds)

    @rule(name=st.sampled_from(sorted(ROWS)), how=st.sampled_from(OUTSIDE))
    def change_outside(self, name, how):
        self.run.change_outside(name, how)

    @rule(seed=SEEDS, name=st.sampled_from(sorted(ROWS)), how=st.sampled_from(OUTSIDE))
    def change_while_saving(self, seed, name, how):
        self.train(seed, 1, True)
        self.run.change_outside(name, how)
        self.run.wait()

    @rule(momentum=st.sampled_from([0.0, 0.9]))
    def set_momentum(self, momentum):
        self.run.set_momentum(momentum)

    @rule(shards=SHARDS)
    def lose_shards(self, shards):
        shards = sorted(s for s in shards if s < self.run.ckpt.num_shards)
        if shards:
            self.run.lose_shards(shards)

    @rule(mode=st.sampled_from(["partial", "full"]))
    def crash(self, mode):
        self.run.end()
        self.run.recover_process(mode)

    @rule(mode=st.sampled_from(["partial", "full"]))
    def go_back(self, mode):
        if self.run.ckpt.step_count > 0:
            self.run.recover(mode)

    @rule(mode=st.sampled_from(["partial", "full"]))
    def close(self, mode):
        self.run.close()
        self.run.recover_process(mode)


class TestTrainingLoops(TrainingLoops.TestCase):
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.long
class TestManyTrainingLoops(TrainingLoops.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=40, deadline=None)


def nothing(*_, **__):
    return None


def no_gradient(rows, owned, rows_change):
    return owned


def first_gradient_only(rows, owned, rows_change, count=GradientRows.count):
    count(rows, owned[:1], rows_change)
    return owned


def closure_as_it_is(watch, closure, owned, step):
    step.written.update(owned)
    return closure


#: What may be wrong with the watch: (class, attribute, what is there instead).
MUTANTS = {
    "gradients are not counted": (GradientRows, "count", no_gradient),
    "only the first of several gradients counts": (GradientRows, "count", first_gradient_only),
    "gradients of closures are not counted": (TableWatch, "_noting", closure_as_it_is),
    "versions are not compared": (TableVersions, "differences", lambda versions: {}),
    "versions are not compared before a step": (TableVersions, "are_same", lambda versions: True),
    "rows changed outside are not dirty": (OutsideChanges, "settle", nothing),
    "a step never begins": (TableWatch, "begin_step", nothing),
    "no moment is in the middle of a step": (Session, "is_past_step", False),
    "rows are not compared": (SavedHashes, "advance", lambda hashes, max_bytes: ([], True)),
    "rows that change are not compared before": (SavedHashes, "check_changing", lambda *_: []),
    "capture goes on while rows change": (BackgroundCapture, "pause", nothing),
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_watch_that_is_wrong_is_found(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    options = settings(
        max_examples=1500,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    try:
        run_state_machine_as_test(TrainingLoops, settings=options)
    except Exception as error:  # hypothesis groups errors, and calls those of threads flaky
        print(type(error).__name__, *getattr(error, "exceptions", (error,)), sep="\n")
    else:
        pytest.fail("not found")
