"""Runs a snippet of the docs as a rank under torchrun; one rank dies in a commit of each life.

    torchrun ... docs_snippet.py PAGE DIRECTORY DEATHS

PAGE is that of the snippet, DEATHS a JSON list of [rank, renames]: by life, who dies before which
rename of a manifest. What was recovered is left in DIRECTORY as ``RANK-LIFE.json``.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import cpr_ext
from cpr_ext.distributed.collective.comparison import facts_of
from python_tests.integrations.together_job import die_at_rename

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIRST_WORDS = {
    "torchrec.md": "from cpr_ext.integrations.torchrec import make_checkpointer",
    "distributed.md": "from cpr_ext.distributed import recover_together",
}
# The snippet of distributed.md ends with the recovery, and has no schedule.
LOOP = """
with ckpt:
    for batch in batches_from(report.step):
        train_step(model, optimizer, batch)
        ckpt.step(num_samples)
        if batch % (2 + rank) == 0:
            ckpt.save()
"""
STEPS, LAST_STEPS = 40, 3


def snippet_of(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    [text] = [block for block in blocks if block.startswith(FIRST_WORDS[page])]
    assert "recover" in text
    return text.replace("EverySteps(500)", "EverySteps(2 + rank)") + (
        LOOP if page == "distributed.md" else ""
    )


def plain_model():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4), torch.nn.Linear(4, 1))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def plain_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randint(50, (8, 3), generator=generator)).sin().sum().backward()
    for parameter in model[1].parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def torchrec_names():
    from python_tests.integrations.sharded_models import make_batch, sharded

    model, optimizer = sharded("row_wise", "rowwise_adagrad", seed=dist.get_rank())

    def train_step(model, optimizer, step):
        optimizer.zero_grad()
        model(*make_batch(step, dist.get_rank())[0]).backward()
        optimizer.step()

    return {
        "DistributedModelParallel": lambda model_of_user: model,
        "CombinedOptimizer": lambda parts: optimizer,
        "dense_optimizer": None,
        "train_step": train_step,
    }


def main(page, directory, deaths):
    directory, deaths = Path(directory), json.loads(deaths)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    names = {"cpr_ext": cpr_ext, "rank": rank, "num_samples": 8}
    if page == "torchrec.md":
        names |= torchrec_names()
    else:
        model, optimizer = plain_model()
        names |= {"model": model, "optimizer": optimizer, "train_step": plain_step}

    def batches_from(step):
        ckpt = names["ckpt"]
        facts = facts_of(names["model"], ckpt, buffers=True)
        told = {"step": step, "counted": ckpt.step_count, "facts": facts}
        (directory / f"{rank}-{life}.json").write_text(json.dumps(told))
        victim, renames = deaths[life] if life < len(deaths) else (None, 0)
        if rank == victim:
            die_at_rename(renames)
        for number in range(step, step + (LAST_STEPS if victim is None else STEPS)):
            yield number
            ckpt.wait()

    os.chdir(directory)
    exec(snippet_of(page), names | {"batches_from": batches_from}, names)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
