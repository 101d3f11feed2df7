"""`cpr launch`: processes are started, watched, started again and ended."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cpr_ext.distributed.identity.supervision import SignsOfLife, show_progress
from cpr_ext.distributed.identity.worker_identity import show_alive
from cpr_ext.distributed.launcher import Launcher
from cpr_ext.errors import UsageError

# Stands in for a worker: does what a file says it does in this life.
CHILD = """
import os, pathlib, shutil, signal, sys, time
folder = pathlib.Path(sys.argv[1])
rank = os.environ["CPR_RANK"]
lives = folder / f"lives-{rank}"
life = len(lives.read_text()) if lives.exists() else 0
with lives.open("a") as file:
    file.write("x")
(folder / f"pid-{rank}-{life}").write_text(str(os.getpid()))
plan = (folder / f"plan-{rank}").read_text().split()
what = plan[min(life, len(plan) - 1)]

def wait_for(other):
    while not any(path.read_text() for path in folder.glob(f"pid-{other}-0")):
        time.sleep(0.01)

if what == "die-late":
    wait_for(0)
if what in ("die", "die-late"):
    os.kill(os.getpid(), signal.SIGKILL)
if what == "fail":
    sys.exit(3)
if what == "fail-late":  # after it has met the others
    os.utime(os.environ["CPR_ALIVE_FILE"])
    sys.exit(3)
if what == "poison":
    why = "ValueError in step 20 of worker 0: a poison batch"
    pathlib.Path(os.environ["CPR_ALIVE_FILE"] + ".failed").write_text(why)
    os.utime(os.environ["CPR_ALIVE_FILE"])
    sys.exit(1)
if what == "give-up":
    wait_for(1)
    pathlib.Path(os.environ["CPR_ALIVE_FILE"]).write_text("worker 1 did not come")
    sys.exit(1)
if what == "replaced":
    pathlib.Path(os.environ["CPR_ALIVE_FILE"] + ".left").write_text("worker 1 was replaced")
    sys.exit(1)
if what == "rebuild":
    for percent in (0, 30, 60, 100):
        new = pathlib.Path(os.environ["CPR_ALIVE_FILE"] + ".new")
        new.write_text(f"worker {rank} is rebuilt: {percent} %")
        new.replace(os.environ["CPR_ALIVE_FILE"] + ".progress")
        time.sleep(0.1)
if what == "clean-and-die":  # as a cleaner of temporary files does
    shutil.rmtree(os.path.dirname(os.environ["CPR_ALIVE_FILE"]))
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hang-up":
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(0.3)
if "CPR_JOB_SECRET_FILE" in os.environ:
    assert pathlib.Path(os.environ["CPR_JOB_SECRET_FILE"]).read_text()
while what == "until-told" and not (folder / "told").exists():
    time.sleep(0.01)
if what == "sleep":
    time.sleep(1.5)
if what == "hang":
    time.sleep(60)
print("life", life, "of", rank, what)
print("and its errors", file=sys.stderr)
if what != "exit":
    pathlib.Path(os.environ["CPR_ALIVE_FILE"] + ".done").touch()
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    """Of the job; a launcher that hosts no rendezvous needs to be given one."""
    monkeypatch.setenv("CPR_JOB_SECRET", "of-the-tests-of-the-launcher-and-no-other")


@pytest.fixture
def launch(tmp_path):
    """Run a plan, e.g. {0: "die done"}; without a rendezvous of its own, which takes seconds."""
    (tmp_path / "child.py").write_text(CHILD)

    def run(plan, **options):
        for rank, lives in plan.items():
            (tmp_path / f"plan-{rank}").write_text(lives)
        said = []
        launcher = Launcher(
            [sys.executable, str(tmp_path / "child.py"), str(tmp_path)],
            len(plan),
            rendezvous="127.0.0.1:1",
            **{"report": said.append, **options},
        )
        return launcher.run(), said

    return run


def lives(tmp_path, rank):
    return len((tmp_path / f"lives-{rank}").read_text())


def test_all_workers_are_run_once_if_nothing_happens(launch, tmp_path):
    assert launch({0: "done", 1: "done"}) == (0, [])
    assert [lives(tmp_path, rank) for rank in range(2)] == [1, 1]


