#!/bin/bash
# One process a GPU under mpirun (Open MPI, or MPICH and its relatives).  Run it on the first host:
#   HOSTS=node1:8,node2:8 PROCESSES=16 examples/pod/launch_mpi.sh --pipe 2 --data 8
# MPI only starts the processes and ends them together; JAX does all communication.
set -euo pipefail
cd "$(dirname "$0")/../.."

COORDINATOR=${COORDINATOR:-$(hostname):12355} # process 0 runs on the first host of HOSTS: this one
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"

# Not every mpirun hands the environment on, so what the other hosts need stands in the command.
train=$(printf '%q ' env XLA_FLAGS="$XLA_FLAGS" "${PYTHON:-python}" -u examples/pod/train.py --coordinator "$COORDINATOR")
# Each MPI has names of its own for how many processes there are, a process's number, and its number on its host.
numbers='--processes ${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE} --process ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} --local-device ${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}'
exec mpirun -np "${PROCESSES:?how many processes, all hosts together}" ${HOSTS:+--host "$HOSTS"} bash -c "exec $train $numbers \"\$@\"" train "$@"
