"""Stores from a stranger: the corpus of `make fuzz` through everything that reads a store."""

import json
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import cpr_ext
from cpr_ext.errors import DamageError
from cpr_ext.state import dense_schema
from cpr_ext.storage import filesystem, segment_header
from cpr_ext.storage.filesystem import create_anew, open_regular, require_directory
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import export, inspect, repair, verify
from python_tests import preloaded
from python_tests.faults.damage_scene import Scene, opened
from python_tests.faults.fuzz import CORPUS, CaseTimeoutError
from python_tests.faults.hostile import draw_case, try_case
from python_tests.faults.hostile_operations import OPERATIONS, Target, apply, size_bytes
from python_tests.faults.memory_meter import MOST_BYTES, MemoryMeter, allowed_bytes

CASES = sorted(CORPUS.glob("*.json"))
SECONDS = 20
NUM_DRAWN = 15


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


_began = {"cpu": 0.0, "wall": 0.0, "seconds": 0.0}


@pytest.fixture(autouse=True)
def alarm():
    def ring(*_):
        """A machine that is busy with other things is no fault of the reader."""
        worked = time.process_time() - _began["cpu"] > _began["seconds"]
        if worked or time.monotonic() - _began["wall"] > 8 * _began["seconds"]:
            raise CaseTimeoutError(f"a hostile store kept its reader for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    ring_after(SECONDS)
    yield
    ring_after(0)
    signal.signal(signal.SIGALRM, before)


def ring_after(seconds):
    """Again and again: an exception raised while something is collected is passed over."""
    _began.update(cpu=time.process_time(), wall=time.monotonic(), seconds=seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_store_of_the_corpus_is_read_or_refused(scene, tmp_path, path):
    case = json.loads(path.read_text())["case"]
    assert try_case(scene, case, tmp_path / "store", random.Random(path.name))


def test_the_sound_store_passes_through_everything(scene, tmp_path):
    """Else nothing above would say anything."""
    outcomes = try_case(scene, [], tmp_path / "store")
    assert {told for _, told in outcomes} == {"done"}


def test_every_operation_is_in_the_corpus_and_changes_the_store(scene, tmp_path):
    cases = [json.loads(path.read_text())["case"] for path in CASES]
    assert len(cases) > 90
    assert {operation["op"] for case in cases for operation in case} >= OPERATIONS.keys() - {
        *("drop_json", "set_version", "flip_byte", "remove", "swap")
    }
    sound = look(scene.copy(tmp_path / "sound"))
    for path, case in zip(CASES, cases, strict=True):
        target = Target(scene, tmp_path / "target")
        apply(target, case)
        assert look(target.store) != sound, f"{path.stem} changes nothing"


def look(store):
    """What lies where; of files their bytes, unless they are nearly all hole."""
    found = {}
    for path in store.rglob("*"):
        status = path.lstat()
        is_read = stat.S_ISREG(status.st_mode) and status.st_size < 10**7
        found[str(path.relative_to(store))] = (
            stat.S_IFMT(status.st_mode),
            path.read_bytes() if is_read else status.st_size,
        )
    for name, (kind, _) in found.items():
        if stat.S_ISDIR(kind):
            found[name] = (kind, 0)
    return found


@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_a_drawn_store_is_read_or_refused(scene, tmp_path, number):
    draw = random.Random(number)
    assert try_case(scene, draw_case(scene, draw), tmp_path / "store", draw)


# The alarm that ends a reader may ring inside another library's callback, which swallows it; it
# rings again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "attribute", "wrong"),
    [
        ("chunk-of-no-table", (segment_header, "_check_chunks"), lambda layout, chunks: None),
        ("skeleton-no-model", (dense_schema, "_check"), lambda tree: None),
        ("pipe-manifest", (filesystem, "_SAFE"), 0),
    ],
)
def test_a_reader_that_believes_what_it_reads_is_caught(
    scene, tmp_path, monkeypatch, name, attribute, wrong
):
    """Each check taken away lets the case of its name through, and the harness tells."""
    monkeypatch.setattr(*attribute, wrong)
    case = json.loads((CORPUS / f"{name}.json").read_text())["case"]
    ring_after(3)
    with pytest.raises((AssertionError, CaseTimeoutError, LookupError, TypeError, AttributeError)):
        try_case(scene, case, tmp_path / "store")
    ring_after(0)


_NUMPY = ["skeleton", "rng", "numpy", "$tuple"]
_WORDS = ["skeleton", "rng", "python", "$tuple", 1, "$tuple"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([*_WORDS, 0], 2**70),
        ([*_WORDS, 3], "x"),
        (["skeleton", "rng", "python", "$tuple", 2], {"$tensor": "dense.rng.torch"}),
        ([*_NUMPY, 2], 2**70),
        ([*_NUMPY, 4], {"$float": "no hex"}),
        (["skeleton", "optimizers", 1, "groups", 0, "capturable"], {"$tensor": "dense.rng.torch"}),
        (["skeleton", "extra", "step"], 2**60 + 1),
        (["skeleton", "extra", "values"], {"$counter": [[[], 1]]}),
        (["skeleton", "strides"], {"dense.rng.torch": [1, 1]}),
    ],
    ids=str,
)
def test_what_no_snapshot_holds_is_damage_of_its_file_in_every_reader(scene, tmp_path, path, value):
    """The newest of two: what is older is still there, and taken where that was asked for."""
    store = scene.copy(tmp_path / "store")
    for record in scene.dense:
        OPERATIONS["set_header"](store, f"segments/{record.file}", path, value)
    file = scene.dense[-1].file
    assert file in {Path(found.path).name for found in verify(store).damaged}
    assert any(file in said for said in repair(store).damaged)
    with opened(tmp_path / "other") as run:
        for read in (
            lambda: export(store, tmp_path / "out"),
            lambda: cpr_ext.load_into(run.model, store),
            lambda: run.checkpointer.recover(from_store=store, strict=False),
            lambda: recover(store),
        ):
            with pytest.raises(DamageError, match=file):
                read()


