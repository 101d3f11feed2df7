"""Whether a long wait for other workers can end.

A worker that does not wait itself will come. It evaluates, or writes to a slow disk; its connection
to the rendezvous shows that it lives. If all wait for each other, nobody comes: connections between
them are broken, and they meet again. Only the rendezvous hears of all, so each one says there that
it has waited long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cpr_ext.distributed.collective.process_group import Round
from cpr_ext.distributed.identity.worker_identity import TimeOuts
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

_LOOKS = 4  # in ``collective_seconds``


def say_long_waits(
    of_round: Round,
    time_outs: TimeOuts,
    say: Callable[[bool], tuple[list[int], bool] | None],
    who: str,
    step: Callable[[], int],
) -> None:
    """Begin a thread that does so until the round is over.

    Args:
        say: says to the rendezvous whether this worker has waited long; returns who has not, and
            whether this is the first of those that have. None: it does not answer.
        who: this worker, for the log.
        step: returns how many steps it has completed.
    """
    tick = time_outs.collective_seconds / _LOOKS

    def watch() -> None:
        begun: float | None = None
        looks, has_said, looked, next_line = 0, False, time.monotonic(), 0.0
        while not of_round.is_over.wait(tick):
            before, begun, now = begun, of_round.waits_since(), time.monotonic()
            # Who was stopped wakes amid a wait that is about to end.
            is_same = begun is not None and begun == before and now < looked + 2 * tick
            looks, looked = looks + 1 if is_same else 0, now
            is_long = looks >= _LOOKS
            if not is_long and not has_said:
                continue
            said, has_said = say(is_long), is_long
            if not is_long:
                next_line = 0.0
            elif said is None or (said[0] and looks == _LOOKS):
                continue  # all that wait have said so at the next look
            elif not said[0] or (said[1] and now >= next_line):
                waited = now - (begun or now)
                next_line = now + waited
                _report(who, waited, step(), said[0], time_outs)

    threading.Thread(target=watch, name="cpr_ext-long-waits", daemon=True).start()


def _report(who: str, waited: float, step: int, others: list[int], time_outs: TimeOuts) -> None:
    if not others:
        logger.warning(
            "%s has waited %.0f s after step %d, and so have all others, for each other: "
            "connections between them are broken. They meet again",
            *(who, waited, step),
        )
        return
    logger.warning(
        "%s has waited %.0f s after step %d for workers %s, whose processes live: nobody is lost, "
        "somebody is slow. It waits up to %g s; then all meet",
        *(who, waited, step, ", ".join(map(str, others))),
        time_outs.collective_seconds + time_outs.join_seconds,
    )
