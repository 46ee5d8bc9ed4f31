#!/bin/sh
# Measures libkrun's VMs in an emulated machine, beside a floor and a peer; see
# test/bench-lab.
#
# usage: bench-lab.sh [flag of test/bench-lab ...]
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}"

step 'system packages' sh build/deps.sh build run lab
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'image busybox, from Debian packages' "$GO" run ./build/images --if-missing busybox
step 'libkrun' bin/adapter vmm setup --libkrun
exec "$GO" run ./test/bench-lab "$@"