def test_only_the_worker_that_died_is_started_again(launch, tmp_path):
    code, said = launch({0: "done", 1: "die fail done"})
    assert code == 0
    assert [lives(tmp_path, rank) for rank in range(2)] == [1, 3]
    assert "worker 1 (process " in said[0]
    assert "was killed by SIGKILL; started again (1 of 10)" in said[0]
    assert "ended with code 3; started again (2 of 10)" in said[1]


@pytest.mark.timeout(60)
def test_a_death_is_seen_when_it_happens_not_when_the_launcher_looks_next(launch, monkeypatch):
    monkeypatch.setattr("cpr_ext.distributed.launcher._POLL_SECONDS", 1e6)
    code, said = launch({0: "die done"})
    assert (code, len(said)) == (0, 1)


def test_an_end_before_the_job_is_done_is_a_death_whatever_its_code(launch, tmp_path):
    code, said = launch({0: "exit done"})
    assert (code, lives(tmp_path, 0)) == (0, 2)
    assert "ended before its part of the job was done; started again (1 of 10)" in said[0]
    code, said = launch({0: "exit"})
    assert "3 times in a row soon after its start" in said[-1]


def test_a_temporary_folder_that_is_removed_ends_no_job(launch, tmp_path):
    code, said = launch({0: "clean-and-die done", 1: "sleep"}, hang_seconds=30.0)
    assert (code, len(said)) == (0, 1)
    assert [lives(tmp_path, rank) for rank in range(2)] == [2, 1]


def test_a_job_of_which_nobody_reads_the_reports_does_not_end(launch, tmp_path):
    def write_to_nobody(text):
        raise BrokenPipeError

    assert launch({0: "die done"}, report=write_to_nobody)[0] == 0
    assert lives(tmp_path, 0) == 2


