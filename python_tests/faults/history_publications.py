"""The publication and its consumers in random histories: all consumers hold what is published."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from cpr_ext.errors import CprError
from cpr_ext.wings.publishing import Subscriber, publish
from cpr_ext.wings.publishing.places import read_publication
from python_tests.faults.mixtures import NUM_ROWS


class Consumer:
    """A table that follows the publication; as new, it takes all rows."""

    def __init__(self, place: Path) -> None:
        self.weight = torch.full((NUM_ROWS, 2), -1.0)
        index = read_publication(place)
        assert index is not None
        (self.table,) = index.tables
        self.subscriber = Subscriber(place, {self.table: self.weight})


class Publications:
    """One publication, to which any store is published, and which is put back at times."""

    def __init__(self, place: Path, draw: random.Random, faults: list[str]) -> None:
        self._place = place
        self._kept = place.with_name("kept publication")
        self._draw = draw
        self._faults = faults
        self._consumers: list[Consumer] = []
        self._rows: torch.Tensor | None = None  # of what was published last; None: not known

    def publish(self, store: Path, rows: torch.Tensor | None) -> None:
        """Publish a store; ``rows`` are those of its state, if they are known."""
        try:
            publish(store, self._place)
        except CprError as error:
            self._faults.append(f"a store could not be published: {error}")
            return
        self._rows = rows
        self._compare()

    def consume(self) -> None:
        """Begin a consumer, or let one catch up."""
        if not self._place.exists():
            return
        if len(self._consumers) < 2 or self._draw.random() < 0.3:
            self._consumers.append(Consumer(self._place))
        self._poll(self._draw.choice(self._consumers))

    def keep(self) -> None:
        """Make a backup of the publication."""
        if self._place.exists():
            shutil.rmtree(self._kept, ignore_errors=True)
            shutil.copytree(self._place, self._kept)

    def restore(self) -> None:
        """Put the backup back."""
        if self._kept.exists():
            shutil.rmtree(self._place)
            shutil.copytree(self._kept, self._place)
            self._rows = None

    def _compare(self) -> None:
        for consumer in self._consumers:
            if self._draw.random() < 0.5:
                self._poll(consumer)

    def _poll(self, consumer: Consumer) -> None:
        new = Consumer(self._place)
        new.subscriber.poll()
        if self._rows is not None and not torch.equal(new.weight, self._rows):
            self._faults.append("a new consumer has other rows than the store that was published")
        consumer.subscriber.poll()
        if not torch.equal(consumer.weight, new.weight):
            wrong = int((consumer.weight != new.weight).any(1).sum())
            self._faults.append(f"a consumer keeps {wrong} rows that a new one does not have")
