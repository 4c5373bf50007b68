# What a job of launcher=slurm does once its own lines have set `wait_s`, `log` and `command` (slurm.py).

# --- on each node, by srun

node() {
  local first=() over= status
  trap true TERM  # of scancel, or preemption: Ray goes on until the run has written its last checkpoint
  trap 'over=yes; ray stop --force > /dev/null 2>&1' USR2  # of the first node, whose run has ended
  export RAY_TMPDIR=$(mktemp -d /tmp/prl-XXXXXXXX)
  trap 'rm -rf "$RAY_TMPDIR"' EXIT
  [ "$SLURM_NODEID" -ne 0 ] || first=(--include-dashboard false)
  ray symmetric-run --address "$PRL_HEAD" --min-nodes "$SLURM_NNODES" --temp-dir "$RAY_TMPDIR/ray" \
    --num-cpus "$SLURM_CPUS_ON_NODE" "${first[@]}" -- bash -c 'driver "$@"' prl "$@" > "$RAY_TMPDIR/log" 2>&1 &
  ended $!; status=$?
  if [ "$SLURM_NODEID" -eq 0 ]; then
    echo $status > "$PRL_JOB/status"
    trap true USR2
    scancel --signal=USR2 "$SLURM_JOB_ID.$SLURM_STEP_ID"
  fi
  [ -n "$over" ] || [ -e "$PRL_JOB/pid" ] || grep -v state-dump "$RAY_TMPDIR/log" | tail -n 20
  return $status
}

# The run, by Ray on the first node.
driver() {
  echo $$ > "$PRL_JOB/pid"
  [ ! -e "$PRL_JOB/stopping" ] || exit 143
  RAY_ADDRESS=$PRL_HEAD exec "$@" >> "$PRL_LOG" 2>&1
}

# Wait for a process, whatever signals come. Returns its status.
ended() {
  local status
  wait "$1"; status=$?
  while kill -0 "$1" 2> /dev/null; do wait "$1"; status=$?; done
  return $status
}

# --- on the first node, by sbatch

# Have the run write its last checkpoint and end.
stop() {
  touch "$PRL_JOB/stopping"
  [ ! -e "$PRL_JOB/pid" ] || kill -TERM "$(cat "$PRL_JOB/pid")"
}

export PRL_JOB=$(mktemp -d /tmp/prl-XXXXXXXX)
trap 'rm -rf "$PRL_JOB"' EXIT
trap stop TERM  # of scancel, or preemption, after which Slurm itself requeues the job
trap 'again=yes; stop' USR1  # the time limit is near
unset RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=$wait_s
export PRL_LOG="$log$SLURM_JOB_ID.log"
export PRL_HEAD=$(python -c 'import ray.util; print(ray.util.get_node_ip_address())'):$((20000 + SLURM_JOB_ID % 10000))
export -f node driver ended
srun --ntasks-per-node=1 --cpu-bind=none --wait=30 bash -c 'node "$@"' prl "${command[@]}" &
ended $!
status=$(cat "$PRL_JOB/status" || echo 1)
if [ -n "$again" ] && [ $status -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