def test_a_hangup_that_is_ignored_stays_ignored(launch, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert launch({0: "hang-up"}) == (0, [])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_restarts_before_a_long_life_do_not_count(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("cpr_ext.distributed.launcher._HEALTHY_SECONDS", 0.0)
    code, said = launch({0: "die die die die done"}, max_restarts=1)
    assert (code, lives(tmp_path, 0)) == (0, 5)
    assert all("started again (1 of 1)" in text for text in said)


def test_lines_begin_with_the_rank_and_go_to_a_file_for_each_worker(launch, tmp_path, capfd):
    logs = tmp_path / "logs"
    assert launch({0: "done", 1: "fail done"}, prefixes=True, log_dir=logs)[0] == 0
    written = capfd.readouterr()
    assert sorted(written.out.splitlines()) == ["[0] life 0 of 0 done", "[1] life 1 of 1 done"]
    assert sorted(written.err.splitlines()) == ["[0] and its errors", "[1] and its errors"]
    found = (logs / "worker-00001.log").read_text().splitlines()
    assert sorted(found) == ["and its errors", "life 1 of 1 done"]


def test_a_clock_that_is_set_is_no_hang(tmp_path, monkeypatch):
    signs = SignsOfLife(tmp_path / "worker-0")
    assert signs.silent_seconds() < 60
    for unix_seconds in (10.0, 4e9):  # of 1970, and of 2096
        os.utime(signs.path, (unix_seconds, unix_seconds))
        assert signs.silent_seconds() < 60


def test_a_worker_whose_rank_another_process_has_is_not_started_again(launch, tmp_path):
    code, said = launch({0: "sleep", 1: "replaced"})
    assert (code, said) == (1, ["worker 1 was replaced; not started again"])
    assert [lives(tmp_path, rank) for rank in range(2)] == [1, 1]


def test_progress_of_a_worker_is_shown_not_too_often_and_to_its_end(launch):
    code, said = launch({0: "done", 1: "rebuild"})
    assert code == 0
    assert said[-1] == "worker 1 is rebuilt: 100 %"
    assert len(said) <= 2


def test_a_new_life_does_not_show_the_progress_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_ALIVE_FILE", str(tmp_path / "worker-1"))
    signs = SignsOfLife(tmp_path / "worker-1")
    assert signs.progress() == ""
    for percent in (10, 90):
        show_progress(f"{percent} %")
    assert (signs.progress(), signs.reason()) == ("90 %", "")
    assert SignsOfLife(signs.path).progress() == ""
    monkeypatch.delenv("CPR_ALIVE_FILE")
    show_progress("nobody asks")


def test_a_worker_whose_launcher_has_ended_shows_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_ALIVE_FILE", str(tmp_path / "gone/worker-1"))
    show_alive()
    show_progress("50 %")
    assert not (tmp_path / "gone").exists()


def test_a_worker_that_always_dies_ends_the_others_too(launch, tmp_path):
    code, said = launch({0: "hang", 1: "die-late"}, max_restarts=2)
    assert code == 1
    assert lives(tmp_path, 1) == 3
    assert "started again 2 times already; ending all workers" in said[-1]
    assert not alive(int((tmp_path / "pid-0-0").read_text()))


def test_a_script_that_cannot_start_is_not_started_for_ever(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import no_such_module_at_all\n")
    said = []
    launcher = Launcher([sys.executable, str(script)], 2, spares=1, report=said.append)
    assert launcher.run() == 1
    assert "ended with code 1 3 times in a row soon after its start" in said[-1]
    assert "before it joined the others: the script cannot start" in said[-1]
    assert len(said) <= 5  # two restarts of each worker, and the end


def test_a_worker_that_joined_or_was_killed_or_fails_differently_can_start(launch, tmp_path):
    code, said = launch({0: "fail fail fail-late fail fail die fail fail done"})
    assert code == 0
    assert lives(tmp_path, 0) == 9
    assert all("started again" in text for text in said)


def test_a_worker_that_fails_again_and_again_by_one_error_is_named_so(launch, tmp_path):
    code, said = launch({0: "poison poison poison die done"})
    assert code == 0
    error = "ended with code 1 by ValueError in step 20 of worker 0: a poison batch"
    assert f"{error}; started again (1 of 10)" in said[0]
    assert f"{error} (3 times in a row); started again (3 of 10)" in said[2]
    assert "was killed by SIGKILL; started again (4 of 10)" in said[3]


def test_a_worker_that_the_kernel_may_have_killed_for_memory_is_named_so(launch, monkeypatch):
    kills = itertools.chain([0], itertools.repeat(1))
    monkeypatch.setattr("cpr_ext.distributed.launcher._memory_kills", lambda: next(kills))
    _, said = launch({0: "die die done"})
    killed = "was killed by SIGKILL"
    assert f"{killed} (and the kernel has killed for want of memory meanwhile); started" in said[0]
    assert f"{killed}; started again (2 of 10)" in said[1]


def test_workers_that_gave_the_job_up_are_not_started_again(launch, tmp_path):
    code, said = launch({0: "give-up", 1: "hang"})
    assert code == 1
    assert lives(tmp_path, 0) == 1
    assert said == [
        "worker 1 did not come; ending all workers. The stores keep what was saved: the same "
        "command resumes from there"
    ]
    assert not alive(int((tmp_path / "pid-1-0").read_text()))


def test_a_silent_worker_is_killed_and_started_again(launch, tmp_path):
    code, said = launch({0: "hang done"}, hang_seconds=3.0)
    assert code == 0
    assert "has been silent for" in said[0]
    assert lives(tmp_path, 0) >= 2  # more where a start takes as long


WORKER = """
import os, pathlib, signal, sys, time
import torch
import cpr_ext
from cpr_ext.distributed import TimeOuts, Worker

folder = pathlib.Path(sys.argv[1])
time_outs = TimeOuts(collective_seconds=1.0, join_seconds=float(sys.argv[2]))
worker = Worker.from_environment(folder, time_outs=time_outs)
(folder / f"here-{worker.identity.rank}").touch()
while len(list(folder.glob("here-*"))) < 2:  # a start may take longer than join_seconds
    time.sleep(0.05)


def build(group):
    torch.manual_seed(group.rank())
    table = torch.nn.EmbeddingBag(10, 4, sparse=True)
    return torch.nn.ModuleList([table]), [torch.optim.SGD(table.parameters(), lr=0.1)]


def train_step(job, step):
    job.model[0](torch.tensor([[step % 10]])).sum().backward()
    torch.distributed.all_reduce(torch.ones(1))
    job.optimizers[0].step()
    with (folder / f"pids-{job.rank}").open("a") as file:
        print(os.getpid(), file=file)
    if (job.rank, step) == (1, 5) and not (folder / "stopped").exists():
        (folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


worker.run(build, train_step, num_steps=10)
"""


def test_a_worker_that_hangs_in_training_is_replaced_and_the_others_go_on(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    said = []

    def tell(text):
        said.append(text)
        launcher.hang_seconds = None  # the replacement's imports are no hang, however slow

    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), "600"]
    launcher = Launcher(command, 2, report=tell)

    def mind_hangs():
        while not (tmp_path / "stopped").exists():
            time.sleep(0.05)
        launcher.hang_seconds = 4.0

    threading.Thread(target=mind_hangs, daemon=True).start()
    assert launcher.run() == 0
    assert "worker 1 (process " in said[0]
    assert "has been silent for" in said[0]
    assert "was killed by SIGKILL; started again (1 of 10)" in said[1]
    pids = [set((tmp_path / f"pids-{rank}").read_text().split()) for rank in range(2)]
    assert [len(of_rank) for of_rank in pids] == [1, 2]


def test_a_worker_that_is_stopped_for_ever_ends_the_job_after_join_seconds(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    said = []
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), "5"]
    assert Launcher(command, 2, report=said.append).run() == 1
    (text,) = said  # nobody was started again
    assert "worker 0 waited 5 s at 127.0.0.1:" in text
    assert "for workers 1, which did not come; ending all workers" in text
    stopped = (tmp_path / "pids-1").read_text().split()[0]
    assert not alive(int(stopped))


INTERRUPTED = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "ready").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1.0)  # cleans up
    (folder / "cleaned").touch()
