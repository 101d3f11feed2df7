"""Lightning's Trainer with a store: kill this program at any moment, and start it again."""

import lightning.pytorch as pl
import torch
from torch import nn

import cpr_ext
from cpr_ext.wings.callbacks.lightning import CprCallback


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(100_000, 16, sparse=True)
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        rows, labels = batch
        logits = self.head(self.table(rows)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Clicks:
    """A loader that can say its position, so that an epoch continues in the middle."""

    def __init__(self, num_batches=100):
        self.num_batches, self.next_batch = num_batches, 0

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        if self.next_batch == self.num_batches:
            self.next_batch = 0
        while self.next_batch < self.num_batches:
            generator = torch.Generator().manual_seed(self.next_batch)
            rows = (torch.rand(128, 4, generator=generator) ** 4 * 100_000).long()
            self.next_batch += 1
            yield rows, (rows.sum(1) % 2).float()

    def state_dict(self):
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state):
        self.next_batch = state["next_batch"]


if __name__ == "__main__":
    ckpt = CprCallback("store", schedule=cpr_ext.EverySeconds(1))
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[ckpt],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Model(), Clicks())
    print(f"continued from step {ckpt.report.step}, done at step {trainer.global_step}")
