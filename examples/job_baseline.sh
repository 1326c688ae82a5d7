#!/bin/sh
# The plain baseline that anybody can run: one Job a sandbox, timed from its creation to its first line.
#
#     sh job_baseline.sh IMAGE [JOBS] [AT_ONCE]
#
# NAMESPACE, KUBECTL ("kubectl --context x") and PULL_POLICY come from the environment. Each figure includes two
# starts of kubectl (some 0.1 s); `rlsandbox bench ttfc --scenario job` measures the same without them.
set -eu
image=${1:?usage: job_baseline.sh IMAGE [JOBS] [AT_ONCE]}
jobs=${2:-64} at_once=${3:-8}
export KUBECTL="${KUBECTL:-kubectl}" NAMESPACE="${NAMESPACE:-default}" PULL_POLICY="${PULL_POLICY:-IfNotPresent}"
export IMAGE="$image" RUN="baseline-$$"

# shellcheck disable=SC2016 # it is for the other shell
one='
name=$RUN-$0
begun=$(date +%s%N)
$KUBECTL -n "$NAMESPACE" create -f - >&2 <<EOF
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 0
      containers:
        - name: main
          image: $IMAGE
          imagePullPolicy: $PULL_POLICY
          command: [/bin/echo, hi]
EOF
$KUBECTL -n "$NAMESPACE" logs --follow --pod-running-timeout=10m "job/$name" | head -n 1 | grep -q . || exit 1
ended=$(date +%s%N)
$KUBECTL -n "$NAMESPACE" delete job "$name" --wait=false >&2
echo $(((ended - begun) / 1000000))
'
begun=$(date +%s%N)
times=$(seq "$jobs" | xargs -n 1 -P "$at_once" sh -c "$one" | sort -n)
ended=$(date +%s%N)
printf '%s\n' "$times" | awk -v whole=$(((ended - begun) / 1000000)) '
function at(p, i) { i = int(p * NR / 100); if (i < p * NR / 100) i++; return t[i < 1 ? 1 : i] / 1000 }
{ t[NR] = $1; sum += $1 }
END { printf "jobs %d\nmean %.3f\np50 %.3f\np95 %.3f\np99 %.3f\nmax %.3f\nbatch %.3f\n",
             NR, sum / NR / 1000, at(50), at(95), at(99), t[NR] / 1000, whole / 1000 }'
