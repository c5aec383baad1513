#!/bin/bash
# One process a host, with all its GPUs, over plain ssh.  Run it on the first host:
#   HOSTS="node1 node2 node3 node4" examples/pod/launch_ssh.sh --pipe 4 --data 8
# The same folder and the same Python must be at the same path on every host.
set -euo pipefail
cd "$(dirname "$0")/../.."

read -ra hosts <<<"${HOSTS:?name the hosts, the first one first: HOSTS=\"node1 node2\"}"
COORDINATOR=${COORDINATOR:-${hosts[0]}:12355}
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT # ssh -tt: ending it here ends the process there
for i in "${!hosts[@]}"; do
  command=$(printf '%q ' env XLA_FLAGS="$XLA_FLAGS" "${PYTHON:-python}" -u examples/pod/train.py \
    --coordinator "$COORDINATOR" --processes "${#hosts[@]}" --process "$i" "$@")
  ssh -tt -o BatchMode=yes "${hosts[$i]}" "cd $(printf '%q' "$PWD") && exec $command" </dev/null &
  pids+=($!)
done

# As soon as one process fails, end the others: JAX would too, but only after a heartbeat's time.
for _ in "${hosts[@]}"; do
  status=0
  wait -n || status=$?
  [ "$status" -eq 0 ] || { echo "a process ended with status $status: ending the others" >&2; exit "$status"; }
done
