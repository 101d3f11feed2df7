"""A training run under Lightning's Trainer, which may kill its own process."""

import logging
import os
import signal
import warnings

import lightning.pytorch as pl
import torch
from torch import nn

import cpr_ext
from cpr_ext.wings.callbacks.lightning import CprCallback

NUM_BATCHES, NUM_EPOCHS = 12, 3
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Batches:
    """A resumable loader: the batch follows from its number and the epoch."""

    def __init__(self):
        self.epoch, self.number = 0, 0

    def __len__(self):
        return NUM_BATCHES

    def __iter__(self):
        if self.number == NUM_BATCHES:  # Lightning does not ask for more than there are
            self.epoch, self.number = self.epoch + 1, 0
        while self.number < NUM_BATCHES:
            generator = torch.Generator().manual_seed(100 * self.epoch + self.number)
            self.number += 1
            yield torch.randint(0, 60, (8, 3), generator=generator)

    def state_dict(self):
        return {"epoch": self.epoch, "number": self.number}

    def load_state_dict(self, state):
        self.epoch, self.number = state["epoch"], state["number"]


class Model(pl.LightningModule):
    def __init__(self, die_after=None):
        super().__init__()
        self.table = nn.EmbeddingBag(60, 4, sparse=True)
        self.head = nn.Linear(4, 1)
        self.die_after = die_after
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx))
        return self.head(self.table(batch)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.die_after is not None and self.trainer.global_step >= self.die_after:
            callback = next(c for c in self.trainer.callbacks if isinstance(c, CprCallback))
            callback.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)
        by_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}


def fit(store, *, die_after=None, accumulate=1):
    """Train to the end, or to death; returns the model and the callback."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(die_after)
    schedule = cpr_ext.EverySteps(5, when_busy="wait")
    callback = CprCallback(store, priority=cpr_ext.AllRows(), schedule=schedule)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        callbacks=[callback],
        accumulate_grad_batches=accumulate,
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        ),
    )
    trainer.fit(model, Batches())
    return model, callback, trainer
