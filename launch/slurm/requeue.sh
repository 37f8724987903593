# Sourced by the batch scripts. `requeueing COMMAND …` runs a step and queues the job again if it was stopped.
# 120 s before the time limit (--signal=B:USR1@120) srun forwards SIGTERM: every process saves its state and exits, within
# the 30 s that the launcher allows; then the job is queued again. Preemption does the same by itself (--requeue).
requeueing() {
  local near="" step="" status=0
  trap 'near=yes; echo "time limit near: stopping"; kill -TERM "$step" 2>/dev/null' USR1
  "$@" &
  step=$!
  wait "$step" || status=$?
  while kill -0 "$step" 2>/dev/null; do  # the signal interrupted the first wait
    status=0
    wait "$step" || status=$?
  done
  # 75: stopped on request, with the state saved (docs/reliability.md); launchers may turn it into another status, so near is also tested
  if [ "$status" -ne 0 ] && { [ -n "$near" ] || [ "$status" -eq 75 ]; }; then
    echo "queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$status"
}
