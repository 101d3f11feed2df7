"""Compares the lives of a proof with training that was not disturbed, and names what differs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.wings.proving.fingerprint import GENERATOR, Print, read_prints
from cpr_ext.wings.proving.plan import LifeNotes
from cpr_ext.wings.proving.variables import GRADIENTS, INCOMPLETE, PLAIN, STATE

_MOST_VARIABLES = 5
_LOADER = """{0} begins again after recover(). Loop over batches = cpr_ext.wings.callbacks.loops\
.ResumableLoader({0}), call batches.follow(ckpt), and pass state={{'batches': batches}}"""
_READER = (
    "let the data begin at the step that recover() returns, or give the reader state_dict() and "
    "load_state_dict() and pass state={'reader': reader}"
)


@dataclass(frozen=True)
class Difference:
    """The first difference between training that was killed and training that was not.

    Attributes:
        step: the step in which it shows; the kill came after an earlier one.
        killed_after: the step after which the process was killed; 0: not yet.
        what: the value that differs, by its name.
        how: in what it differs.
        variables: variables of the loop that a new process has otherwise, the likely omission.
        remedy: what to change.
        rank: of the process, in a job of several.
    """

    step: int
    killed_after: int
    what: str
    how: str
    variables: Sequence[str]
    remedy: str
    rank: int | None = None

    def __str__(self) -> str:
        worker = "" if self.rank is None else f" of worker {self.rank}"
        if not self.killed_after:
            return (
                f"two runs differ before any kill, in step {self.step}{worker}: {self.what}: "
                f"{self.how}\n  {self.remedy}"
            )
        lines = [
            f"killed after step {self.killed_after}, a new process{worker} trains otherwise",
            f"  first difference, in step {self.step}: {self.what}: {self.how}",
        ]
        lines += [f"  not the same as before the kill: {text}" for text in self.variables]
        return "\n".join([*lines, f"  remedy: {self.remedy}"])


@dataclass(frozen=True)
class Record:
    """One life's notes and fingerprints.

    Attributes:
        prefix: path of its files, without what follows the name.
    """

    prefix: Path
    notes: LifeNotes

    @staticmethod
    def of(folder: Path, rank: int, number: int) -> Record:
        """Return the record of a life."""
        prefix = folder / f"rank-{rank}-life-{number}"
        return Record(prefix, LifeNotes.read(prefix.with_suffix(".jsonl")))

    def prints(self, step: int, kind: str) -> dict[str, Print]:
        """Return what was noted at a point of a step; nothing if it never came there."""
        path = self.prefix.with_name(f"{self.prefix.name}-{step}-{kind}.npz")
        return read_prints(path) if path.exists() else {}

    @property
    def steps(self) -> list[int]:
        """The steps that it trained."""
        return [event["step"] for event in self.notes.of("step")]


def first_difference(
    whole: Record, life: Record, killed_after: int, ignored: Sequence[str], rank: int | None = None
) -> Difference | None:
    """Compare a life with the undisturbed one; return the first difference, if there is any.

    Args:
        killed_after: the step that the life had to resume from; 0: it had to begin.
        ignored: parts of names of variables that may differ.
    """
    begun = [event["step"] for event in life.notes.of("recovered")]
    if killed_after and begun and max(begun) != killed_after:
        how = f"it resumes from step {max(begun)}"
        return Difference(killed_after, killed_after, "the step", how, (), _START, rank)
    if killed_after:
        saved, found = whole.prints(killed_after, "end"), life.prints(killed_after, "recovered")
        for what, how in _differences(saved, found):
            if not what.startswith(_OF_STEP):
                remedy = _remedy_of_state(what)
                return Difference(killed_after, killed_after, what, how, (), remedy, rank)
    for step in life.steps:
        if (first := _in_step(whole, life, step, killed_after, ignored)) is not None:
            return Difference(step, killed_after, *first, rank)
    return None


_OF_STEP = ("input ", "loss ", "state[")
_START = (
    "call recover() before the first step, with the same directory each time, and train from the "
    "step that its report names: for step in range(report.step, num_steps)"
)


def _in_step(
    whole: Record, life: Record, step: int, killed_after: int, ignored: Sequence[str]
) -> tuple[str, str, Sequence[str], str] | None:
    """Return (what, how, variables, remedy) of the first difference in a step."""
    begin = whole.prints(step, "begin"), life.prints(step, "begin")
    end = whole.prints(step, "end"), life.prints(step, "end")
    inputs = [print_ for name, print_ in end[1].items() if name.startswith("input ")]
    variables = [
        (name, how, print_)
        for name, how, print_ in _variable_differences(*begin)
        if not any(each in name for each in ignored)
        and not any(print_.difference(each) is None for each in inputs)
    ]
    state = [each for each in variables if each[0].startswith(STATE)]
    variables = [*state, *(each for each in variables if each[0].startswith(PLAIN))]
    training = [
        *_differences(*begin),
        *sorted(_differences(*end), key=lambda each: _order(each[0])),
    ]
    if not training and (not state or not killed_after):
        return None
    what, how = training[0] if training else (_without_mark(state[0][0]), state[0][1])
    if not killed_after:
        return what, how, (), _REPEAT
    if "'lr' of group" in what:
        remedy = _SCHEDULER
    elif what.startswith("state["):
        remedy = "its load_state_dict() does not take back all that its state_dict() returned"
    elif what.startswith("input ") and (loader := _loader_of(begin[1])):
        remedy = _LOADER.format(loader)
    elif state:
        remedy = _remedy_of_variable(state[0][1], state[0][2].owner)
    elif what.startswith("input "):
        remedy = _READER
    elif any(name == GRADIENTS for name, _, _ in variables) and _order(what) > _order("loss "):
        remedy = _ZERO
    else:
        remedy = _UNKNOWN
    named = [f"{_without_mark(name)}: {how}" for name, how, _ in variables[:_MOST_VARIABLES]]
    return what, how, named, remedy


def _loader_of(variables: Mapping[str, Print]) -> str | None:
    names = [name for name, print_ in variables.items() if print_.form == "DataLoader"]
    return _without_mark(names[0]).rpartition(": ")[2] if names else None


def _without_mark(name: str) -> str:
    return name.removeprefix(STATE).removeprefix(PLAIN)


def _variable_differences(
    expected: Mapping[str, Print], found: Mapping[str, Print]
) -> Iterator[tuple[str, str, Print]]:
    """Yield (name, how, print) of variables that both lives have and that differ."""
    is_whole = INCOMPLETE not in expected and INCOMPLETE not in found
    for name, print_ in expected.items():
        if not name.startswith((STATE, PLAIN)):
            continue
        if name in found:
            if (how := print_.difference(found[name])) is not None:
                yield name, how, found[name]
        elif is_whole and name.startswith(STATE) and _variable(name) in found:
            yield name, "it is not there any more", print_


def _variable(name: str) -> str:
    """Return the mark that the variable is there of which a value is a part."""
    where, _, path = _without_mark(name).rpartition(": ")
    variable = re.split(r"[.\[ ]", path)[0]
    return f"{PLAIN}{where}: {variable}" if where else f"{PLAIN}{variable}"


_SCHEDULER = (
    "call scheduler.step() before the Checkpointer's step(), as its snapshot is of the state then, "
    "and pass state={'scheduler': scheduler}"
)
_ZERO = (
    "gradients are not saved: call zero_grad() in each step before backward(). To add up those of "
    "several batches, call the Checkpointer's step() once per optimizer step"
)
_REPEAT = (
    "seed all generators (torch.manual_seed), and use deterministic kernels; a loop that two "
    "processes do not repeat cannot be proven this way"
)
_UNKNOWN = (
    "something that decides the next step is neither in the model, the optimizers nor the "
    "generators: save it with state=, or make it follow from the step's number"
)


def _differences(
    expected: Mapping[str, Print], found: Mapping[str, Print]
) -> Iterator[tuple[str, str]]:
    """Yield (name, how) of the state that differs, variables apart."""
    if not expected or not found:
        return
    for what, print_ in expected.items():
        if what.startswith((STATE, PLAIN)):
            continue
        if what not in found:
            yield what, "it is not there any more"
        elif (how := print_.difference(found[what])) is not None:
            yield what, how
    for what in found.keys() - expected.keys():
        if not what.startswith((STATE, PLAIN)):
            yield what, "it was not there before"


def _order(what: str) -> int:
    """Return what comes first in a step: inputs decide the loss, and that the rest."""
    if what.startswith("input "):
        return 0
    if GENERATOR in what:
        return 1
    return 2 if what.startswith("loss ") else 3


def _remedy_of_state(what: str) -> str:
    if "which state_dict() lacks" in what:
        return "register the buffer with persistent=True, or save it with state="
    if GENERATOR in what:
        return "nothing may draw random numbers between the end of recover() and the first step"
    return "an object that loads its state in another way needs its own entry in state="


def _remedy_of_variable(how: str, owner: str) -> str:
    kind, _, path = owner.partition(" ")
    if kind == "object" or GENERATOR in how:
        return f"pass state={{'{path}': {path}}}"
    if kind == "optimizer":
        return f"give the Checkpointer this optimizer, too: Checkpointer(model, [..., {path}], ...)"
    if kind == "module":
        return (
            f"give the Checkpointer one module that holds the model and {path}, or name it in state"
        )
    path = path.split("[")[0]
    return f"pass state={{'{path}': lambda: {path}}}, and take it back from report.state"
