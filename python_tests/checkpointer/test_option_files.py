"""Options from a file and from the environment: what they become, and what is refused."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import cpr_ext
from cpr_ext.checkpointer.all_options import CheckpointerOptions
from cpr_ext.cli.app import app
from cpr_ext.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]

WHOLE = """
# One of each kind.
[cpr]
priority = {kind = "ssu", fraction = 0.25, period = 3}
schedule = {every_steps = 500, every_seconds = 60}
consistency = "step"
num_shards = 4
rebase_after = "none"
staging = {num_slots = 4}
compaction = {after = 2.0}
retention = {full_recovery_points = 3}
precision = {partial = "int8"}
save_at_close = false
remote = {address = "s3://bucket/job", bytes_per_second = 1e6}
"""


def load(tmp_path, text="", **environ):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return CheckpointerOptions.load(path, environ)


def test_each_kind_of_option_is_read(tmp_path):
    options = load(tmp_path, WHOLE)
    assert options.priority == cpr_ext.SubSampledUsed(0.25, period=3)
    assert options.schedule == cpr_ext.EverySteps(500) | cpr_ext.EverySeconds(60)
    assert (options.consistency, options.num_shards, options.rebase_after) == ("step", 4, None)
    assert options.staging == cpr_ext.StagingOptions(num_slots=4)
    assert options.compaction == cpr_ext.CompactionOptions(after=2.0)
    assert options.retention == cpr_ext.Retention(full_recovery_points=3)
    assert options.precision == cpr_ext.Precision(partial="int8")
    assert options.save_at_close is False
    assert options.remote.address == "s3://bucket/job"
    assert options.remote.bytes_per_second == 1e6


def test_a_file_without_the_table_and_words_without_quotes(tmp_path):
    loaded = load(
        tmp_path, 'priority = "all"', CPR_CONSISTENCY="step", CPR_SCHEDULE="{every_steps = 7}"
    )
    assert loaded.priority == cpr_ext.AllRows()
    assert loaded.consistency == "step"
    assert loaded.schedule == cpr_ext.EverySteps(7)


def test_a_variable_takes_precedence_and_the_source_is_known(tmp_path):
    loaded = load(tmp_path, "num_shards = 4", CPR_NUM_SHARDS="8", CPR_RANK="0")
    assert loaded.num_shards == 8
    assert loaded.sources["num_shards"] == "CPR_NUM_SHARDS"
    assert loaded.sources["priority"] == "default"
    assert load(tmp_path, "num_shards = 4").sources["num_shards"].endswith("job.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_shard = 4", "job.toml: option 'num_shard' does not exist; did you mean 'num_shards'"),
        ("num_shards = 0", "job.toml: num_shards: "),
        ('consistency = "rows"', "consistency: "),
        ('priority = "lru"', "priority 'lru' does not exist .there are: mfu, ssu, scar, all"),
        ("priority = {fraction = 2.0}", "allowed: above 0, at most 1"),
        ('priority = {kind = "mfu", period = 2}', "unexpected keyword argument 'period'"),
        ("schedule = 500", "such as {every_steps = 500}"),
        ("schedule = {every_step = 500}", "did you mean 'every_steps'"),
        ("schedule = {}", "needed: such as"),
        ('staging = {num_slots = "x"}', "staging: "),
        ("staging = 3", "staging"),
        ("scalar_writer = 3", "'scalar_writer' does not exist"),
        ("cpr = 3", "needed: a table"),
        ("x", "cannot be read"),
        ("num_shards = 1e400", "num_shards"),
    ],
)
def test_what_is_wrong_is_named_with_its_source_and_the_remedy(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        load(tmp_path, text)


def test_a_wrong_variable_is_named(tmp_path):
    with pytest.raises(UsageError, match="CPR_NUM_SHARDS: num_shards: "):
        load(tmp_path, CPR_NUM_SHARDS="many")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        CheckpointerOptions.load(tmp_path / "none.toml", {})


def test_a_file_without_an_end_is_an_error():
    with pytest.raises(UsageError, match="is no file of options"):
        cpr_ext.CheckpointerOptions.load("/dev/zero", environ={})


def test_the_options_are_those_of_the_checkpointer_with_its_defaults():
    parameters = inspect.signature(cpr_ext.Checkpointer).parameters
    of_program = {"model", "optimizers", "directory", "tables"}
    of_program |= {"extra_state", "stateful", "per_rank", "ignore"}
    assert {each.name for each in fields(CheckpointerOptions)} == set(parameters) - of_program
    made = CheckpointerOptions()
    for name in parameters.keys() - of_program:
        default = parameters[name].default
        given = {} if default is None else {name: default}
        assert getattr(CheckpointerOptions(**given), name) == getattr(made, name), name


def test_a_checkpointer_is_made_of_them(tmp_path):
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = cpr_ext.CheckpointerOptions.load(environ={"CPR_NUM_SHARDS": "4"})
    ckpt = cpr_ext.Checkpointer(model, optimizer, tmp_path / "store", **options.keywords())
    assert ckpt.num_shards == 4
    ckpt.close()


def test_cpr_doctor_shows_each_option_and_its_source(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(WHOLE)
    monkeypatch.setenv("CPR_WHEN_BUSY", "wait")
    command = ["doctor", "--options", str(tmp_path / "job.toml")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "when_busy         'wait'  [CPR_WHEN_BUSY]" in done.output
    assert f"num_shards        4  [{tmp_path / 'job.toml'}]" in done.output
    assert "on_nan            'raise'  [default]" in done.output
    shown = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert shown["consistency"] == {"value": "'step'", "source": str(tmp_path / "job.toml")}


def test_the_file_of_the_guide_is_valid(tmp_path):
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/guide.md").read_text(), re.DOTALL)
    assert load(tmp_path, text).staging.num_slots == 4
