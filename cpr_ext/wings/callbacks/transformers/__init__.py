"""Hugging Face Transformers: a callback with which a Trainer saves, and resumes after a kill.

>>> ckpt = CprTrainerCallback("runs/a/store", schedule=cpr_ext.EverySteps(500))
>>> ckpt.train(Trainer(model, args, train_dataset=data))
"""

try:
    import accelerate  # noqa: F401 - the Trainer cannot be made without
    import transformers  # noqa: F401
except ImportError as error:
    from cpr_ext.errors import UsageError

    raise UsageError(
        f"Transformers' Trainer cannot be imported ({error}). Install it: pip install "
        "'cpr_ext[transformers]'"
    ) from error

from cpr_ext.wings.callbacks.transformers.callback import CprTrainerCallback

__all__ = ["CprTrainerCallback"]
