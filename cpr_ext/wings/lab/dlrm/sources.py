"""From what a user types to a data source."""

from __future__ import annotations

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.criteo import Criteo
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.presets import ModelPreset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

_ALLOWED = "synthetic, criteo:PATH, movietweetings:PATH"


def open_source(spec: str, preset: ModelPreset, seed: int = 0) -> DataSource:
    """Return the data source named by `spec`.

    Args:
        spec: ``synthetic``, ``criteo:PATH`` (a file or a folder) or ``movietweetings:PATH`` (a
            folder).
        preset: gives the table sizes of the synthetic and Criteo sources; MovieTweetings has as
            many rows as the data has users and movies.
        seed: of the synthetic samples; the other sources do not use it.

    Raises:
        UsageError: an unknown spec, or one without its path.
        DataError: the path does not hold the data.
    """
    kind, colon, path = spec.partition(":")
    if kind == "synthetic" and not colon:
        return Synthetic(preset.name, seed=seed)
    if kind == "criteo" and path:
        return Criteo(path, preset.criteo_num_embeddings)
    if kind == "movietweetings" and path:
        return MovieTweetings(path)
    raise UsageError(f"data source is {spec!r}; allowed: {_ALLOWED}")