"""


def test_ctrl_c_interrupts_a_worker_once_and_lets_it_clean_up(tmp_path):
    (tmp_path / "worker.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cpr_ext.wings.cli", "launch", "--nproc", "1", "--spares", "0"),
            *(str(tmp_path / "worker.py"), str(tmp_path)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGINT
    assert (tmp_path / "cleaned").exists()
    assert "Traceback" not in said


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    """Else they train on, and the same command finds their places taken."""
    (tmp_path / "child.py").write_text(CHILD)
    for rank in range(2):
        (tmp_path / f"plan-{rank}").write_text("hang")
    code = (
        "import sys; from cpr_ext.distributed.launcher import Launcher; "
        "Launcher([sys.executable, *sys.argv[1:]], 2, rendezvous='127.0.0.1:1').run()"
    )
    child = [str(tmp_path / "child.py"), str(tmp_path)]
    launcher = subprocess.Popen([sys.executable, "-c", code, *child])
    files = [tmp_path / f"pid-{rank}-0" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in files))
    launcher.kill()
    launcher.wait()
    pids = [int(path.read_text()) for path in files]
    wait_until(lambda: not any(map(runs, pids)))


def runs(pid):
    """Whether it is there, and no corpse that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_ends_all_workers_and_says_so(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    for rank in range(2):
        (tmp_path / f"plan-{rank}").write_text("hang")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cpr_ext.wings.cli", "launch", "--nproc", "2"),
            *("--rendezvous", "127.0.0.1:1", str(tmp_path / "child.py"), str(tmp_path)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [tmp_path / f"pid-{rank}-0" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in pids):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: ending all workers" in said
    assert not any(alive(int(path.read_text())) for path in pids)


def test_a_spare_that_has_done_its_imports_takes_the_place_of_the_dead(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from cpr_ext.distributed.identity.worker_identity import Identity, show_alive\n"
        "from cpr_ext.distributed.identity.supervision import report_done\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "pathlib.Path(folder, f'imported-{os.getpid()}').touch()\n"
        "rank = Identity.from_environment().rank\n"
        "show_alive()\n"
        "with (folder / f'lives-{rank}').open('a') as file:\n"
        "    print(os.getpid(), file=file)\n"
        "if rank == 1 and len((folder / 'lives-1').read_text().split()) == 1:\n"
        "    while len(list(folder.glob('imported-*'))) < 3:\n"
        "        time.sleep(0.01)\n"
        "    names = [path.name for path in folder.glob('imported-*')]\n"
        "    (folder / 'imported').write_text(' '.join(names))\n"
        "    os.kill(os.getpid(), 9)\n"
        "report_done()\n"
    )
    said = []
    command = [sys.executable, str(script), str(tmp_path)]
    launcher = Launcher(
        command, 2, rendezvous="127.0.0.1:1", spares=1, spare_delay_seconds=0, report=said.append
    )
    assert launcher.run() == 0
    first, second = (tmp_path / "lives-1").read_text().split()
    # It was there, and had imported, before worker 1 died.
    assert {f"imported-{pid}" for pid in (first, second)} < set(
        (tmp_path / "imported").read_text().split()
    )
    assert len(said) == 1
    pids = [int(path.name.removeprefix("imported-")) for path in tmp_path.glob("imported-*")]
    assert not any(alive(pid) for pid in pids)


def test_spares_that_end_by_themselves_are_told_of_and_not_started_for_ever(launch, tmp_path):
    said = []

    def tell(text):
        said.append(text)
        if len(said) == 3:
            (tmp_path / "told").touch()

    options = {"spares": 1, "spare_delay_seconds": 0, "max_restarts": 2}
    assert launch({0: "until-told"}, report=tell, **options)[0] == 0
    assert said == ["a spare worker ended with code 1"] * 3


def test_a_spare_leaves_the_processor_to_workers_that_start(launch):
    # A spare would be told of, as above.
    assert launch({0: "sleep"}, spares=1, spare_delay_seconds=60) == (0, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "0 workers"),
        ({"num_workers": 2, "first_rank": 1, "world_size": 2, "rendezvous": "h:1"}, "do not fit"),
        ({"num_workers": 2, "world_size": 4}, "need a rendezvous that all reach"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Launcher(["true"], **options)


def test_a_host_of_the_rendezvous_that_dies_is_started_again_on_its_port(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, signal\n"
        "from cpr_ext.distributed.rendezvous.host_connection import HostConnection\n"
        "from cpr_ext.distributed.identity.worker_identity import Identity\n"
        "from cpr_ext.distributed.rendezvous.coordination_store import Notes\n"
        "identity = Identity.from_environment()\n"
        "Notes(HostConnection(identity)).write('a', 'b')\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    parent = path.with_name('stat')\n"
        "    try:\n"
        "        is_ours = int(parent.read_text().rpartition(')')[2].split()[1]) == os.getppid()\n"
        "        if is_ours and 'rendezvous_host' in path.read_text():\n"
        "            os.kill(int(path.parent.name), signal.SIGKILL)\n"
        "    except (FileNotFoundError, ProcessLookupError):\n"
        "        pass\n"
        "host = HostConnection(identity)\n"
        "assert Notes(host).read('a') == ''\n"  # waits in the socket's queue meanwhile
        "from cpr_ext.distributed.identity.supervision import report_done\n"
        "report_done()\n"
    )
    said = []
    launcher = Launcher([sys.executable, str(script)], 1, max_restarts=1, report=said.append)
    assert launcher.run() == 0
    assert said == ["the rendezvous host was killed by SIGKILL; started again"]


def test_the_rendezvous_is_hosted_by_a_process_that_ends_with_the_launcher(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, socket, sys, time\n"
        "host, _, port = os.environ['CPR_RENDEZVOUS'].rpartition(':')\n"
        "socket.create_connection((host, int(port)), 5).close()\n"
        "assert os.environ['CPR_WORLD_SIZE'] == '2'\n"
        "assert os.environ['THP_MEM_ALLOC_ENABLE'] == '1'\n"
        "assert os.environ['OMP_NUM_THREADS'] == sys.argv[2]\n"
        "pathlib.Path(sys.argv[1], os.environ['CPR_RANK']).write_text(port)\n"
        "pathlib.Path(os.environ['CPR_ALIVE_FILE'] + '.done').touch()\n"
    )
    said = []
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    command = [sys.executable, str(script), str(tmp_path), threads]
    assert Launcher(command, 2, max_restarts=0, report=said.append).run() == 0
    assert said == []
    ports = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert len(ports) == 1


def test_after_a_signal_no_more_workers_are_started(monkeypatch):
    launcher = Launcher([sys.executable, "-c", "import time; time.sleep(100)"], 5, report=print)
    start, started = launcher._start, []

    def start_and_signal(rank, *arguments):
        started.append(rank)
        os.kill(os.getpid(), signal.SIGTERM)
        return start(rank, *arguments)

    monkeypatch.setattr(launcher, "_start", start_and_signal)
    assert launcher.run() == 128 + signal.SIGTERM
    assert started == [0]
