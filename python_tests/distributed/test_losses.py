"""Losses, by job, recovery, who and when: what is lost, and what every step's bits are then."""

import re

import pytest

from python_tests.distributed.losses import kill_at_random, long, mlp, require_nothing_lost
from python_tests.distributed.mlp_job import ROWS, SAMPLES

FULL = {"recovery": "full"}
POINTS = (
    "before the delta", "between two holders", "before the acknowledgement", "reduced", "optimizer",
)  # fmt: skip
# Workers 0 and 2 are two steps ahead of what worker 3 has of worker 1.
LATE = ["before the delta", 5, [0, 6], [2, 6], [3, 5]]


@pytest.mark.parametrize(
    ("shape", "options", "deaths", "lost"),
    [
        ("four", {}, {1: [["between two holders", 5]]}, [1]),
        *(long(shape, {}, {1: [[at, 5]]}, [1]) for shape in ("mirror", "three") for at in POINTS),
        *(long("four", {}, {1: [[at, 5]]}, [1]) for at in POINTS if at != "between two holders"),
        # Each worker's own buffers come back; a survivor undoes those of a step, too.
        ("mirror", {"variants": ["normed"]}, {1: [["before the acknowledgement", 5]]}, [1]),
        long("mirror", {"variants": ["normed"]}, {1: [["optimizer", 5]]}, [1]),
        ("mirror", {"parity_every": 3}, {1: [["optimizer", 7]]}, [1]),
        long("mirror", {"parity_every": 3}, {1: [["before the acknowledgement", 2]]}, [1]),
        long("mirror", {"parity_every": 3}, {1: [["before the delta", 9]]}, [1]),
        ("three", {"device": True}, {1: [["between two holders", 5]]}, [1]),
        ("three", {"device": True, "parity_every": 3}, {1: [["optimizer", 5]]}, [1]),
        *(long("three", {"device": True}, {1: [[at, 5]]}, [1]) for at in POINTS),
        # A replacement dies while it is rebuilt; a survivor of another group on its way back.
        ("mirror", {}, {1: [["before the acknowledgement", 5], ["decode", 0]]}, [1]),
        *(
            long(shape, {}, {1: [["before the acknowledgement", 5], [at, 0]]}, [1])
            for shape in ("three", "four")
            for at in ("decode", "encode", "protect")
        ),
        ("two mirrors", {}, {1: [LATE], 0: [["between two undone steps", 1]]}, [0, 1]),
        long("two mirrors", {}, {1: [LATE], 0: [["before parity is undone", 0]]}, [0, 1]),
        long("two mirrors", {}, {1: [LATE], 0: [["encode", 0]]}, [0]),
        *(
            long(
                "three", {"optimizer": name},
                {1: [["reduced", 1]], 2: [["before the acknowledgement", 6]]}, [2],
            )
            for name in ("rowwise", "sparse adam")
        ),
        # It trains while it is rebuilt; where another is lost, it is rebuilt again.
        ("mirror", {"rebuild_rate": 1}, {1: [["reduced", 3]]}, [1]),
        long("three", {"rebuild_rate": 1}, {1: [["optimizer", 3], ["reduced", 5]]}, [1]),
        long("four", {"rebuild_rate": 1}, {1: [["reduced", 3], ["before the delta", 5]]}, [1]),
        long(
            "two mirrors", {"rebuild_rate": 1}, {1: [["reduced", 3]], 2: [["reduced", 5]]}, [1, 2]
        ),
        # Ids are evicted from the fifth step on.
        ("mirror", {"keyed": True}, {1: [["optimizer", 8]]}, [1]),
        ("three", {"keyed": True}, {1: [["before the acknowledgement", 9], ["decode", 0]]}, [1]),
        ("mirror", {"keyed": True, "rebuild_rate": 1}, {1: [["reduced", 7]]}, [1]),
        long("mirror", {"keyed": True}, {1: [["forward", 8]]}, [1]),
        long("four", {"keyed": True}, {1: [["before the delta", 8], ["encode", 0]]}, [1]),
        ("mirror", {**FULL, "variants": ["normed"]}, {1: [["reduced", 6]]}, None),
        ("three", FULL, {1: [["reduced", 6]], 0: [["rolling back", 0]]}, None),
        ("mirror", FULL, {1: [["reduced", 0]]}, None),  # there is no point yet
        # One is two commits ahead; the model was saved by one, and all go back.
        ("mirror", {**FULL, "num_steps": 24}, {1: [["lagging", 10]]}, None),
        ("mirror", FULL, {1: [["last save", 0]]}, None),
        long("mirror", {}, {1: [["last save", 0]]}, None),
    ],
)  # fmt: skip
def test_nothing_is_lost(make_cluster, untouched, shape, options, deaths, lost):
    settings = mlp(shape, **options)
    cluster, expected = make_cluster(deaths=deaths, **settings), untouched(settings)
    require_nothing_lost(cluster, expected, lost)
    if "parity_every" in options:
        assert cluster.recovered(0)[-1]["step"] % 3 == 0
    if "rebuild_rate" in options:
        assert [event for event in cluster.events(1, "step") if "tables" not in event]
        assert len(cluster.events(1, "initialized")) == 1  # not after a loss
    if "keyed" in options:
        assert evictions(expected) > 4 * ROWS
    if not options and deaths.keys() == {1} and len(deaths[1]) == 1:
        require_true_metrics(cluster)


