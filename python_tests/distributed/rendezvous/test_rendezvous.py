"""A worker's seat at the rendezvous: whom it meets, and with what reason it gives up."""

import os
import time

import pytest
from torch.distributed.elastic.rendezvous import api

from cpr_ext.distributed import torchrun
from cpr_ext.distributed.identity.worker_identity import Identity, TimeOuts
from cpr_ext.distributed.rendezvous import rendezvous
from cpr_ext.distributed.rendezvous.rendezvous import Rendezvous
from cpr_ext.distributed.torchrun import CprRendezvous
from cpr_ext.errors import RendezvousError

SECRET = "of-the-tests-of-the-rendezvous-and-no-other"
QUICK = TimeOuts(join_seconds=1.0, heartbeat_seconds=0.5)


def seat(place, rank, job, *, world_size=2, secret=SECRET, time_outs=QUICK):
    return Rendezvous(Identity(rank, world_size, *place, job, secret=secret), time_outs)


@pytest.fixture
def agent_of(place, tmp_path, monkeypatch):
    """Makes an agent of torchrun in a job."""
    monkeypatch.setattr(torchrun.os, "environ", dict(os.environ))
    made = []

    def make(job, secret=SECRET):
        (tmp_path / "secret").write_text(secret)
        endpoint, conf = "{}:{}".format(*place), {"secret_file": str(tmp_path / "secret")}
        made.append(CprRendezvous(api.RendezvousParameters("cpr", endpoint, job, 1, 2, **conf)))
        return made[-1]

    yield make
    for agent in made:
        agent.shutdown()


def test_who_waits_in_vain_names_the_missing_and_no_agent_starts_workers_again(place, agent_of):
    agent = agent_of("vain")
    agent.next_rendezvous()
    waits = seat(place, 1, "vain", world_size=4)
    with pytest.raises(RendezvousError, match=r"waited 1 s at .* for workers 0, 2, 3, which did"):
        waits.join()
    while not agent.num_nodes_waiting():  # then torchrun ends its worker
        time.sleep(0.01)
    with pytest.raises(api.RendezvousConnectionError, match="worker 1 waited 1 s at 127"):
        agent.next_rendezvous()
    # It waits no more: the others do not meet it.
    with pytest.raises(RendezvousError, match="for workers 1, 2, 3,"):
        seat(place, 0, "vain", world_size=4).join()


def test_the_same_error_again_and_again_is_counted(place):
    waits = seat(place, 1, "errors")
    errors = ["a poison batch", "a poison batch", "another", "a poison batch"]
    assert [waits.count_failure(error) for error in errors] == [1, 2, 1, 1]
    assert seat(place, 0, "errors").count_failure("a poison batch") == 1


@pytest.mark.parametrize(
    ("code", "kills", "why"),
    [(-9, 1, "OOMKilled: by SIGKILL, as"), (-9, 0, "SIGKILL"), (-11, 1, "SIGSEGV"), (3, 1, "ex")],
)
def test_what_torchrun_says_of_a_death_reaches_who_is_left(
    place, agent_of, monkeypatch, code, kills, why
):
    counts = iter([5, 5 + kills])
    monkeypatch.setattr(torchrun, "_memory_kills", lambda: next(counts))
    job = f"ends {code} {kills}"
    agent_of(job)
    patient = TimeOuts()
    first, second = (seat(place, 0, job, world_size=1, time_outs=patient) for _ in range(2))
    first.join()
    assert first.ended == {}
    said = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    torchrun._FAILURES.error(said, code, 0, os.getpid(), "python")
    first.leave()
    second.join()
    assert second.ended[0].startswith(why)


def test_a_wrong_secret_is_an_error_with_the_remedy(place, agent_of, monkeypatch):
    """Of a worker, and of an agent of torchrun."""
    for module in (rendezvous, torchrun):
        monkeypatch.setattr(module, "UNTRUSTED_SECONDS", 0.3)
    wrong = "of-somebody-else-" * 3
    stranger = seat(place, 0, "wrong", secret=wrong, time_outs=TimeOuts())
    with pytest.raises(RendezvousError, match=r"refused this worker's secret; give .* the same"):
        stranger.join()
    assert not stranger.all_noted(["anything"])
    with pytest.raises(api.RendezvousConnectionError, match="refused this worker's secret; give"):
        agent_of("wrong", wrong).next_rendezvous()
