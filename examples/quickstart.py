import torch

import cpr_ext

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(100_000, 16, sparse=True), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

with cpr_ext.Checkpointer(model, optimizer, "store", num_shards=4) as ckpt:  # 1: track and save
    report = ckpt.recover()  # 2: resume from the newest snapshot; an empty store gives step 0
    for _ in range(report.step, 500):
        rows = torch.randint(0, 100_000, (128, 4))  # recover() restores the generators, too
        loss = torch.nn.functional.softplus(-model(rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(num_samples=128)  # 3: the step is done; may save in the background
    ckpt.save("base").wait_until_done()
    with torch.no_grad():
        model[0].weight[25_000:50_000] = 0.0  # the rows of shard 1 are lost
    print(ckpt.recover(shards=[1]))  # restores them, and touches no other row
