"""Workers with parity are killed at every point of the protocol: the job ends as without a kill."""

import random
import signal
import time
from pathlib import Path

import pytest

from cpr_ext.distributed import worker_directory
from cpr_ext.storage.store_reader import StoreReader
from python_tests.distributed.cluster import Cluster
from python_tests.distributed.mlp_job import DIM, SAMPLES

JOB = ("python_tests.distributed.parity.parity_job", "ParityJob")
# Nobody is taken for lost on a busy machine; a wait for the end of a time-out fails the test.
PATIENT, WAIT_SECONDS = {"collective_seconds": 900.0, "join_seconds": 900.0}, 240
STEPS = 10
SHAPES = {"three": (3, 3), "mirror": (2, 2), "two mirrors": (4, 2), "four": (4, 4)}


def settings_of(shape, optimizer="adagrad", parity_every=1, variant="plain", **changed):
    world_size, group_size = SHAPES[shape]
    options = {"variants": [variant], "layers": (DIM, 12, 1), "group_size": group_size}
    return {
        "job": JOB, "world_size": world_size, "recovery": "exact", "num_steps": STEPS,
        "every_steps": 4, "whole_steps": True, "time_outs": PATIENT,
        "options": {**options, "optimizer": optimizer, "parity_every": parity_every}, **changed,
    }  # fmt: skip


def run(cluster):
    """Run to the end; start again who kills itself, as often as it says that it will."""
    cluster.start()
    suicides = cluster.settings.suicides
    planned = [(int(rank), int(life)) for rank, lives in suicides.items() for life in lives]
    lives, deadline = dict.fromkeys(cluster.ranks, 1), time.monotonic() + WAIT_SECONDS
    while planned:
        for rank in cluster.ranks:
            if (code := cluster.exit_code(rank, 0)) is None:
                continue
            assert (code, (rank, lives[rank]) in planned) == (-signal.SIGKILL, True), cluster.logs()
            planned.remove((rank, lives[rank]))
            lives[rank] += 1
            cluster.start(rank)
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.02)
    cluster.finish(WAIT_SECONDS)


def states(cluster):
    """By rank and step: rows, their state, replicas; a step that was trained again is the same.

    Of a worker that lacks rows still, nothing is known.
    """
    found = {}
    for rank in cluster.ranks:
        for event in cluster.events(rank, "step"):
            if "tables" not in event:
                continue
            known = (event["tables"], event["replicas"])
            assert found.setdefault((rank, event["step"]), known) == known, event["step"]
    return found


@pytest.fixture(scope="session")
def right_states(nursery, tmp_path_factory):
    """Those of a job without kills, by its settings."""
    known = {}

    def of(*shape, num_steps=STEPS):
        key = (*shape, num_steps)
        if key not in known:
            folder = tmp_path_factory.mktemp("untouched")
            cluster = Cluster([nursery], folder, **settings_of(*shape, num_steps=num_steps))
            run(cluster)
            known[key] = states(cluster)
        return known[key]

    return of


def last_recovery(cluster):
    return cluster.recoveries(0)[-1]["recovery"]


def require_states(cluster, expected, killed):
    """Every step is as without kills; whoever dies may not live to note the step it had made."""
    killed = list(killed)
    found = states(cluster)
    assert found == {at: known for at, known in expected.items() if at in found}
    for rank, step in expected.keys() - found.keys():
        assert step < cluster.settings.num_steps, (rank, step)
        killed.remove(rank)


def require_nothing_lost(cluster, expected, lost):
    run(cluster)
    suicides = cluster.settings.suicides
    require_states(cluster, expected, [int(rank) for rank in suicides for _ in suicides[rank]])
    last = last_recovery(cluster)
    assert (last["recovery"], last["obstacle"], last["lost"]) == ("exact", "", lost)
    for recovery in (e["recovery"] for e in cluster.recoveries(0)[1:]):
        assert set(recovery["samples_lost"]) == set(recovery["bytes_read"]) == {0}


POINTS = [
    "before the delta", "between two holders", "before the acknowledgement", "reduced", "optimizer",
]  # fmt: skip


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("shape", "point"),
    [
        ("four", "between two holders"),
        *(long("three", point) for point in POINTS),
        *(long("four", point) for point in POINTS if point != "between two holders"),
        *(long("mirror", point) for point in POINTS if point != "between two holders"),
    ],
)
def test_a_worker_killed_in_a_step_costs_nothing(make_cluster, right_states, shape, point):
    suicides = {"1": {"1": [point, 5]}}
    cluster = make_cluster(suicides=suicides, **settings_of(shape))
    require_nothing_lost(cluster, right_states(shape), [1])
    require_true_metrics(cluster)


