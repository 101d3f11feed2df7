"""TorchRec's modules around embeddings, resumed in every bit; and what is refused by name."""

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import embedding_tower_sharding
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec import make_checkpointer, sharded_tables
from python_tests.integrations.sharded_models import (
    ALONE,
    distributed,
    opened,
    require_resumes,
    sharded,
    with_dense_adam,
)

pytestmark = ALONE
TABLES = {"a": 30, "b": 17}
DIM, BAGS = 8, 4


def bags(**options):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{name}"],
                **options,
            )
            for name, rows in TABLES.items()
        ]
    )  # fmt: skip


class Interaction(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(DIM * len(TABLES), 4)

    def forward(self, pooled):
        return self.mix(pooled.values()).tanh()


class Processed(torch.nn.Module):
    """Weights by position, which train too, in front of the tables."""

    def __init__(self):
        super().__init__()
        processors = {f"f{name}": PositionWeightedModule(max_feature_length=5) for name in TABLES}
        weighted = EmbeddingBagCollection(tables=bags().embedding_bag_configs(), is_weighted=True)
        self.inner = FeatureProcessedEmbeddingBagCollection(weighted, processors)
        self.over = Interaction()

    def forward(self, features):
        return self.over(self.inner(features)).sum()


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = EmbeddingTower(bags(), Interaction())
        self.over = torch.nn.Linear(4, 1)

    def forward(self, features):
        return self.over(self.inner(features)).sum()


class Pooled(torch.nn.Module):
    """Pooled with weights of the batch, or as a mean."""

    def __init__(self, *, is_weighted):
        super().__init__()
        kind = PoolingType.SUM if is_weighted else PoolingType.MEAN
        configs = bags(pooling=kind).embedding_bag_configs()
        self.inner = EmbeddingBagCollection(tables=configs, is_weighted=is_weighted)
        self.over = Interaction()

    def forward(self, features):
        return self.over(self.inner(features)).sum()


MODULES = {
    "FeatureProcessedEmbeddingBagCollection": (
        Processed, FeatureProcessedEmbeddingBagCollectionSharder, ("row_wise", "table_wise"),
    ),
    "EmbeddingTower": (Tower, EmbeddingTowerSharder, ("table_row_wise",)),
    "weighted": (
        lambda: Pooled(is_weighted=True), EmbeddingBagCollectionSharder, ("row_wise", "table_wise")
    ),
    "mean": (
        lambda: Pooled(is_weighted=False), EmbeddingBagCollectionSharder, ("row_wise", "table_wise")
    ),
}  # fmt: skip
CASES = [(kind, plan) for kind, (_, _, plans) in MODULES.items() for plan in plans]


def build(kind, plan, seed):
    torch.manual_seed(seed)
    make, sharder, _ = MODULES[kind]
    model, sharders = make(), [sharder()]
    tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1, "eps": 1e-3})
    cuts = {
        "row_wise": row_wise,
        "table_wise": lambda: table_wise(rank=0),
        "table_row_wise": lambda: table_row_wise(host_index=0),
    }
    module_plan = construct_module_sharding_plan(
        model.inner, {name: cuts[plan]() for name in TABLES},
        sharder=sharders[0], world_size=1, local_size=1, device_type="cpu",
    )  # fmt: skip
    return with_dense_adam(distributed(model, {"inner": module_plan}, sharders))


def batch(step, *, is_weighted):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (BAGS * len(TABLES),), generator=generator)
    counts = lengths.view(len(TABLES), BAGS).sum(1).tolist()
    values = [
        torch.randint(0, rows, (count,), generator=generator)
        for count, rows in zip(counts, TABLES.values(), strict=True)
    ]
    weights = torch.rand(sum(counts), generator=generator) if is_weighted else None
    keys = [f"f{name}" for name in TABLES]
    return KeyedJaggedTensor(keys, torch.cat(values), weights, lengths=lengths)


@pytest.fixture(autouse=True)
def towers(monkeypatch):
    """TorchRec 1.8 gives device_ids, which DistributedDataParallel refuses on the CPU."""
    monkeypatch.setattr(
        embedding_tower_sharding,
        "DistributedDataParallel",
        lambda module, device_ids, **options: DistributedDataParallel(module, **options),
    )


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_a_module_resumes_bit_for_bit(tmp_path, kind, plan):
    def start(seed):
        parallel, optimizer = build(kind, plan, seed)

        def train_step(step):
            optimizer.zero_grad()
            parallel(batch(step, is_weighted=kind == "weighted")).backward()
            optimizer.step()

        return parallel, optimizer, train_step

    require_resumes(tmp_path, start)


def test_modules_that_hide_or_replicate_their_tables_are_refused(tmp_path, monkeypatch):
    """As a tower of a kind that is not known would; without a word its rows would be lost.

    2-D parallelism needs several ranks to be built; its class is what is refused.
    """
    parallel, optimizer = build("EmbeddingTower", "table_row_wise", 0)
    monkeypatch.setattr(sharded_tables, "ShardedEmbeddingTower", type("Other", (), {}))
    with pytest.raises(UsageError, match=r"embedding_bags\.a\.weight' is sharded by"):
        make_checkpointer(parallel, optimizer, tmp_path / "store")
    model = DMPCollection.__new__(DMPCollection)
    torch.nn.Module.__init__(model)
    with pytest.raises(UsageError, match="DMPCollection"):
        make_checkpointer(model, optimizer, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_pipeline_that_stashes_is_refused_when_it_appears(tmp_path, monkeypatch):
    parallel, optimizer = sharded("table_wise")
    with opened(parallel, optimizer, tmp_path) as ckpt:
        monkeypatch.setattr(MemoryStashingManager, "_device_to_host_stream", object())
        with pytest.raises(UsageError, match="a pipeline stashes tables"):
            ckpt.tables[0].arrays()
