import random
import shutil

import pytest

from cpr_ext.errors import StoreError
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import verify
from python_tests.helpers import flipped
from python_tests.storage.records import signed
from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory, snapshots=2, num_shards=2).checkpointer.close()
    return directory


def files(store):
    return [p for p in sorted(store.rglob("*")) if p.is_file() and p.name != "LOCK"]


def test_a_sound_store_is_sound_and_every_byte_of_it_was_read(store):
    progress = []
    report = verify(store, on_progress=lambda done, total: progress.append((done, total)))
    assert report.is_sound
    assert report.left_overs == []
    assert report.files_checked == len(files(store))
    assert report.bytes_checked == sum(path.stat().st_size for path in files(store))
    assert progress[-1] == (report.bytes_checked, report.bytes_checked)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_flipped_bit_anywhere_in_any_file_is_found_and_the_file_named(store):
    generator = random.Random(0)
    for path in files(store):
        size = path.stat().st_size
        positions = {0, 3, 8, size // 2, size - 1, *(generator.randrange(size) for _ in range(12))}
        for position in sorted(positions):
            with flipped(path, position, generator.randrange(8)):
                named = {damage.path for damage in verify(store).damaged}
            assert str(path) in named, (path, position)


def test_a_missing_or_short_file_is_named(store, tmp_path):
    for path in files(store):
        for change in ("missing", "empty", "short"):
            copy = tmp_path / "copy"
            shutil.copytree(store, copy)
            victim = copy / path.relative_to(store)
            if change == "missing":
                victim.unlink()
            else:
                victim.write_bytes(victim.read_bytes()[: 0 if change == "empty" else -1])
            report = verify(copy)
            if change == "missing" and victim.name == "MANIFEST.prev":
                assert report.is_sound  # as where there are no hard links
            else:
                assert str(victim) in {damage.path for damage in report.damaged}, (path, change)
            shutil.rmtree(copy)


def test_two_files_exchanged_are_found_and_left_overs_and_newer_versions_are_no_damage(
    store, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    left_over = copy / "segments" / "00000099-partial.safetensors"
    left_over.write_bytes(b"half")
    report = verify(copy)
    assert report.is_sound
    assert report.left_overs == [str(left_over)]
    left_over.unlink()
    one, other = sorted((copy / "segments").glob("*-partial.safetensors"))[:2]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert {damage.path for damage in verify(copy).damaged} == {str(one), str(other)}
    (copy / "MANIFEST.json").write_bytes(signed("cpr_ext.manifest", {}, version=2))
    for read in (verify, StoreReader):
        with pytest.raises(StoreError, match="version 2"):
            read(copy)
