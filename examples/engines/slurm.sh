#!/bin/bash
# Four nodes and two standbys under torchrun: `sbatch slurm.sh` in the folder that has train.py.
# A job that cannot start repeats its loop until its time is over: try it on one node first.
#SBATCH --nodes=6 --ntasks-per-node=1 --no-kill --signal=TERM@60
#SBATCH --time=24:00:00
set -euo pipefail

export CPR_JOB_SECRET_FILE=$HOME/job-$SLURM_JOB_ID.secret # srun hands the variable on, not the secret
(umask 077; openssl rand -hex 32 > "$CPR_JOB_SECRET_FILE")
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --no-kill keeps the others when a node fails; the loop starts an agent again that ended.
srun --no-kill --kill-on-bad-exit=0 bash -c "until torchrun --nnodes=4:6 --nproc-per-node=4 \
  --max-restarts=10 --rdzv-backend=cpr --rdzv-endpoint=$first:29400 \
  --rdzv-id=$SLURM_JOB_ID train.py; do sleep 1; done"