def evictions(expected):
    """The ids that were in a map at one step and not at the next."""
    held = {at: {key for key, _ in replicas["map"][0]} for at, (_, replicas) in expected.items()}
    return sum(len(held[rank, step] - held.get((rank, step + 1), set())) for rank, step in held)


def require_true_metrics(cluster):
    """Protected while all train, and not while a worker is missing or rebuilt."""
    said = r"worker 1 was rebuilt from its peers' memory: 40 rows in \d{1,2}\.\d s"
    assert re.search(said, cluster.logs())
    for rank in cluster.ranks:
        seen = cluster.events(rank, "metrics")
        assert {e["protected"] for e in seen if e["at"] == "peer_lost"} <= {False}
        training = [e for e in seen if e["at"] in ("recovered", "step")]
        assert {(e["protected"], e["rebuild_progress"]) for e in training} == {(True, 1.0)}
        assert {e["lag_steps"] for e in training} <= {0, 1}
        assert max(e["bytes_sent"] for e in training) > 0
    assert cluster.events(0, "metrics")[-1]["rebuilds"] == len(cluster.recoveries())


LOST_TOGETHER = "workers [{}] of one parity group were lost together"
TWICE = {1: [["reduced", 6]], 2: [["reduced", 6], ["reduced", 11]]}
UNSEEN = "worker 0: rows changed outside their optimizer unseen: table"


@pytest.mark.parametrize(
    ("shape", "options", "deaths", "says", "lost", "reads"),
    [
        ("three", {"keyed": True}, TWICE, LOST_TOGETHER.format("1, 2"), [1, 2], [1, 2]),
        long("three", {}, TWICE, LOST_TOGETHER.format("1, 2"), [1, 2], [1, 2]),
        long(
            "three", {"rebuild_rate": 1}, {1: [["reduced", 6]], 2: [["reduced", 8]]},
            LOST_TOGETHER.format("1, 2"), [1, 2], [1, 2],
        ),
        # Worker 1 is of another group, and rebuilt by worker 3.
        *(
            mark(
                "two mirrors", {"recovery": recovery}, {r: [["reduced", 6]] for r in range(3)},
                LOST_TOGETHER.format("0, 2"), [0, 1, 2], [0, 2],
            )
            for recovery, mark in (("exact", pytest.param), ("partial", long))
        ),
        # Then from the parity that was encoded behind training. The store was never written.
        *(
            mark(
                shape, {"encode_rate": 1}, {1: [["reduced", 0], ["reduced", 9]]},
                "the parity on worker", [1], [],
            )
            for shape, mark in (("mirror", pytest.param), ("three", long), ("four", long))
        ),
        *(
            (shape, {"faults": {"0": "rows change unseen"}}, {1: [["reduced", 5]]},
             UNSEEN, [1], reads)
            for shape, reads in (("mirror", [1]), ("two mirrors", []))
        ),
        long(
            "mirror", {"faults": {"0": "parity is damaged"}}, {1: [["reduced", 5]]},
            "worker 1: its rebuilt rows differ from their checksums: table", [1], [1],
        ),
    ],
)  # fmt: skip
def test_what_parity_does_not_suffice_for_is_named_and_read(
    make_cluster, shape, options, deaths, says, lost, reads
):
    """From the stores of these workers; then all are protected again."""
    cluster = make_cluster(deaths=deaths, **mlp(shape, **{"num_steps": 14, **options}))
    cluster.run()
    told = cluster.recoveries()
    [fallback] = [recovery for recovery in told if recovery["obstacle"]]
    assert fallback["obstacle"].startswith(says)
    assert (fallback["recovery"], fallback["lost"]) == ("partial", lost)
    assert [rank for rank in cluster.ranks if fallback["bytes_read"][rank] > 0] == reads
    if shape == "two mirrors":
        restored = [rank for rank in cluster.ranks if fallback["rows_restored"][rank] > 0]
        assert restored == lost
    for recovery in told[told.index(fallback) + 1 :]:
        assert (recovery["recovery"], set(recovery["samples_lost"])) == ("exact", {0})


