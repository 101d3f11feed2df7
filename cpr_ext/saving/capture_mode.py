"""When the rows of a snapshot are chosen, and of which step their values are captured."""

from enum import Enum


class CaptureMode(Enum):
    """How a snapshot chooses and captures its rows.

    Attributes:
        AT_ONCE: all rows are chosen at the start; each is captured with its values at that moment.
        SHARD_BY_SHARD: the rows of a shard are chosen when its turn comes to be captured.
        CHOOSE_FIRST: the rows are chosen while training runs; after that, COPY_ON_WRITE.
        COPY_ON_WRITE: all rows are captured with their values at one step, however long that takes;
            before training changes a row that waits, the row is copied.
        GATHER: GPUs choose the rows while training runs; after that, GATHERED, if they have the
            memory.
        GATHERED: all rows were copied on their GPUs at one step, and are captured from there.
    """

    AT_ONCE = "at once"
    SHARD_BY_SHARD = "shard by shard"
    CHOOSE_FIRST = "choose first"
    COPY_ON_WRITE = "copy on write"
    GATHER = "gather"
    GATHERED = "gathered"

    @property
    def is_of_one_step(self) -> bool:
        """Whether rows may be copied before they change, so that all are of one step."""
        return self in (CaptureMode.CHOOSE_FIRST, CaptureMode.COPY_ON_WRITE)