DEVICE_JOB = ("python_tests.distributed.device_job", "DeviceParityJob")


@pytest.mark.parametrize(
    ("parity_every", "point"),
    [(1, "between two holders"), (3, "optimizer"), *(long(1, p) for p in POINTS)],
)
def test_rows_on_a_gpu_are_rebuilt_as_on_the_cpu(make_cluster, right_states, parity_every, point):
    """The GPU is emulated."""
    given = settings_of("three", parity_every=parity_every, job=DEVICE_JOB)
    cluster = make_cluster(suicides={"1": {"1": [point, 5]}}, **given)
    require_nothing_lost(cluster, right_states("three"), [1])


def require_true_metrics(cluster):
    """Protected while all train, and not while a worker is missing or rebuilt."""
    for rank in cluster.ranks:
        seen = cluster.events(rank, "metrics")
        assert {e["protected"] for e in seen if e["at"] == "peer_lost"} <= {False}
        training = [e for e in seen if e["at"] in ("recovered", "step")]
        assert {(e["protected"], e["rebuild_progress"]) for e in training} == {(True, 1.0)}
        assert {e["lag_steps"] for e in training} <= {0, 1}
        assert max(e["bytes_sent"] for e in training) > 0
    assert [e["rebuilds"] for e in cluster.events(0, "metrics")][-1] == len(cluster.recoveries(0))


@pytest.mark.parametrize("point", ["before the acknowledgement", long("optimizer")])
def test_buffers_of_each_worker_are_its_own_after_a_loss(make_cluster, right_states, point):
    """Batch norm's, and one that no snapshot has; a survivor undoes those of a step, too."""
    key = ("mirror", "adagrad", 1, "normed")
    cluster = make_cluster(suicides={"1": {"1": [point, 5]}}, **settings_of(*key))
    require_nothing_lost(cluster, right_states(*key), [1])


@pytest.mark.parametrize(
    ("point", "back_to"),
    [
        (["optimizer", 7], {6}),
        long(["before the acknowledgement", 2], {3, 6}),  # its peer may have the delta or not
        long(["before the delta", 9], {6}),
    ],
)
def test_parity_of_each_third_step_returns_to_one(make_cluster, right_states, point, back_to):
    suicides = {"1": {"1": point}}
    cluster = make_cluster(suicides=suicides, **settings_of("mirror", parity_every=3))
    require_nothing_lost(cluster, right_states("mirror"), [1])
    assert last_recovery(cluster)["step"] in back_to


@pytest.mark.parametrize(
    ("shape", "point"),
    [
        ("mirror", "decode"),
        *(long(shape, at) for shape in ("three", "four") for at in ("decode", "encode", "protect")),
    ],
)
def test_a_replacement_killed_while_it_is_rebuilt_costs_nothing(
    make_cluster, right_states, shape, point
):
    suicides = {"1": {"1": ["before the acknowledgement", 5], "2": [point, 0]}}
    cluster = make_cluster(suicides=suicides, **settings_of(shape))
    require_nothing_lost(cluster, right_states(shape), [1])


@pytest.mark.parametrize(
    "point", ["between two undone steps", long("before parity is undone"), long("encode")]
)
def test_a_survivor_of_another_group_killed_on_its_way_back_costs_nothing(
    make_cluster, right_states, point
):
    """Workers 0 and 2 are two steps ahead of what worker 3 has of worker 1."""
    late = ["before the delta, late", 5, [0, 6], [2, 6], [3, 5]]
    number = {"between two undone steps": 1, "encode": 0}.get(point, 0)
    suicides = {"1": {"1": late}, "0": {"1": [point, number]}}
    cluster = make_cluster(suicides=suicides, **settings_of("two mirrors"))
    require_nothing_lost(cluster, right_states("two mirrors"), [0] if point == "encode" else [0, 1])


@pytest.mark.parametrize("recovery", ["full", long("exact")])
def test_the_trained_model_is_saved_again_by_those_who_had_saved_it(
    make_cluster, right_states, recovery
):
    """Worker 1 dies before its last save; the others have made theirs, and all go back."""
    suicides = {"1": {"1": ["last save", 0]}}
    cluster = make_cluster(suicides=suicides, **settings_of("mirror", recovery=recovery))
    run(cluster)
    assert states(cluster) == right_states("mirror")
    assert last_recovery(cluster)["recovery"] == recovery
    for rank in cluster.ranks:
        stores = Path(cluster.settings.directory) / "stores"
        reader = StoreReader(worker_directory(stores, rank, cluster.settings.world_size))
        newest = reader.manifest.dense[-1]
        assert (newest.last_step, newest.is_complete) == (STEPS, True)


