#!/bin/bash
# One process a GPU under SLURM:  sbatch --nodes 4 examples/pod/launch_slurm.sh --pipe 4 --data 8
# Five minutes before its time is up SLURM sends SIGTERM, at which the program saves and stops; submit it again to go on.
# JAX takes the processes' numbers, the address of process 0 and each process's GPU from SLURM's environment.
#SBATCH --job-name=jaxpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output=jaxpipe-%j.log
set -euo pipefail

# sbatch copies this script elsewhere, so the program is found from where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true" # the guide says what it does
RESTARTS=${RESTARTS:-3}

# A job ends as a whole: srun ends the others when one process fails.  Started again, it goes on from its newest checkpoint.
for attempt in $(seq 0 "$RESTARTS"); do
  status=0
  srun --kill-on-bad-exit=1 --label ${PYTHON:-python} -u examples/pod/train.py --cluster "$@" || status=$?
  [ "$status" -eq 0 ] && exit 0
  echo "attempt $attempt of $RESTARTS ended with status $status" >&2
done
exit "$status"