@pytest.mark.parametrize(
    ("shape", "options", "point", "steps_lost"),
    [
        ("mirror", {}, ["before the delta", 6], 1),
        ("mirror", {"keyed": True}, ["before the delta", 8], 1),
        long("three", {}, ["optimizer", 6], 1),
        long("four", {"parity_every": 3}, ["reduced", 7], 2),
        long("mirror", {"parity_every": 3}, ["before the acknowledgement", 2], 3),
    ],
)
def test_partial_recovery_takes_lost_rows_from_parity_and_nobody_goes_back(
    make_cluster, untouched, shape, options, point, steps_lost
):
    settings = mlp(shape, **options, num_steps=14)
    deaths = {1: [point, ["reduced", 11]]}  # then from parity of after the first
    cluster = make_cluster(deaths=deaths, **{**settings, "recovery": "partial"})
    cluster.run()
    first, second = cluster.recoveries()[1:]
    batch = SAMPLES * cluster.settings.world_size
    for told in (first, second):
        assert (told["recovery"], told["lost"], told["obstacle"]) == ("partial", [1], "")
        assert set(told["bytes_read"]) == {0}
        assert [rows > 0 for rows in told["rows_restored"]] == [r == 1 for r in cluster.ranks]
        assert told["samples_lost"][0] == 0
    assert first["samples_lost"][1] <= steps_lost * batch
    for rank in cluster.ranks:
        # Until the first loss as without it: a step that the lost worker made, and did not note.
        known = {at: tables for (r, at), (tables, _) in untouched(settings).items() if r == rank}
        known |= {e["step"]: e["tables"] for e in cluster.events(rank, "step")}
        for event in cluster.recovered(rank)[1:]:
            lost = event["recovery"]["samples_lost"][rank] // batch
            assert event["tables"] == known[event["step"] - lost]
            known[event["step"]] = event["tables"]
        if rank != 1:  # no step is trained again
            assert [e["step"] for e in cluster.events(rank, "step")] == list(range(1, 15))


def test_a_row_that_is_written_by_hand_is_reported_at_once_and_encoded_again(
    make_cluster, untouched
):
    """A line names the row, the metric falls; the next loss costs nothing."""
    settings = mlp(num_steps=12, faults={"0": "a row is written by hand"})
    cluster = make_cluster(deaths={1: [["reduced", 9]]}, **settings)
    require_nothing_lost(cluster, untouched(settings), [1])
    seen = [e for e in cluster.events(0, "metrics") if e["at"] == "step"]
    assert [e["protected"] for e in seen[:4]] == [True, True, True, False]  # at the very step
    assert [e["protected"] for e in seen if e["step"] in (7, 8)] == [True, True]
    said = cluster.logs()
    assert "worker 0: parity group [0, 1] is not protected after step 4: table 'rows" in said
    assert "among rows 7 to 7, were changed outside" in said
    assert "worker 1: parity group [0, 1] is not protected after step" in said


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("shape", "options", "steps", "kills"),
    [
        ("three", {"keyed": True}, 30, 2),
        ("three", FULL, 20, 2),
        long("three", {"keyed": True}, 80, 8),
        *(long("three", FULL, 60, 10) for _ in range(20)),
        *(long("four", {}, 50, 4) for _ in range(25)),
        *(long("four", {"rebuild_rate": 1}, 50, 4) for _ in range(25)),
    ],
)
def test_kills_at_random_moments_cost_nothing(
    make_cluster, untouched, shape, options, steps, kills
):
    settings = mlp(shape, num_steps=steps, **options)
    kill_at_random(make_cluster(**settings), untouched(settings), kills)
