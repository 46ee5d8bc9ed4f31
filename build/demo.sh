#!/bin/sh
# From a fresh checkout to Python in a VM. What is up to date is left alone.
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}"

step 'system packages' sh build/deps.sh build run
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'kernel and initramfs of the VM' bin/adapter vmm setup
step 'image python, from Debian packages' "$GO" run ./build/images --if-missing python
echo "bin/adapter run --image python -c 'print(6*7)'"
exec bin/adapter run --image python -c 'print(6*7)'
