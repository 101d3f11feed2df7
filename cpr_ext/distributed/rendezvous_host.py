"""Hosts the store through which workers meet: ``python -m cpr_ext.distributed.rendezvous_host``.

A process of its own, so that no worker's death takes it away. It holds who is there, in memory, and
nothing of the model. If it dies training goes on; it is needed again when a worker is lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_PARENT_POLL_SECONDS = 0.5


def main(arguments: list[str] | None = None) -> None:
    """Serve until it is killed, or until its parent is gone if ``--with-parent`` is given."""
    parser = argparse.ArgumentParser(prog="python -m cpr_ext.distributed.rendezvous_host")
    parser.add_argument("--host", default="0.0.0.0", help="name or address to be reached by")
    parser.add_argument("--port", type=int, default=29400, help="0: any that is free")
    parser.add_argument("--with-parent", action="store_true", help="end when the parent ends")
    options = parser.parse_args(arguments)
    parent = os.getppid()
    store = TCPStore(
        options.host,
        options.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    print(f"rendezvous on port {store.port}", flush=True)
    while not (options.with_parent and os.getppid() != parent):
        time.sleep(_PARENT_POLL_SECONDS)
    sys.exit("the process that started the rendezvous is gone")


if __name__ == "__main__":
    main()
