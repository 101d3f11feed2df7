"""Training runs by the fit() of libraries, which may kill their own process in an epoch.

    python -m python_tests.wings.callbacks.fit_job LIBRARY STORE DIE_AFTER

Prints where it began and a digest of model, optimizer and scheduler at the end.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import cpr_ext
from cpr_ext.state.dense_schema import pack
from cpr_ext.wings.callbacks.loops import ResumableLoader

USERS, ITEMS, SAMPLES, BATCH, EPOCHS = 40, 30, 90, 8, 3
OPTIONS = {"schedule": cpr_ext.EverySteps(5, when_busy="wait"), "priority": cpr_ext.AllRows()}


def samples():
    """Users, items, and whether they fit."""
    draw = np.random.default_rng(0)
    x = {"user": draw.integers(0, USERS, SAMPLES), "item": draw.integers(0, ITEMS, SAMPLES)}
    return x, ((x["user"] + x["item"]) % 3 == 0).astype("float32")


class Run:
    """Counts the batches of this process, and dies at one."""

    def __init__(self, store, die_after):
        self.store, self.die_after = store, die_after
        self.number = 0
        self.batches = ResumableLoader(num_samples=self.count)
        self.ckpt: Any = None
        self.report: Any = None

    def count(self, batch):
        self.number += 1
        if self.number == self.die_after:
            self.ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return BATCH

    def checkpointer(self, model, optimizer, **more):
        self.ckpt = cpr_ext.Checkpointer(
            model, optimizer, self.store, state={"batches": self.batches, **more}, **OPTIONS
        )
        self.report = self.ckpt.recover()
        print("begins at step", self.report.step, "of epoch", self.batches.epoch, flush=True)
        return self.ckpt


def torch_rechub(run):
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import TorchDataset

    x, y = samples()
    sizes = {"user": USERS, "item": ITEMS}
    features = [SparseFeature(name, vocab_size=sizes[name], embed_dim=4) for name in x]
    model = DeepFM(features, features, mlp_params={"dims": [8], "dropout": 0.2})
    trainer = CTRTrainer(
        model,
        scheduler_fn=torch.optim.lr_scheduler.StepLR,
        scheduler_params={"step_size": 1, "gamma": 0.5},
        n_epoch=EPOCHS,
        model_path=tempfile.mkdtemp(),
    )
    loader = DataLoader(TorchDataset(x, y), batch_size=BATCH, shuffle=True)

    batches = run.batches.over(loader)
    with run.checkpointer(model, trainer.optimizer, scheduler=trainer.scheduler) as ckpt:
        trainer.n_epoch -= batches.epoch
        with batches.reporting_to(ckpt):
            trainer.fit(batches)
    return model, trainer.optimizer, trainer.scheduler


def deepctr_torch(run):
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM, basemodel

    x, y = samples()
    sizes = {"user": USERS, "item": ITEMS}
    features = [SparseFeat(name, sizes[name], embedding_dim=4) for name in x]
    model = DeepFM(features, features, dnn_hidden_units=(8,), dnn_dropout=0.2, device="cpu")
    model.compile("adagrad", "binary_crossentropy")

    def make_loader(**given):
        loader = DataLoader(**given)
        return batches.over(loader) if given["shuffle"] else loader

    basemodel.DataLoader = make_loader
    batches = run.batches
    with run.checkpointer(model, model.optim) as ckpt, batches.reporting_to(ckpt):
        model.fit(
            x, y, batch_size=BATCH, epochs=EPOCHS, initial_epoch=batches.epoch, verbose=2
        )  # fmt: skip
    return model, model.optim


def recbole(run):
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.general_recommender import BPR
    from recbole.trainer import Trainer

    folder = Path(tempfile.mkdtemp())
    x, _ = samples()
    (folder / "toy").mkdir()
    lines = [f"{user}\t{item}" for user, item in zip(x["user"], x["item"], strict=True)]
    inter = "\n".join(["user_id:token\titem_id:token", *lines])
    (folder / "toy/toy.inter").write_text(inter)
    options = {
        "data_path": str(folder), "checkpoint_dir": str(folder), "epochs": EPOCHS,
        "train_batch_size": BATCH, "embedding_size": 4, "use_gpu": False, "show_progress": False,
        "load_col": {"inter": ["user_id", "item_id"]},
    }  # fmt: skip
    sys.argv = sys.argv[:1]  # which it would read
    config = Config(model="BPR", dataset="toy", config_dict=options)
    train_data, valid_data, _ = data_preparation(config, create_dataset(config))
    model = BPR(config, train_data.dataset)
    trainer = Trainer(config, model)

    batches = run.batches.over(train_data)
    names = ("cur_step", "best_valid_score", "best_valid_result")

    def stopper():
        return {name: getattr(trainer, name) for name in names}

    with run.checkpointer(model, trainer.optimizer, stopper=stopper) as ckpt:
        vars(trainer).update(run.report.state.get("stopper", {}))
        trainer.start_epoch = batches.epoch
        with batches.reporting_to(ckpt):
            trainer.fit(batches, valid_data, saved=False, verbose=False)
    return model, trainer.optimizer


def digest(parts):
    """A hash of all values of what has a state_dict()."""
    skeleton, tensors = pack([part.state_dict() for part in parts])
    hashed = hashlib.sha256(repr(skeleton).encode())
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return hashed.hexdigest()


def main():
    library, store, die_after = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    print(digest(globals()[library](Run(store, int(die_after)))), flush=True)


if __name__ == "__main__":
    main()
