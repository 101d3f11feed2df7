"""The host of the rendezvous: notes, and who waits for whom, for those who know the job's secret.

It holds nothing of the model. The host does not listen to a client that does not prove to know the
secret. Such a connection may send 64 bytes, for some seconds. If there are too many, the oldest is
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cpr_ext.distributed.identity.descriptors import describe
from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.meeting import (
    FIND_SECONDS,
    Claim,
    MeetingError,
    UnknownRoundError,
)
from cpr_ext.distributed.rendezvous.nodes import Agent
from cpr_ext.distributed.rendezvous.served_job import ServedJob

PROOF_SECONDS = 5.0
MAX_STRANGERS = 256  # and as many more as jobs here have connections in all
_LEAST_SECONDS = 0.25  # that each stranger is given; more of them come in no faster
_POLL_SECONDS = 0.01
_REPORT_SECONDS = 10.0  # between two lines about refused connections
_MAX_WAIT_SECONDS = 60.0
_BACKLOG = 1024
_CONNECTIONS_EACH = 2  # of a worker: one that shows that it lives, and one that asks
_LOOK_SECONDS = 0.25  # between two looks at all agents and connections
_GONE_SECONDS = 3.2  # since a machine was last heard of, which is probed each second
_STRANGERS_BYTES = 4096  # that are read ahead; more is read as a message needs it


class Host:
    """Serves the workers of the jobs that share one secret.

    Args:
        is_first: no host has served them before, so nobody is in a round that this one does not
            know.
    """

    def __init__(self, secret: bytes, *, is_first: bool = False) -> None:
        self._secret = secret
        knows_all_from = time.monotonic() + (0.0 if is_first else FIND_SECONDS)
        self._jobs: dict[str, ServedJob] = defaultdict(lambda: ServedJob(knows_all_from))
        self._visits: set[asyncio.Future[None]] = set()
        self._known: dict[int, asyncio.StreamWriter] = {}  # by visit
        self._strangers: dict[asyncio.Future[None], float] = {}  # when they came; oldest first
        self._numbers = itertools.count()
        self._refused = 0
        self._reported = -_REPORT_SECONDS

    @property
    def is_needed(self) -> bool:
        """Whether a process that knows the secret is connected."""
        return bool(self._known)

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        loop = asyncio.get_running_loop()
        looking = asyncio.ensure_future(self._look_after_jobs())
        self._visits.add(looking)  # kept from the garbage collector
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or it was gone again
                print(f"rendezvous: {describe(error)}", file=sys.stderr, flush=True)
                await asyncio.sleep(_LEAST_SECONDS)
                continue
            visit = asyncio.ensure_future(self._visit(connected))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)
            self._strangers[visit] = time.monotonic()
            if looking.done():
                looking.result()  # raises: without it nobody hears of machines that vanish
            await self._make_room()

    async def _look_after_jobs(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._end_silent()
            for job in list(self._jobs.values()):
                await job.assign()

    def _end_silent(self) -> None:
        """Close the connections of machines that vanished, so that the others hear of it."""
        # Of one that is closed an answer may still be awaited here.
        known = {v: w for v, w in self._known.items() if not w.transport.is_closing()}
        silent = [
            (visit, writer)
            for visit, writer in known.items()
            if wire.silent_seconds(writer.get_extra_info("socket")) > _GONE_SECONDS
        ]
        if silent and len(silent) == len(known):  # it is rather this machine that is cut off
            for job in self._jobs.values():
                job.nodes.knows_all_from = time.monotonic() + FIND_SECONDS
            return
        for visit, writer in silent:
            for job in self._jobs.values():
                job.nodes.leave(visit, is_cut_off=True)
                job.tell_of_end(visit, is_silent=True)
            writer.transport.abort()

    async def _make_room(self) -> None:
        """Disconnect the oldest unproven clients; each had time to prove itself."""
        known = _CONNECTIONS_EACH * sum(job.world_size for job in self._jobs.values())
        while len(self._strangers) > MAX_STRANGERS + known:
            oldest, came = next(iter(self._strangers.items()))
            if (left := came + _LEAST_SECONDS - time.monotonic()) > 0:
                await asyncio.sleep(min(left, _POLL_SECONDS))
            elif self._strangers.pop(oldest, None) is not None:
                oldest.cancel()

    async def _visit(self, connected: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        reader, writer = await asyncio.open_connection(sock=connected, limit=_STRANGERS_BYTES)
        try:
            try:
                handshake = await asyncio.wait_for(self._greet(reader, writer), PROOF_SECONDS)
            finally:
                self._strangers.pop(task, None)
            if handshake is None:
                return
            await self._answer_all(reader, writer, handshake)
        except (asyncio.TimeoutError, asyncio.CancelledError, wire.ForeignMessageError):
            self._note_refusal(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # gone
        finally:
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> wire.Handshake | None:
        """Return the handshake of a client that knows the secret, else None."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        writer.write(wire.GREETING + nonce)
        worker_nonce = await reader.readexactly(wire.NONCE_BYTES)
        handshake = wire.Handshake(self._secret, nonce, worker_nonce)
        proof = await reader.readexactly(wire.CODE_BYTES)
        if not secrets.compare_digest(proof, handshake.worker_proof()):
            writer.write(wire.REFUSAL)
            self._note_refusal(writer)
            return None
        connection = writer.get_extra_info("socket")
        wire.notice_lost_peer(connection)
        writer.write(handshake.host_proof())
        await writer.drain()
        return handshake

    async def _answer_all(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handshake: wire.Handshake
    ) -> None:
        visit, asked, said = next(self._numbers), handshake.to_host(), handshake.to_worker()

        self._known[visit] = writer

        def say(news: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):
                writer.write(said.seal(news))

        try:
            while True:
                size = wire.body_bytes(await reader.readexactly(wire.LENGTH_BYTES))
                request = {
                    **asked.open(await reader.readexactly(size)),
                    "machine": writer.get_extra_info("peername")[0],
                }
                try:
                    answer = await self._answer(request, visit)
                except MeetingError as error:
                    answer = {"error": str(error)}
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    answer = {"error": f"not understood: {type(error).__name__} {error}"}
                writer.write(said.seal(answer))
                await writer.drain()
                if request.get("ask") in ("arrive", "attend") and not answer:
                    job = self._jobs[str(request["job"])]
                    job.listen(visit, say)
                    await job.assign()
                    if request["ask"] == "attend" and job.nodes.is_replaced(visit):
                        say({"node": None})
        except (asyncio.IncompleteReadError, ConnectionResetError):
            for job in self._jobs.values():
                job.tell_of_end(visit)  # its kernel has closed it; nobody was cut off
            raise
        finally:
            del self._known[visit]
            for job in self._jobs.values():
                job.listeners.pop(visit, None)
                job.nodes.leave(visit)
                await job.assign()
                async with job.changing():
                    job.meeting.leave(visit, time.monotonic())

    async def _answer(self, request: dict[str, Any], visit: int) -> dict[str, Any]:
        job = self._jobs[str(request["job"])]
        what = request["ask"]
        if what == "write":
            job.values.write(str(request["key"]), str(request["text"]))
            return {}
        if what == "has":
            return {"are_there": job.values.has(_keys_in(request))}
        if what == "gather":
            return await self._gather(job, request)
        if what == "meet":
            return await self._meet(job, request, visit)
        if what == "arrive":
            return self._arrive(job, request, visit)
        if what == "attend":
            job.nodes.attend(_agent_in(request), visit)
            return {}
        if what == "node":
            token, nodes = str(request["agent"]), job.nodes
            nodes.note_ready(token)
            await _until(
                job,
                lambda: nodes.node_of(token) is not None or nodes.is_over(token),
                request["seconds"],
            )
            return {"node": nodes.node_of(token), "is_over": nodes.is_over(token)}
        if what == "waiting":
            rank, epoch = int(request["rank"]), int(request["epoch"])
            if epoch != job.meeting.epoch:
                raise MeetingError("this round is over, or this host of the rendezvous is new")
            return job.note_waiting(rank, epoch, is_waiting=bool(request["is_waiting"]))
        if what == "over":
            job.end(str(request["reason"]))
            await job.wake()
            return {}
        if what == "failed":
            job.note_end(str(request["who"]), str(request["reason"]))
            return {"times": job.count_failure(int(request["rank"]), str(request["reason"]))}
        if what == "ended":
            job.note_end(str(request["who"]), str(request["reason"]))
            return {}
        if what == "give way":
            return {"is_given": await job.hand_on(str(request["agent"]))}
        if what == "bye":
            who = job.meeting.say_bye(str(request["member"]))
            job.note_end(who, "left: by SIGTERM or Worker.leave()")
            return {}
        if what == "take over":
            rank, member = int(request["rank"]), str(request["member"])
            now = time.monotonic()
            return {"is_yours": job.meeting.take_over(rank, member, visit=visit, now=now)}
        raise ValueError(f"what is {what!r}?")

    async def _meet(self, job: ServedJob, request: dict[str, Any], visit: int) -> dict[str, Any]:
        meeting, token, claim = job.meeting, str(request["token"]), _claim_in(request)
        try:
            async with job.changing():
                meeting.meet(
                    claim,
                    token,
                    lease_seconds=float(request["lease_seconds"]),
                    visit=visit,
                    now=time.monotonic(),
                )
        except UnknownRoundError:
            return {"round": None, "missing": [], "asks_roster": True}
        job.world_size = claim.world_size
        if meeting.replaces_unheard(claim, time.monotonic()):
            job.tell_of_loss(meeting.epoch, is_silent=True)
        if meeting.has_left(claim, token):
            job.tell_of_loss(meeting.epoch, is_silent=False)
        await _until(job, lambda: meeting.is_member(token), request["seconds"])
        if meeting.is_member(token):
            return {"round": meeting.round_id, "epoch": meeting.epoch, "members": job.members()}
        num_missing, missing = job.missing(time.monotonic())
        return {
            "round": None,
            "missing": missing,
            "num_missing": num_missing,
            "held_by": meeting.held_by(claim),
        }

    async def _gather(self, job: ServedJob, request: dict[str, Any]) -> dict[str, Any]:
        keys = _keys_in(request)
        if keys and keys[0].startswith("round/"):
            round_id = keys[0].split("/")[1]
            if round_id != job.meeting.round_id:
                raise MeetingError("this round is over, or this host of the rendezvous is new")
            if job.has_lost_member:
                raise MeetingError("a member of this round has ended")
        return await job.values.gather(keys, _bounded(request["seconds"]))

    def _arrive(self, job: ServedJob, request: dict[str, Any], visit: int) -> dict[str, Any]:
        claim = _claim_in(request)
        try:
            job.meeting.arrive(claim, visit=visit, now=time.monotonic())
        except UnknownRoundError:
            return {"asks_roster": True}
        job.world_size = claim.world_size
        return {}

    def _note_refusal(self, writer: asyncio.StreamWriter) -> None:
        """Log refusals periodically: a flood must not fill a log."""
        self._refused += 1
        if time.monotonic() < self._reported + _REPORT_SECONDS:
            return
        self._reported = time.monotonic()
        peer = writer.get_extra_info("peername")
        print(
            f"rendezvous: {self._refused} connections did not prove to know the job's secret, the "
            f"last from {peer[0] if peer else 'unknown'}",
            file=sys.stderr,
            flush=True,
        )