def test_workers_with_other_options_of_parity_end_with_an_error_that_names_them(make_cluster):
    cluster = make_cluster(**settings_of("mirror", parity_every=[1, 2]))
    cluster.start()
    assert set(cluster.exit_codes(WAIT_SECONDS).values()) == {1}
    assert "Parity(every_steps=) (workers [0]: 1; workers [1]: 2)" in cluster.logs()
    assert cluster.events(0, "step") == []


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["rowwise", "sparse adam"])
def test_every_optimizer_of_single_rows_is_protected(make_cluster, right_states, optimizer):
    suicides = {"1": {"1": ["reduced", 1]}, "2": {"1": ["before the acknowledgement", 6]}}
    cluster = make_cluster(suicides=suicides, **settings_of("three", optimizer))
    require_nothing_lost(cluster, right_states("three", optimizer), [2])


@pytest.mark.long
def test_two_of_a_group_lost_together_fall_back_to_the_store_and_are_protected_again(make_cluster):
    settings = settings_of("three", num_steps=14)
    suicides = {"1": {"1": ["reduced", 6]}, "2": {"1": ["reduced", 6], "2": ["reduced", 11]}}
    cluster = make_cluster(suicides=suicides, **settings)
    run(cluster)
    fallback, exact = (e["recovery"] for e in cluster.recoveries(0)[-2:])
    assert (fallback["recovery"], fallback["lost"]) == ("partial", [1, 2])
    assert fallback["obstacle"] == "workers [1, 2] of one parity group were lost together"
    assert min(fallback["bytes_read"][1:]) > 0
    assert fallback["bytes_read"][0] == 0
    assert (exact["recovery"], exact["lost"], exact["samples_lost"]) == ("exact", [2], [0, 0, 0])


@pytest.mark.parametrize(
    ("shape", "later"), [("mirror", 9), *(long(shape, 9) for shape in ("three", "four"))]
)
def test_parity_encoded_behind_training_protects_once_it_is_complete(
    make_cluster, right_states, shape, later
):
    """Worker 1 dies twice: the second time its peers hold the parity that they encoded meanwhile.

    The first time, none of it is complete, and the store is used, which was never written.
    """
    settings = settings_of(shape)
    settings["options"]["encode_rate"] = 1
    suicides = {"1": {"1": ["reduced", 0], "2": ["reduced", later]}}
    cluster = make_cluster(suicides=suicides, **settings)
    run(cluster)
    _, early, late = (event["recovery"] for event in cluster.recoveries(0))
    assert (early["recovery"], early["lost"]) == ("partial", [1])
    assert "was not complete" in early["obstacle"]
    assert (late["recovery"], late["lost"], late["obstacle"]) == ("exact", [1], "")
    trained = {e["step"]: e["tables"] for e in cluster.events(1, "step")}
    assert cluster.recoveries(1)[-1]["tables"] == trained[late["step"]]
    states(cluster)  # steps that were trained twice are the same
    protected = [e["protected"] for e in cluster.events(0, "metrics") if e["at"] == "step"]
    assert (protected[0], any(protected)) == (False, True)


@pytest.mark.parametrize(
    ("shape", "suicides", "lost"),
    [
        ("mirror", {"1": {"1": ["reduced", 3]}}, [1]),
        long("three", {"1": {"1": ["optimizer", 3], "2": ["reduced", 5]}}, [1]),
        long("four", {"1": {"1": ["reduced", 3], "2": ["before the delta", 5]}}, [1]),
        # Another group loses a worker: the one that lacks rows is rebuilt again.
        long("two mirrors", {"1": {"1": ["reduced", 3]}, "2": {"1": ["reduced", 5]}}, [1, 2]),
    ],
)
def test_a_replacement_that_trains_while_it_is_rebuilt_costs_nothing(
    make_cluster, right_states, shape, suicides, lost
):
    settings = settings_of(shape, suicides=suicides)
    settings["options"]["rebuild_rate"] = 1
    cluster = make_cluster(**settings)
    run(cluster)
    found, expected = states(cluster), right_states(shape)
    assert found == {at: known for at, known in expected.items() if at in found}
    assert all((rank, STEPS) in found for rank in cluster.ranks)
    assert [event for event in cluster.events(1, "step") if "tables" not in event]
    assert len(cluster.events(1, "initialized")) == 1  # not after a loss
    last = last_recovery(cluster)
    assert (last["recovery"], last["obstacle"], last["lost"]) == ("exact", "", lost)
    for recovery in (e["recovery"] for e in cluster.recoveries(0)[1:]):
        assert set(recovery["samples_lost"]) == set(recovery["bytes_read"]) == {0}


