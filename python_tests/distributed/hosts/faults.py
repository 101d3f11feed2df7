"""What happens to a job: one function per kind of fault, with chance for when and whom."""

import os
import signal

from python_tests.distributed.agents import order
from python_tests.distributed.hosts.fate_job import POINTS

LONG, SHORT = (4.5, 7.0), (0.3, 2.0)  # than the time-out of a collective, which is 3 s


def killed(trial, rank):
    pid = trial.cluster.pids[rank]
    trial.killed.add(pid)
    os.kill(pid, signal.SIGKILL)


def two_killed(trial, rank):
    killed(trial, rank)
    killed(trial, (rank + 1) % trial.world_size)


def asked_to_end(trial, rank):
    trial.asked.add(trial.cluster.pids[rank])
    trial.cluster.kill(rank, with_signal=signal.SIGTERM)


def says(what):
    def at_a_point(trial, rank):
        path = order(trial.folder, rank, f"{trial.chance.choice(POINTS)} {what}")
        trial.wait_for(lambda: not path.exists() or trial.is_over(), f"worker {rank} to obey")

    return at_a_point


def stopped(seconds):
    def stop(trial, rank):
        pid = trial.cluster.pids[rank]
        os.kill(pid, signal.SIGSTOP)
        trial.pass_time(*seconds)
        os.kill(pid, signal.SIGCONT)

    return stop


def cut(seconds):
    def cut_off(trial, rank):
        host = trial.host_of[rank]
        trial.network.cut(host)
        trial.pass_time(*seconds)
        trial.network.mend(host)

    return cut_off


def one_way(trial, rank):
    host, other = trial.host_of[rank], trial.another_host(rank)
    trial.network.mute(host, other)
    trial.pass_time(1.0, 7.0)
    trial.network.unmute(host, other)


def pair(trial, rank):
    """Both ways; the rendezvous is reached by both."""
    host, other = trial.host_of[rank], trial.another_host(rank)
    trial.network.mute(host, other), trial.network.mute(other, host)
    trial.pass_time(5.0, 12.0)
    trial.network.unmute(host, other), trial.network.unmute(other, host)


def flaps(trial, rank):
    host = trial.host_of[rank]
    for _ in range(trial.chance.randint(2, 5)):
        trial.network.cut(host)
        trial.pass_time(0.1, 1.0)
        trial.network.mend(host)
        trial.pass_time(0.1, 1.0)


def slow(trial, rank):
    host = trial.host_of[rank]
    trial.network.slow(host, "2mbit")
    trial.pass_time(1.0, 4.0)
    trial.network.fast(host)


def zombie(trial, rank):
    """A host is cut off, and its workers are replaced on another, with the same disk or another.

    Then it returns, and may find its place free for a moment.
    """
    host = trial.host_of[rank]
    cut_off = {r: trial.cluster.pids[r] for r in trial.host_of if trial.host_of[r] == host}
    elsewhere = trial.another_host(rank)
    trial.network.cut(host)
    # With full recovery an empty store is an error.
    is_common = trial.mode == "full" or trial.chance.random() < 0.5
    stores = None if is_common else f"disk {len(trial.seconds)}"
    for each in cut_off:
        trial.replace(each, elsewhere, stores=stores)
    trial.wait_until_trained()
    trial.network.mend(host)
    if trial.chance.random() < 0.7 and not trial.is_over():
        trial.pass_time(0.5, 6.0)
        for each in cut_off:
            killed(trial, each)
    for each, old in cut_off.items():
        code = None if trial.is_over() else trial.cluster.wait_for_exit(old, 60)
        trial.require(code not in (None, 0) or trial.is_over(), f"zombie {each} ended with {code}")


def second_launcher(trial, rank):
    """A healthy worker's rank is wanted by another process, on another host."""
    first = trial.cluster.pids[rank]
    second = trial.start_on(rank, trial.another_host(rank), stores="a second launcher's")
    trial.pass_time(0.5, 3.0)
    if trial.chance.random() < 0.5:  # a loss: there will be a round
        killed(trial, (rank + 1) % trial.world_size)
    trial.wait_until_trained()
    if not trial.is_over():
        trained_by = trial.cluster.events(rank, "step")[-1]["pid"]
        trial.require(trained_by == first, f"worker {rank} lost its place to a second process")
    trial.end(second)


def meeting_place(trial, rank):
    trial.cluster.kill_host()
    trial.pass_time(0.0, 2.0)
    trial.cluster.start_host()


FAULTS = {
    "KILL": killed, "two KILLs": two_killed, "SEGV": says("segv"), "_exit": says("_exit"),
    "exit(0)": says("exit"), "exception": says("raise"), "KILL at a point": says("kill"),
    "SIGTERM": asked_to_end, "leave()": says("leave"),
    "short hang": stopped(SHORT), "long hang": stopped(LONG),
    "short cut": cut(SHORT), "long cut": cut((6.0, 9.0)), "one-way cut": one_way,
    "pair cut": pair, "flapping": flaps, "slow link": slow, "zombie": zombie,
    "second launcher": second_launcher, "rendezvous killed": meeting_place,
}  # fmt: skip
