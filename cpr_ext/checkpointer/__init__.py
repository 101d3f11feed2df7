"""What a training loop holds: it tracks changed rows, takes snapshots and recovers."""

from cpr_ext.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
