"""agent_worker.py, which notes whenever something is unpickled: ``watched_job.py FOLDER``."""

import pathlib
import pickle
import sys
import traceback

import torch
import torch.distributed.distributed_c10d as c10d

folder = pathlib.Path(sys.argv[1])


def note_unpickling():
    with (folder / "unpickled").open("a") as file:
        traceback.print_stack(file=file)


def watched(function):
    def call(*arguments, **options):
        note_unpickling()
        return function(*arguments, **options)

    return call


from python_tests.distributed.hosts.agent_worker import main  # noqa: E402

for module, name in [(pickle, "load"), (pickle, "loads"), (c10d, "_unpickler"), (torch, "load")]:
    setattr(module, name, watched(getattr(module, name)))
# Whoever asks the class itself is seen as soon as it looks for anything that can do something.
sys.addaudithook(lambda event, _: note_unpickling() if event == "pickle.find_class" else None)
main(folder)
