"""Small data sets in the formats of the real ones."""

import random

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The models here are so small that more threads wait for each other most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _criteo_line(generator):
    integers = [generator.choice(["", str(generator.randrange(-2, 900))]) for _ in range(13)]
    categories = [generator.choice(["", f"{generator.getrandbits(32):08x}"]) for _ in range(26)]
    return "\t".join([generator.choice("01"), *integers, *categories]).encode()


@pytest.fixture(scope="session")
def criteo_lines():
    """Makes so many well-formed lines, without line ends; always the same."""

    def make(num_lines):
        generator = random.Random(7)
        return [_criteo_line(generator) for _ in range(num_lines)]

    return make


@pytest.fixture
def criteo_file(tmp_path, criteo_lines):
    """A well-formed train.txt of 4,000 lines."""
    file = tmp_path / "train.txt"
    file.write_bytes(b"\n".join(criteo_lines(4000)) + b"\n")
    return file


@pytest.fixture
def movietweetings_folder(tmp_path):
    """Five movies and 200 ratings, out of chronological order."""
    folder = tmp_path / "movietweetings"
    folder.mkdir()
    (folder / "movies.dat").write_text(
        "10::One (1999)::Drama|Comedy\n"
        "20::Two (2001)::\n"
        "30::Three::Drama\n"
        "40::Four: A::B (1999)::Comedy|Action|Drama\n"
        "50::Never rated (1950)::Western\n"
    )
    generator = random.Random(3)
    ratings = [
        f"{generator.randrange(1, 30)}::{generator.choice([10, 20, 30, 40])}"
        f"::{generator.randrange(11)}::{1_400_000_000 + 1000 * time}\n"
        for time in generator.sample(range(200), 200)
    ]
    (folder / "ratings.dat").write_text("".join(ratings))
    return folder
