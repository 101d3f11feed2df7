"""A sample of what ``make test-hosts`` does by the hour; and mistakes that it must find."""

import pytest

from python_tests.distributed.hosts.trial import Finals, Trial, ViolationError
from python_tests.distributed.namespaces import hosts, or_skipped


@pytest.fixture(scope="module")
def around():
    """Four hosts; the last one has the rendezvous."""
    with or_skipped(), hosts(4) as found:
        yield found


def test_a_job_that_is_hurt_ends_in_the_bits_of_one_that_is_not(around, tmp_path):
    trial = Trial(around, tmp_path / "hurt", 7, mode="exact", model="stateful", hands=True)
    trial.run(["KILL at a point", "long cut", "second launcher"])
    assert trial.wrong(Finals(around, tmp_path).of(trial)) == []


def test_a_job_of_torchrec_that_is_hurt_ends_in_the_bits_of_one_that_is_not(around, tmp_path):
    pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")
    trial = Trial(around, tmp_path / "hurt", 7, mode="exact", model="torchrec")
    trial.run(["KILL at a point"])
    assert trial.wrong(Finals(around, tmp_path).of(trial)) == []


MISTAKES = [
    ("ComparesBuffers", None, "exact", False, ["KILL"]),
    ("GoesBackAfterDeathsOnly", None, "full", False, ["long hang", "long cut", "long hang"]),
    ("PublishesNothing", None, "exact", True, []),
    (None, "serve_without_epochs", "partial", False, ["zombie"] * 4),
    (None, "serve_without_roster", "partial", False, ["second launcher"] * 4),
]


@pytest.mark.long
@pytest.mark.parametrize(("job", "serve", "mode", "hands", "faults"), MISTAKES)
def test_a_planted_mistake_is_found(around, tmp_path, job, serve, mode, hands, faults):
    trial = Trial(around, tmp_path / "hurt", 3, mode=mode, model="stateful", hands=hands)
    right = Finals(around, tmp_path).of(trial) if mode != "partial" else None
    if right is None:
        trial.settings["num_steps"] = 400
    module = "python_tests.distributed.hosts.mistakes"
    if job is not None:
        trial.settings["job"] = (module, job)
    if serve is not None:
        trial.serve = (module, serve)
    try:
        wrong = trial.run(faults).wrong(right)
    except ViolationError as error:
        wrong = [str(error).splitlines()[0]]
    print(*wrong, sep="\n")
    assert wrong
