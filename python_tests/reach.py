"""Which lines of a room each test reaches, also in processes that it starts: tools/mutate.py."""

import os
import sys
import threading
import time
from typing import Any


def trace(room: str, out: str) -> None:
    """Notes each line of the room that this process, its threads and its forks reach, by test."""
    seen: set[tuple[str, int]] = set()
    state: dict[str, Any] = {"pid": 0}

    def line(frame: Any, event: str, _: object) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            text = f"{state['test']}\t{place[0].partition(room)[2]}\t{place[1]}\n"
            os.write(state["file"], text.encode())
        return line

    def call(frame: Any, event: str, _: object) -> Any:
        if room not in frame.f_code.co_filename:
            return None
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if os.getpid() != state["pid"]:
            file = os.open(f"{out}/{os.getpid()}-{time.time_ns()}", os.O_CREAT | os.O_WRONLY)
            state.update(pid=os.getpid(), file=file, test=None)
        if test != state["test"]:
            state["test"] = test
            seen.clear()
        return line(frame, "line", None)

    threading.settrace(call)
    sys.settrace(call)
