"""The job of two_workers.py under Ray: each worker is an actor; a lost one starts elsewhere.

    python ray_workers.py [--workers 2] [--steps 400] [--store ckpts] [--address auto]

The driver hosts the rendezvous. It gives each actor its rank and the job's secret, and makes
another actor where one was lost; Ray places it on a node that lives. The lost rows come from the
peers' memory, so no store must be reached from other nodes, and no sample is lost.
"""

import argparse
import hashlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

import ray
from ray.util import get_node_ip_address

from cpr_ext.distributed import Parity, Worker

MOST_LOSSES = 10


@ray.remote(num_cpus=1, max_restarts=0)  # the driver starts it again, under the same rank
class Member:
    """One worker; run() must be a plain method, which Ray calls on the main thread."""

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def run(self, environment, store, num_steps):
        """Train; return a digest of all parameters."""
        import two_workers  # beside this file

        os.environ.update(environment, CPR_ADDRESS=get_node_ip_address())
        models = {}

        def train_step(job, step):
            models["last"] = job.model
            return two_workers.train_step(job, step)

        parity = Parity(group_size=int(environment["CPR_WORLD_SIZE"]))
        worker = Worker.from_environment(store=store, recovery="exact", parity=parity)
        make = two_workers.make_checkpointer
        worker.run(two_workers.build, train_step, num_steps=num_steps, make_checkpointer=make)
        values = [value.numpy().tobytes() for value in models["last"].state_dict().values()]
        return hashlib.sha256(b"".join(values)).hexdigest()


def train(num_workers, store, num_steps, on_start=lambda rank, node: None):
    """Run the job on the cluster that ray.init() joined; return each worker's result.

    ``on_start``: called with the rank and the node of each actor.
    """
    address, secret = get_node_ip_address(), secrets.token_hex(32)
    command = [sys.executable, "-m", "cpr_ext.distributed.rendezvous_host", "--while-needed"]
    with subprocess.Popen(
        [*command, "--host", address, "--port", "0"],
        env={**os.environ, "CPR_JOB_SECRET": secret},
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        port = host.stdout.readline().split()[-1]
        environment = {
            "CPR_WORLD_SIZE": str(num_workers),
            "CPR_RENDEZVOUS": f"{address}:{port}",
            "CPR_JOB_SECRET": secret,
        }
        members, running, results = {}, {}, {}

        def start(rank):
            members[rank] = member = Member.remote()
            on_start(rank, ray.get(member.node.remote()))
            running[member.run.remote({**environment, "CPR_RANK": str(rank)}, store, num_steps)] = (
                rank
            )

        try:
            for rank in range(num_workers):
                start(rank)
            losses = 0
            while running:
                [ended], _ = ray.wait(list(running), num_returns=1)
                rank = running.pop(ended)
                try:
                    results[rank] = ray.get(ended)
                except ray.exceptions.RayActorError as error:
                    losses += 1
                    if losses > MOST_LOSSES:
                        raise
                    print(f"worker {rank} was lost, and starts again: {error}", flush=True)
                    start(rank)
        finally:
            host.terminate()
    return [results[rank] for rank in range(num_workers)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--store", default="ckpts")
    parser.add_argument("--address", help="of a Ray cluster; default: one on this machine")
    options = parser.parse_args()
    ray.init(address=options.address)
    print(*train(options.workers, str(Path(options.store).resolve()), options.steps), sep="\n")
