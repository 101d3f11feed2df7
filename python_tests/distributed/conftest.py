import pytest

from python_tests.distributed.cluster import Cluster, Nursery


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def make_cluster(nursery, tmp_path):
    clusters = []

    def make(name="job", **settings):
        clusters.append(Cluster([nursery], tmp_path / name, **settings))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
