"""A loop that saves as often as its failures require."""

import logging
from pathlib import Path

import torch

import cpr_ext
from cpr_ext.wings.policy import fit_failures, read_failure_log

logging.basicConfig(level=logging.INFO, format="%(message)s")

model = torch.nn.Sequential(torch.nn.EmbeddingBag(100_000, 16, sparse=True), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)

log = Path(__file__).with_name("failure_log.csv")
failures = fit_failures(read_failure_log(log, nodes=40))
schedule = cpr_ext.TargetPLS(0.02, mtbf_hours=failures.mtbf_hours, total_samples=200 * 128)

with cpr_ext.Checkpointer(
    model, optimizer, "store", num_shards=16, schedule=schedule, state={"draws": generator}
) as ckpt:
    report = ckpt.recover()
    for step in range(report.step, 200):
        rows = (100_000 * torch.rand(128, 4, generator=generator) ** 4).long()  # some rows are hot
        loss = torch.nn.functional.softplus(-model(rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(num_samples=128)
        if step == 150:  # a server dies: the rows of shard 3 are lost
            with torch.no_grad():
                model[0].weight[18_750:25_000] = 0.0
            ckpt.recover(shards=[3])
    metrics = ckpt.metrics
    print(f"PLS {metrics.portion_of_lost_samples:.4f}, target 0.02")
    print(f"row updates lost: {metrics.row_updates_lost} of {metrics.row_updates}")
