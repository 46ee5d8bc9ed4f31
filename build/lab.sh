#!/bin/sh
# Runs the VM suite on real libkrun guests, in a machine that QEMU emulates; see
# test/lab.
#
# usage: lab.sh [flag of test/lab ...] [-- command ...]
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}"

step 'system packages' sh build/deps.sh build run lab
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'image busybox, from Debian packages' "$GO" run ./build/images --if-missing busybox
step 'libkrun' bin/adapter vmm setup --libkrun
mkdir -p .cache/lab
"$GO" build -o .cache/lab/lab ./test/lab
exec .cache/lab/lab "$@"
