"""All options of a ``Checkpointer``, and where they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from cpr_ext.checkpointer.option_files import made, read
from cpr_ext.checkpointer.options import CompactionOptions, StagingOptions
from cpr_ext.errors import UsageError
from cpr_ext.metrics.counters import ScalarWriter
from cpr_ext.runtime.termination import OnSigterm
from cpr_ext.runtime.validation import (
    as_shard_count,
    require_flag,
    require_kind,
    require_one_of,
    require_positive_or_none,
)
from cpr_ext.saving.background_capture import OverlapChoice
from cpr_ext.saving.priorities import LargestChange, MostFrequentlyUsed, Priority
from cpr_ext.saving.saver import Consistency, WhenBusy
from cpr_ext.schedules.intervals import EverySeconds, Schedule
from cpr_ext.state.precision import Precision
from cpr_ext.storage.remote.objects import RemoteOptions
from cpr_ext.storage.retention import Retention

OnNan = Literal["raise", "save"]

#: Objects of the program, which no text can name.
_OBJECTS = ("scalar_writer",)


@dataclass(frozen=True)
class CheckpointerOptions:
    """All options that say how to save; ``Checkpointer`` describes each.

    >>> options = cpr_ext.CheckpointerOptions.load("job.toml")
    >>> ckpt = cpr_ext.Checkpointer(model, optimizer, "runs/a/store", **options.keywords())

    Attributes:
        sources: of loaded ones, by name: the file, the variable, or ``default``.

    Raises:
        UsageError: one is out of range, or two do not go together.
    """

    sources: ClassVar[Mapping[str, str]] = {}

    priority: Priority = field(default_factory=MostFrequentlyUsed)
    schedule: Schedule = field(default_factory=lambda: EverySeconds(60))
    consistency: Consistency = "row"
    num_shards: int = 1
    rebase_after: float | None = 4.0
    compaction: CompactionOptions = field(default_factory=lambda: CompactionOptions(after=None))
    retention: Retention | None = None
    when_busy: WhenBusy = "delay"
    save_at_close: bool = True
    on_nan: OnNan = "raise"
    overlap: OverlapChoice = "auto"
    staging: StagingOptions = field(default_factory=StagingOptions)
    count_row_updates: bool = False
    scalar_writer: ScalarWriter | None = None
    remote: RemoteOptions | None = None
    precision: Precision = field(default_factory=Precision)
    on_sigterm: OnSigterm | None = None

    def __post_init__(self) -> None:
        require_one_of("consistency", self.consistency, ("row", "step"))
        require_one_of("when_busy", self.when_busy, ("delay", "wait"))
        require_one_of("on_nan", self.on_nan, ("raise", "save"))
        require_one_of("overlap", self.overlap, ("auto", "always", "never"))
        require_positive_or_none("rebase_after", self.rebase_after)
        object.__setattr__(self, "num_shards", as_shard_count(self.num_shards))
        require_kind("priority", self.priority, Priority, "MostFrequentlyUsed(0.125)")
        require_kind("schedule", self.schedule, Schedule, "EverySteps(500)")
        require_kind("staging", self.staging, StagingOptions, "StagingOptions(num_slots=3)")
        require_kind("compaction", self.compaction, CompactionOptions, "CompactionOptions()")
        require_kind("precision", self.precision, Precision, 'Precision(partial="int8")')
        require_kind("retention", self.retention, Retention, "Retention(full_recovery_points=3)")
        require_kind("remote", self.remote, RemoteOptions, "'s3://bucket/job'")
        require_flag("count_row_updates", self.count_row_updates)
        require_flag("save_at_close", self.save_at_close)
        if not callable(getattr(self.scalar_writer, "add_scalar", None)) and (
            self.scalar_writer is not None
        ):
            raise UsageError(
                f"scalar_writer is {self.scalar_writer!r:.100}; needed: an object with "
                "add_scalar(tag, value, step), such as TensorBoard's SummaryWriter"
            )
        if isinstance(self.priority, LargestChange) and self.on_nan == "save":
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')

    @property
    def chooses_all(self) -> bool:
        """Whether a partial snapshot saves every dirty row."""
        return self.priority.fraction >= 1

    @property
    def refuses_nan(self) -> bool:
        """Whether a snapshot is aborted rather than save NaN."""
        return self.on_nan == "raise"

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> CheckpointerOptions:
        """Read options from a TOML file and from variables ``CPR_NAME``, which take precedence.

        Args:
            path: its keys are the names of options, in a table ``[cpr]`` if it has one.
            environ: the variables; their values are written as in TOML, text without quotes, too.
                None: those of this process.

        Raises:
            UsageError: no such option or value; names the file or variable, and what is allowed.
        """
        names = [each.name for each in fields(cls) if each.name not in _OBJECTS]
        found = read(path, os.environ if environ is None else environ, names)
        given = {name: _checked(name, value, source) for name, (value, source) in found.items()}
        options = cls(**given)
        sources = {name: found[name][1] if name in found else "default" for name in names}
        object.__setattr__(options, "sources", sources)
        return options

    def keywords(self) -> dict[str, Any]:
        """Return them as keyword arguments of ``Checkpointer``."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _checked(name: str, value: Any, source: str) -> Any:
    """Return an option's value; its errors name the source."""
    try:
        option = made(name, value)
        CheckpointerOptions(**{name: option})
    except (UsageError, TypeError) as error:
        raise UsageError(f"{source}: {name}: {error}") from error
    return option
