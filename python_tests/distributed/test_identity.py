"""Who a worker is, and that it is the only one."""

import subprocess
import sys

import pytest

from cpr_ext.distributed.identity import Identity, Place, TimeOuts, worker_directory
from cpr_ext.errors import StoreError, UsageError

OURS = {"CPR_RANK": "2", "CPR_WORLD_SIZE": "4", "CPR_RENDEZVOUS": "head:29400"}


def test_a_worker_finds_itself_in_the_environment():
    identity = Identity.from_environment(OURS)
    assert identity == Identity(2, 4, "head", 29400, "cpr", None)
    local = Identity.from_environment({**OURS, "CPR_RENDEZVOUS": "127.0.0.1:1", "CPR_JOB": "b"})
    assert (local.address, local.job) == ("127.0.0.1", "b")


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, {"JOB_COMPLETION_INDEX": "2"}],
)
def test_schedulers_say_the_rank_by_names_of_their_own(environment):
    known = {"CPR_WORLD_SIZE": "4", "CPR_RENDEZVOUS": "head:29400", **environment}
    assert Identity.from_environment(known).rank == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"CPR_RANK": "4"}, "worker 4 of 4 cannot be"),
        ({"CPR_RANK": "two"}, "CPR_RANK is 'two'"),
        ({"CPR_RENDEZVOUS": "head"}, "HOST:PORT"),
        ({"CPR_RENDEZVOUS": ""}, "HOST:PORT"),
    ],
)
def test_a_wrong_variable_is_named(change, message):
    with pytest.raises(UsageError, match=message):
        Identity.from_environment({**OURS, **change})


def test_a_script_started_by_hand_is_told_how_to_start_it():
    with pytest.raises(UsageError, match="cpr launch --nproc N SCRIPT"):
        Identity.from_environment({})


def test_every_time_out_is_above_zero():
    with pytest.raises(UsageError, match="join_seconds is 0"):
        TimeOuts(join_seconds=0)


def test_every_worker_has_a_directory_of_its_own(tmp_path):
    directories = {worker_directory(tmp_path, rank, 3) for rank in range(3)}
    assert len(directories) == 3
    assert worker_directory(tmp_path, 0, 3) != worker_directory(tmp_path, 0, 2)


def test_a_place_is_held_by_one_and_free_once_its_process_is_dead(tmp_path):
    identity = Identity(0, 1, "127.0.0.1", 1)
    code = (
        "import sys, time\n"
        "from cpr_ext.distributed.identity import Identity, Place\n"
        "Place(sys.argv[1], Identity(0, 1, '127.0.0.1', 1)).take(1)\n"
        "print('taken', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"taken\n"
        place = Place(tmp_path, identity)
        with pytest.raises(StoreError, match=f"worker 0 is still process {holder.pid}"):
            place.take(0.1)
        holder.kill()
        place.take(10)
    place.give_back()
    again = Place(tmp_path, identity)
    again.take(0.1)
    again.give_back()
