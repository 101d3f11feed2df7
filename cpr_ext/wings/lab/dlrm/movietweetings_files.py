"""Reads the two text files of the MovieTweetings data set."""

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

from cpr_ext.errors import DataError

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
