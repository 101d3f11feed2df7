"""``cpr import``: a store from a checkpoint of another kind."""

from __future__ import annotations

import click

from cpr_ext.wings.cli.output import count, echo, json_option, print_json, size


@click.command("import")
@click.argument("path", type=click.Path(exists=True))
@click.argument("store", type=click.Path(file_okay=False))
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step that PATH is of.")
@click.option(
    "--samples", type=click.IntRange(min=0), default=0, help="Samples trained until then."
)
@click.option("--model-key", help='Where PATH has the model; by default "model" or "state_dict".')
@json_option
def import_checkpoint(
    path: str, store: str, step: int, samples: int, model_key: str | None, as_json: bool
) -> None:
    """Write the checkpoint PATH into the new directory STORE.

    PATH is a file of torch.save, or a directory of torch.distributed.checkpoint. A job begins with
    it by recover(from_store=[STORE]). PyTorch reads the metadata of a directory as a pickle: import
    only what you trust.
    """
    from cpr_ext.wings.tools import maintenance

    report = maintenance.import_checkpoint(
        path, store, step=step, num_samples=samples, model_key=model_key
    )
    if as_json:
        print_json(report)
        return
    what = f"{count(report.tensors, 'tensor')}, {size(report.tensor_bytes)}"
    state = f"optimizer state of {count(report.parameters_with_state, 'parameter')}"
    echo(f"{report.store}: step {report.step}: {what}; {state}")
    for note in report.notes:
        echo(f"note: {note}")