def test_a_state_that_one_segment_alone_has_is_exported_as_zero_elsewhere(scene, tmp_path):
    case = json.loads((CORPUS / "state-in-one-segment-only.json").read_text())["case"]
    assert try_case(scene, case, tmp_path / "store")  # by all readers, not by some drawn ones
    target = Target(scene, tmp_path / "again")
    apply(target, case)
    export(target.store, tmp_path / "out")
    (name,) = [n for n in load_file(tmp_path / "out/optimizer_rows.safetensors") if "dense" in n]
    state = load_file(tmp_path / "out/optimizer_rows.safetensors")[name]
    (segment,) = [each for each in scene.segments if each.name in case[0]["file"]]
    held = next(chunk.row_ids for chunk in segment.chunks if chunk.table == "tables.a")
    assert state[held].any()
    state[held] = 0
    assert not state.any()


@pytest.mark.parametrize(
    ("name", "step"),
    [("model-without-tables", None), ("header-and-manifest-without-base", 1)],
)
def test_documents_that_do_not_fit_together_are_repaired_from_what_does(
    scene, tmp_path, name, step
):
    target = Target(scene, tmp_path / "store")
    apply(target, json.loads((CORPUS / f"{name}.json").read_text())["case"])
    assert [repair(target.store, apply=real).damaged != [] for real in (False, True)] == [True] * 2
    assert verify(target.store).is_sound == (step is not None)
    if step is not None:
        with opened(target.store) as run:
            assert run.checkpointer.recover().step == step


# --- what is opened ---


def test_only_regular_files_are_opened_and_links_never_followed(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    os.close(open_regular(tmp_path / "file"))
    for name in ("link", "folder", "pipe", "linked"):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(DamageError, match=f"{name}: not a regular file"):
                open_regular(tmp_path / name, flags)
    require_directory(tmp_path / "folder")
    for name in ("file", "linked", "pipe"):
        with pytest.raises(DamageError, match="not a directory"):
            require_directory(tmp_path / name)
    for name in ("file", "link", "folder", "pipe"):
        with pytest.raises(FileExistsError):
            create_anew(tmp_path / name)
    with pytest.raises(DamageError):
        open_regular(tmp_path.joinpath("/dev/null"))


def test_the_store_itself_may_be_reached_through_a_link(scene, tmp_path):
    scene.copy(tmp_path / "disk" / "store")
    (tmp_path / "here").symlink_to(tmp_path / "disk" / "store")
    assert StoreReader(tmp_path / "here").manifest.dense
    with opened(tmp_path / "here") as run:
        assert run.checkpointer.recover().step == scene.dense[-1].last_step


def test_memory_that_no_little_store_justifies_is_seen_also_when_it_is_given_back():
    """In a process of its own: what threads of other tests free hides as much."""
    code = (
        "from python_tests.faults.memory_meter import MemoryMeter, allowed_bytes\n"
        "meter = MemoryMeter()\n"
        "for _ in range(2):\n"
        "    meter.begin()\n"
        "    taken = bytearray(96 << 20)\n"
        "    del taken\n"
        "    assert allowed_bytes(10**6) < 96 << 20 <= meter.grown_bytes() + (1 << 20)\n"
        "meter.begin()\n"
        "assert meter.grown_bytes() < 16 << 20\n"
    )
    done = preloaded.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_what_memory_a_store_justifies_is_counted_from_its_files(scene, tmp_path):
    size = sum(map(len, scene.files.values()))
    assert size_bytes(scene, [], tmp_path / "store") == size
    longer = [{"op": "resize", "file": "segments/00000001-dense.safetensors", "size": 2**40}]
    assert size_bytes(scene, longer, tmp_path / "store") > 2**40
    assert allowed_bytes(2**40) == MOST_BYTES


JSON_FACTOR = 128  # of SECURITY.md


@pytest.mark.parametrize("value", [[], {}, {"a": 0}, {"$tuple": []}, 1000], ids=str)
def test_a_tree_of_small_values_takes_no_more_than_so_many_times_its_json(scene, tmp_path, value):
    store = tmp_path / "store"
    scene.copy(store)
    file = f"segments/{scene.dense[-1].file}"
    tree = [value] * 200_000
    OPERATIONS["set_header"](store, file, ["skeleton", "extra", "values"], {"tree": tree})
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    allowed = allowed_bytes(size) + JSON_FACTOR * len(json.dumps(tree, separators=(",", ":")))
    del tree
    for read in (verify, inspect, recover):
        meter = MemoryMeter()
        read(store)
        assert meter.grown_bytes() < allowed


def recover(store):
    with opened(store) as run:
        assert len(run.checkpointer.recover().state["tree"]) == 200_000
