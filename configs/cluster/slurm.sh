#!/bin/bash
#SBATCH --job-name=llama --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 --time=24:00:00 --signal=TERM@120 --requeue
# sbatch slurm.sh --config llama.toml --out_dir /shared/llama
# Slurm sends SIGTERM two minutes before the time is up; the run saves a checkpoint and ends with 143, and is queued again.
srun gristmill train "$@"
code=$?
[ $code -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
