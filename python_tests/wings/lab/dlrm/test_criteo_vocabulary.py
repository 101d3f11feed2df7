import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.wings.lab.dlrm.criteo_vocabulary import Vocabulary


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, 30), max_size=15), max_size=6),
    num_embeddings=st.integers(1, 25),
    settle_between=st.booleans(),
)
def test_row_ids_are_given_in_first_seen_order_until_full(
    chunks: list[list[int]], num_embeddings: int, settle_between: bool
) -> None:
    vocabulary = Vocabulary(num_embeddings)
    expected: dict[int, int] = {}
    for chunk in chunks:
        vocabulary.add(np.array(chunk, dtype=np.int64))
        if settle_between:
            vocabulary.row_ids(np.array([0]))
        for category in chunk:
            if category not in expected and len(expected) < num_embeddings - 1:
                expected[category] = len(expected) + 1
    asked = np.arange(40)
    assert vocabulary.row_ids(asked).tolist() == [expected.get(int(c), 0) for c in asked]
    assert len(vocabulary) == len(expected)


def test_large_vocabulary_settles_while_it_grows() -> None:
    vocabulary = Vocabulary(400_000)
    categories = np.random.default_rng(0).permutation(10**6)[:300_000]
    for chunk in np.split(categories, 30):
        vocabulary.add(chunk)
    assert vocabulary.row_ids(categories).tolist() == list(range(1, 300_001))
