#!/bin/sh
# Measures the product beside the floor that the host sets; see test/bench.
#
# usage: bench.sh [flag of test/bench ...]
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}"

step 'system packages' sh build/deps.sh build run test
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'kernel and initramfs of the VM' bin/adapter vmm setup
step 'image python, from Debian packages' "$GO" run ./build/images --if-missing python
exec "$GO" run ./test/bench "$@"