@pytest.mark.long
def test_two_of_a_group_lost_while_one_is_rebuilt_fall_back_to_the_store(make_cluster):
    settings = settings_of("three", num_steps=14)
    settings["options"]["rebuild_rate"] = 1
    suicides = {"1": {"1": ["reduced", 6]}, "2": {"1": ["reduced", 8]}}
    cluster = make_cluster(suicides=suicides, **settings)
    run(cluster)
    exact, fallback = (e["recovery"] for e in cluster.recoveries(0)[1:])
    assert (exact["recovery"], exact["lost"]) == ("exact", [1])
    assert (fallback["recovery"], fallback["lost"]) == ("partial", [1, 2])
    assert fallback["obstacle"] == "workers [1, 2] of one parity group were lost together"
    assert min(fallback["bytes_read"][1:]) > 0


@pytest.mark.parametrize(
    ("shape", "parity_every", "point", "steps_lost"),
    [
        ("mirror", 1, ["before the delta", 6], 1),
        long("three", 1, ["optimizer", 6], 1),
        long("four", 3, ["reduced", 7], 2),
        long("mirror", 3, ["before the acknowledgement", 2], 3),
    ],
)
def test_partial_recovery_takes_lost_rows_from_parity_and_nobody_goes_back(
    make_cluster, right_states, shape, parity_every, point, steps_lost
):
    settings = settings_of(shape, parity_every=parity_every, recovery="partial", num_steps=14)
    suicides = {"1": {"1": point, "2": ["reduced", 11]}}  # then from parity of after the first
    cluster = make_cluster(suicides=suicides, **settings)
    run(cluster)
    first, second = (event["recovery"] for event in cluster.recoveries(0)[1:])
    batch = SAMPLES * cluster.settings.world_size
    for recovery in (first, second):
        assert (recovery["recovery"], recovery["lost"], recovery["obstacle"]) == (
            "partial",
            [1],
            "",
        )
        assert set(recovery["bytes_read"]) == {0}
        assert [rows > 0 for rows in recovery["rows_restored"]] == [r == 1 for r in cluster.ranks]
        assert recovery["samples_lost"][0] == 0
    assert first["samples_lost"][1] <= steps_lost * batch
    for rank in cluster.ranks:
        # Until the first loss as without it: a step that the lost worker made, and did not note.
        known = {at: tables for (r, at), (tables, _) in right_states(shape).items() if r == rank}
        known |= {e["step"]: e["tables"] for e in cluster.events(rank, "step")}
        for event in cluster.recoveries(rank)[1:]:
            lost = event["recovery"]["samples_lost"][rank] // batch
            assert event["tables"] == known[event["step"] - lost]
            known[event["step"]] = event["tables"]
        if rank != 1:  # no step is trained again
            assert [e["step"] for e in cluster.events(rank, "step")] == list(range(1, 15))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (["rows change unseen", 7], "worker 0: rows changed outside their optimizer unseen: table"),
        long(
            ["parity is damaged", 4],
            "worker 1: its rebuilt rows differ from their checksums: table",
        ),
    ],
)
def test_rows_that_differ_from_their_checksums_are_never_used(make_cluster, fault, says):
    """All take the store in place of parity, and are protected again."""
    settings = settings_of("mirror")
    settings["options"]["faults"] = {"0": fault}
    cluster = make_cluster(suicides={"1": {"1": ["reduced", 5]}}, **settings)
    run(cluster)
    last = last_recovery(cluster)
    assert (last["recovery"], last["lost"]) == ("partial", [1])
    assert last["obstacle"].startswith(says)
    assert last["bytes_read"][1] > 0
    assert len({event["step"] for event in cluster.events(1, "step")}) == STEPS


def test_a_row_that_is_written_by_hand_is_reported_at_once_and_encoded_again(
    make_cluster, nursery, tmp_path_factory
):
    """A line names the row, the metric falls; the next loss costs nothing."""
    settings = settings_of("mirror", num_steps=12)
    settings["options"]["faults"] = {"0": ["a row is written by hand", 7]}
    untouched = Cluster([nursery], tmp_path_factory.mktemp("untouched"), **settings)
    run(untouched)
    cluster = make_cluster(suicides={"1": {"1": ["reduced", 9]}}, **settings)
    require_nothing_lost(cluster, states(untouched), [1])
    seen = [e for e in cluster.events(0, "metrics") if e["at"] == "step"]
    assert [e["protected"] for e in seen[:4]] == [True, True, True, False]  # at the very step
    assert [e["protected"] for e in seen if e["step"] in (7, 8)] == [True, True]
    said = cluster.logs()
    assert "worker 0: parity group [0, 1] is not protected after step 4: table 'rows" in said
    assert "among rows 7 to 7, were changed outside" in said
    assert "worker 1: parity group [0, 1] is not protected after step" in said


