"""Hugging Face's Trainer with a store: kill this program at any moment, and start it again."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import cpr_ext
from cpr_ext.wings.callbacks.transformers import CprTrainerCallback


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        # The Trainer measures the norm of all gradients, which it cannot of sparse ones.
        self.table = nn.EmbeddingBag(100_000, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, rows, labels):
        logits = self.head(self.table(rows)).squeeze(1)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels)}


class Clicks(torch.utils.data.Dataset):
    def __len__(self):
        return 12_800

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        rows = (torch.rand(4, generator=generator) ** 4 * 100_000).long()
        return {"rows": rows, "labels": (rows.sum() % 2).float()}


if __name__ == "__main__":
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    args = TrainingArguments(
        output_dir="output",
        num_train_epochs=2,
        per_device_train_batch_size=128,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    trainer = Trainer(model, args, train_dataset=Clicks(), optimizers=(optimizer, None))
    ckpt = CprTrainerCallback("store", schedule=cpr_ext.EverySeconds(1))
    ckpt.train(trainer)
    print(f"continued from step {ckpt.report.step}, done at step {trainer.state.global_step}")
