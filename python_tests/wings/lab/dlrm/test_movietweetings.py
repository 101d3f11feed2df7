import gzip

import pytest

from cpr_ext.errors import DataError
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings

GOOD = "1::10::8::1400000000\n"


def write(folder, ratings, movies="10::One (1999)::Drama\n"):
    folder.mkdir(exist_ok=True)
    (folder / "ratings.dat").write_text(ratings)
    (folder / "movies.dat").write_text(movies)
    return folder


def test_samples_are_those_of_the_files(tmp_path):
    write(
        tmp_path,
        "7::20::7::7200\n3::10::8::3600\n3::30::10::90000\n",
        "10::One (1999)::Drama|Comedy\n20::Two::\n30::A::B (1950)::Western\n",
    )
    source = MovieTweetings(tmp_path)
    assert source.table_names == ("user", "movie", "genre", "year", "hour")
    assert source.num_embeddings == (2, 3, 3, 3, 24)
    assert source.num_train_samples == 2
    train = sorted(
        (batch.labels.item(), [rows.tolist() for rows in batch.indices])
        for batch in source.train_batches(1)
    )
    # Users 3, 7; movies 10, 20, 30; genres Comedy, Drama, Western; years none, 1950, 1999.
    assert train == [(0.0, [[1], [1], [], [0], [2]]), (1.0, [[0], [0], [0, 1], [2], [1]])]
    (test,) = source.test_batches(10)
    assert [rows.tolist() for rows in test.indices] == [[0], [2], [2], [1], [1]]


def test_latest_tenth_is_for_testing_in_chronological_order(tmp_path):
    # One rating an hour, so that the hour names the rating.
    lines = [f"1::10::9::{3600 * hour}\n" for hour in range(20)]
    source = MovieTweetings(write(tmp_path, "".join(reversed(lines))))
    (test,) = source.test_batches(100)
    assert test.indices[4].tolist() == [18, 19]
    (train,) = source.train_batches(100)
    assert sorted(train.indices[4].tolist()) == list(range(18))


@pytest.mark.parametrize(
    "line",
    [
        *("", "1::10::8", "1::10::8::1::2", "1::x::8::14", "1::10::-1::14", "1::10::8.5::14"),
        *("1::1_0::8::14", "1::10::8::" + "9" * 30, "1::10::11::14", "1::10::8::9999999999999"),
    ],
)
def test_a_line_that_is_no_rating_is_named(tmp_path, line):
    folder = write(tmp_path, GOOD * 10 + f"{line}\n" + GOOD)
    with pytest.raises(DataError, match=r"ratings\.dat, line 11: needed: user::movie::rating 0-10"):
        MovieTweetings(folder)


def test_a_line_that_is_no_movie_is_named_and_a_movie_may_be_unlisted(tmp_path):
    for line in ("x::Two (1999)::", "30"):
        folder = write(tmp_path / "bad", GOOD, f"10::One (1999)::Drama\n{line}\n")
        with pytest.raises(DataError, match=r"movies\.dat, line 2: needed: movie::title"):
            MovieTweetings(folder)
    source = MovieTweetings(write(tmp_path / "good", GOOD * 10 + "2::99::3::1400000000\n" * 3))
    (test,) = source.test_batches(10)
    assert test.indices[2].tolist() == []  # no genre
    assert test.indices[3].tolist() == [0, 0]  # nor year
    assert source.num_embeddings[2:4] == (1, 2)


def test_what_cannot_be_read_is_named_with_the_remedy(movietweetings_folder):
    folder = movietweetings_folder
    ratings, movies = (folder / "ratings.dat", folder / "movies.dat")
    text = ratings.read_bytes()
    movies.rename(folder / "away")
    with pytest.raises(DataError, match=r"movies\.dat: cannot be read: .*sidooms/MovieTweetings"):
        MovieTweetings(folder)
    (folder / "away").rename(movies)
    ratings.write_text("")
    with pytest.raises(DataError, match=r"ratings\.dat is empty"):
        MovieTweetings(folder)
    ratings.unlink()
    for place in (folder, folder / "nowhere"):
        with pytest.raises(DataError, match=r"ratings\.dat: cannot be read"):
            MovieTweetings(place)
    whole = gzip.compress(text)
    (folder / "ratings.dat.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"ratings\.dat\.gz: cannot be read"):
        MovieTweetings(folder)
