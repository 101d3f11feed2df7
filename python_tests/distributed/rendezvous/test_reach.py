"""Whether machines answer, and who steps aside."""

import contextlib
import itertools
import random
import socket

from cpr_ext.distributed.rendezvous import reach
from cpr_ext.distributed.rendezvous.reach import Beacon, unreachable, who_steps_aside


def test_a_machine_answers_on_a_port_where_nobody_listens_and_after_its_process_ended():
    beacon = Beacon("127.0.0.1")
    assert unreachable({"a": beacon.place}) == ()
    beacon.close()
    assert unreachable({"a": beacon.place}) == ()


def test_a_machine_that_answers_nothing_is_found_among_many(monkeypatch):
    monkeypatch.setattr(reach, "_AT_ONCE", 3)
    beacon = Beacon("127.0.0.1")
    places = {f"lives {number}": beacon.place for number in range(7)}
    with contextlib.ExitStack() as opened:
        silent = opened.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # what does not fit into its queue gets no answer
        for _ in range(3):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        places |= {"b": f"127.0.0.1 {silent.getsockname()[1]}", "a": "none 1"}
        assert unreachable(places, 0.3) == ("a", "b")
    beacon.close()


def test_all_workers_of_a_machine_that_is_cut_off_step_aside_and_no_other():
    ranks = {str(rank): rank for rank in range(6)}
    cut = {"0", "1"}
    everyone = {m: (set(ranks) - cut if m in cut else cut) for m in ranks}
    assert who_steps_aside(ranks, everyone) == cut
    assert who_steps_aside(ranks, {"3": {"2"}}) == {"3"}
    assert who_steps_aside(ranks, {"3": {"somebody that does not wait"}}) == frozenset()


def test_who_stays_reaches_all_others_and_nobody_leaves_in_vain():
    chance = random.Random(5)
    for _ in range(300):
        ranks = {str(rank): rank for rank in range(5)}
        silent = {a: {b for b in ranks if a != b and chance.random() < 0.15} for a in ranks}
        aside = who_steps_aside(ranks, silent)
        for a, b in itertools.permutations(set(ranks) - aside, 2):
            assert b not in silent[a]
        assert bool(aside) == any(silent.values())