def _claim_in(request: dict[str, Any]) -> Claim:
    plain = dict(request["claim"])
    numbers: dict[str, Any] = {n: int(plain[n]) for n in ("rank", "world_size", "epoch", "seen")}
    texts: dict[str, Any] = {name: str(plain[name]) for name in ("member", "run", "who")}
    roster, machine = tuple(map(str, plain["roster"])), str(request["machine"])
    return Claim(**numbers, **texts, roster=roster, machine=machine)


def _agent_in(request: dict[str, Any]) -> Agent:
    plain = dict(request["agent"])
    had, only = (None if plain[name] is None else int(plain[name]) for name in ("had", "only"))
    token, number = str(plain["token"]), int(plain["num_nodes"])
    adopt_seconds = float(plain["adopt_seconds"])
    return Agent(token, number, str(request["machine"]), time.monotonic(), had, only, adopt_seconds)


def _keys_in(request: dict[str, Any]) -> tuple[str, ...]:
    """Return keys that a request names by what they begin with, and how each one ends."""
    prefix, ends = str(request["prefix"]), request["keys"]
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise TypeError("keys")
    return tuple(prefix + end for end in ends)


def _bounded(seconds: Any) -> float:
    return max(0.0, min(float(seconds), _MAX_WAIT_SECONDS))


async def _until(job: ServedJob, is_so: Callable[[], bool], seconds: float) -> None:
    async def wait() -> None:
        async with job.changed:
            await job.changed.wait_for(is_so)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(wait(), _bounded(seconds))
