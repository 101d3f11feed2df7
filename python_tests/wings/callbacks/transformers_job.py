"""A training run under Hugging Face's Trainer, which may kill its own process."""

import os
import signal

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import cpr_ext
from cpr_ext.wings.callbacks.transformers import CprTrainerCallback

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 72, 6, 3  # 12 batches an epoch


class Clicks(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return {"rows": torch.randint(0, 60, (3,), generator=generator), "number": number}


class Model(nn.Module):
    """Dropout draws random numbers: a loop that loses a generator's state ends elsewhere."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(60, 4)
        self.head = nn.Linear(4, 1)
        self.seen = []

    def forward(self, rows, number):
        self.seen.append(number.tolist())
        values = self.head(nn.functional.dropout(self.table(rows), 0.3, self.training))
        return {"loss": values.square().mean()}


class Killer(TrainerCallback):
    """Added after the Checkpointer's callback, so that its step is done."""

    def __init__(self, callback, after):
        self.callback, self.after = callback, after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            self.callback.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(model, folder, **arguments):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    return Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=NUM_EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            **{"use_cpu": True, "save_strategy": "no", "logging_strategy": "no"},
            **{"report_to": "none", "disable_tqdm": True, "remove_unused_columns": False},
            **arguments,
        ),
        train_dataset=Clicks(),
        optimizers=(optimizer, None),
    )


def fit(store, *, die_after=None, accumulate=1):
    """Train to the end, or to death; returns the model, the callback and the Trainer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    schedule = cpr_ext.EverySteps(5, when_busy="wait")
    callback = CprTrainerCallback(store, priority=cpr_ext.AllRows(), schedule=schedule)
    trainer = make_trainer(model, f"{store}-output", gradient_accumulation_steps=accumulate)
    trainer.add_callback(callback)
    if die_after is not None:
        trainer.add_callback(Killer(callback, die_after))
    callback.train(trainer)
    return model, callback, trainer