def test_rows_changed_in_one_group_do_not_send_another_to_the_store(make_cluster):
    settings = settings_of("two mirrors")
    settings["options"]["faults"] = {"0": ["rows change unseen", 7]}
    cluster = make_cluster(suicides={"1": {"1": ["reduced", 5]}}, **settings)
    run(cluster)
    last = last_recovery(cluster)
    assert (last["recovery"], last["lost"], set(last["bytes_read"])) == ("partial", [1], {0})
    assert last["obstacle"].startswith("worker 0: rows changed outside their optimizer unseen")
    assert last["rows_restored"][1] > 0


@pytest.mark.parametrize("recovery", ["exact", long("partial")])
def test_two_of_a_group_lost_together_leave_another_group_its_parity(make_cluster, recovery):
    """Workers 0 and 2 are a group and take the store; worker 1 is rebuilt by worker 3."""
    suicides = {str(rank): {"1": ["reduced", 6]} for rank in (0, 1, 2)}
    cluster = make_cluster(suicides=suicides, **settings_of("two mirrors", recovery=recovery))
    run(cluster)
    last = last_recovery(cluster)
    assert (last["recovery"], last["lost"]) == ("partial", [0, 1, 2])
    assert last["obstacle"] == "workers [0, 2] of one parity group were lost together"
    assert [number > 0 for number in last["bytes_read"]] == [True, False, True, False]
    assert [rows > 0 for rows in last["rows_restored"]] == [True, True, True, False]
    lost = last["samples_lost"]
    assert lost[1] <= min(lost[0], lost[2])  # stores may have it all but the step that is undone


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rebuild_rate", [None, 1])
@pytest.mark.parametrize("part", range(25))
def test_a_hundred_random_kills_cost_nothing(make_cluster, right_states, part, rebuild_rate):
    """Four in each job; some of them kill a replacement before, while or after it is rebuilt."""
    chance, steps = random.Random(), 50
    settings = settings_of("four", num_steps=steps)
    if rebuild_rate is not None:
        settings["options"]["rebuild_rate"] = rebuild_rate
    cluster = make_cluster(**settings)
    cluster.start()
    victim, killed = None, []
    for moment in sorted(chance.sample(range(1, steps - 5), 4)):
        cluster.wait_until(lambda moment=moment: newest_step(cluster) >= moment, WAIT_SECONDS)
        if victim is None or is_rebuilt(cluster, victim) or chance.random() < 0.5:
            if victim is not None:
                cluster.wait_until(lambda rank=victim: is_rebuilt(cluster, rank), WAIT_SECONDS)
            victim = chance.choice(cluster.ranks)
        time.sleep(0.2 * chance.random())
        if cluster.exit_code(victim, 0) is None:
            cluster.kill(victim)
            if cluster.exit_code(victim, WAIT_SECONDS) == -signal.SIGKILL:
                killed.append(victim)
                cluster.start(victim)
    cluster.finish(WAIT_SECONDS)
    expected = right_states("four", num_steps=steps)
    if rebuild_rate is None:
        require_states(cluster, expected, killed)
    else:  # of steps that were trained while rows were missing, nothing is known
        known = states(cluster)
        assert known == {at: state for at, state in expected.items() if at in known}
        for rank in cluster.ranks:
            for event in cluster.events(rank, "finished"):
                assert event["tables"] == expected[rank, steps][0]
    found = [event["recovery"] for event in cluster.recoveries(0)[1:]]
    assert {recovery["recovery"] for recovery in found} <= {"exact"}
    print(f"{len(killed)} kills, {len(found)} recoveries, {len(states(cluster))} states compared")


def newest_step(cluster):
    steps = [e["step"] for rank in cluster.ranks for e in cluster.events(rank, "step")]
    return max(steps, default=0)


def is_rebuilt(cluster, rank):
    """This process has all its rows, and its group is protected; or the job was finished."""
    events = [e for e in cluster.events(rank) if e["pid"] == cluster.pids[rank]]
    return any(e["event"] == "ended" or e.get("protected") for e in events)
