"""Every fault at every request of a run whose store is copied to object storage.

python -m python_tests.faults.remote_test                        all of them
python -m python_tests.faults.remote_test --sample 100 --seed 3
python -m python_tests.faults.remote_test --only late            one fault at every request
python -m python_tests.faults.remote_test --store s3 --sample 20 a real server: file, s3 or azure
python -m python_tests.faults.remote_test --replay "answer lost" 17
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpr_ext.wings.remote import RemoteOptions, open_objects
from cpr_ext.wings.remote.objects import Objects
from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.remote_objects import FAULTS, WatchedObjects
from python_tests.faults.remote_scenario import run
from python_tests.wings.remote.faulty_objects import MemoryObjects
from python_tests.wings.remote.servers import (
    MotoObjects,
    azure_service,
    empty_bucket,
    s3_service,
)

STORES = ("memory", "file", "s3", "azure")

Try = tuple[str, int]
# Empty object storage, and what it holds if there is a faster way to that than requests.
MakeObjects = Callable[[], tuple[Objects, Objects | None]]


def in_memory() -> tuple[Objects, None]:
    """Make objects in a dict."""
    return MemoryObjects(), None


def try_fault(fault: str, at: int, make: MakeObjects = in_memory) -> tuple[list[str], bool]:
    """Return what was found wrong with this fault at request ``at``, and whether that was made.

    States that follow each other quickly are copied as one, so the last requests may be missing.
    """
    service, held = make()
    objects = WatchedObjects(service, fault, at, held)
    with tempfile.TemporaryDirectory(prefix="cpr-remote-") as folder:
        found = run(objects, Path(folder) / "run")
    return found, objects.was_met


def count_requests() -> int:
    """Return how many requests a run without a fault makes; raises if it finds anything."""
    objects = WatchedObjects(MemoryObjects())
    with tempfile.TemporaryDirectory(prefix="cpr-remote-") as folder:
        found = run(objects, Path(folder) / "run")
    assert not found, found
    return objects.count


@contextmanager
def objects_of(store: str) -> Iterator[MakeObjects]:
    """Yield what makes empty object storage of a kind."""
    numbers = itertools.count()

    def at(options: RemoteOptions) -> tuple[Objects, None]:
        address = f"{options.address}{next(numbers)}"
        return open_objects(replace(options, address=address)), None

    if store == "memory":
        yield in_memory
    elif store == "file":
        with tempfile.TemporaryDirectory(prefix="cpr-remote-") as folder:
            yield lambda: at(RemoteOptions(f"file://{folder}/store"))
    elif store == "s3":
        with s3_service() as service:
            yield lambda: (open_objects(empty_bucket(service)), MotoObjects())
    else:
        with azure_service() as options:
            yield lambda: at(options)


def draw(num_requests: int, count: int, seed: int) -> list[Try]:
    """Return ``count`` of them, of each fault about as many."""
    chance = random.Random(seed)
    return [(FAULTS[n % len(FAULTS)], chance.randrange(num_requests)) for n in range(count)]


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=FAULTS)
    parser.add_argument("--store", choices=STORES, default="memory")
    parser.add_argument("--replay", nargs=2, metavar=("FAULT", "REQUEST"), help="one try")
    options = parser.parse_args()
    num_requests = count_requests()
    faults = [options.only] if options.only else FAULTS
    tries = [(fault, at) for fault in faults for at in range(num_requests)]
    if options.replay:
        tries = [(options.replay[0], int(options.replay[1]))]
    elif options.sample:
        tries = draw(num_requests, options.sample, options.seed)
    campaign = Campaign("remote_test", options, lambda name: name.rpartition(" ")[0])
    with objects_of(options.store) as make:

        def told_of(tried: Try) -> tuple[str, dict[str, Any]]:
            found, was_met = try_fault(*tried, make)
            return name_of(tried), {"met": was_met, "found": found}

        status = campaign.run(map(told_of, campaign.left(tries, name_of)))
    return status or int(not any(told["met"] for told in campaign.told.values()))


def name_of(tried: Try) -> str:
    fault, at = tried
    return f"{fault} {at}"


if __name__ == "__main__":
    sys.exit(main())
