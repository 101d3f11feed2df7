"""Lightning: a callback that saves while the Trainer trains, and resumes where it was killed.

>>> ckpt = CprCallback("runs/a/store", schedule=cpr_ext.EverySteps(500))
>>> Trainer(callbacks=[ckpt], max_epochs=3).fit(model, loader)
"""

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    from cpr_ext.errors import UsageError

    raise UsageError(
        f"Lightning cannot be imported ({error}). Install it: pip install 'cpr_ext[lightning]'"
    ) from error

from cpr_ext.wings.callbacks.lightning.callback import CprCallback

__all__ = ["CprCallback"]
