"""Model sizes by name: `tiny` for trying things out, `kaggle` and `terabyte` as published."""

from __future__ import annotations

from dataclasses import dataclass

from cpr_ext.errors import UsageError

# Distinct values of the 26 categorical columns of the Criteo Kaggle set (dlrm repository,
# bench/dlrm_s_criteo_kaggle.sh and its data pre-processing).
CRITEO_KAGGLE_NUM_EMBEDDINGS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

# The same for days 0..23 of the Criteo Terabyte set, before any row cap.
CRITEO_TERABYTE_NUM_EMBEDDINGS = (
    *(227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36),
)

# Three tables hold 99.3 % of the rows, as in production models; the others are small.
SYNTHETIC_NUM_EMBEDDINGS = (60_000, 30_000, 15_000, 400, 150, 100, 50, 24, 12, 4)


@dataclass(frozen=True)
class ModelPreset:
    """Sizes of one DLRM.

    Attributes:
        name: what the user types.
        embedding_dim: columns of every table.
        bottom_mlp: layer widths of the MLP over the dense features. The first is a placeholder:
            a model takes the data source's `num_dense`. The last equals `embedding_dim`.
        top_mlp: layer widths of the MLP over the interactions, without its input; ends in 1.
        max_rows: cap on the rows of a Criteo table, or None.
        uncapped_criteo_num_embeddings: distinct values of the 26 Criteo columns.
        synthetic_num_embeddings: rows of the tables of the synthetic source.
    """

    name: str
    embedding_dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    max_rows: int | None
    uncapped_criteo_num_embeddings: tuple[int, ...]
    synthetic_num_embeddings: tuple[int, ...]

    @property
    def criteo_num_embeddings(self) -> tuple[int, ...]:
        """Rows of the 26 Criteo tables, after the cap."""
        if self.max_rows is None:
            return self.uncapped_criteo_num_embeddings
        return tuple(min(rows, self.max_rows) for rows in self.uncapped_criteo_num_embeddings)


PRESETS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset(
            name="tiny",
            embedding_dim=16,
            bottom_mlp=(13, 32, 16),
            top_mlp=(128, 1),
            max_rows=2_000,
            uncapped_criteo_num_embeddings=CRITEO_KAGGLE_NUM_EMBEDDINGS,
            synthetic_num_embeddings=SYNTHETIC_NUM_EMBEDDINGS,
        ),
        ModelPreset(
            name="kaggle",
            embedding_dim=16,
            bottom_mlp=(13, 512, 256, 64, 16),
            top_mlp=(512, 256, 1),
            max_rows=None,
            uncapped_criteo_num_embeddings=CRITEO_KAGGLE_NUM_EMBEDDINGS,
            synthetic_num_embeddings=CRITEO_KAGGLE_NUM_EMBEDDINGS,
        ),
        ModelPreset(
            name="terabyte",
            embedding_dim=64,
            bottom_mlp=(13, 512, 256, 64),
            top_mlp=(512, 512, 256, 1),
            max_rows=10_000_000,
            uncapped_criteo_num_embeddings=CRITEO_TERABYTE_NUM_EMBEDDINGS,
            synthetic_num_embeddings=tuple(
                min(rows, 10_000_000) for rows in CRITEO_TERABYTE_NUM_EMBEDDINGS
            ),
        ),
    )
}


def find_preset(name: str) -> ModelPreset:
    """Return the preset called `name`.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise UsageError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]
