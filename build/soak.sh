#!/bin/sh
# The long parts of the VM suite, ten times as long: streams, calls, killed
# clients. It takes an hour or more.
#
# usage: soak.sh [fake|qemu|lab ...]
#
# fake is the machine of the tests, qemu is QEMU here, lab is libkrun in an
# emulated machine (test/lab); by default all of them, one after the other.
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}" "${VMTEST_SOAK:=10}"
export VMTEST_SOAK
parts='(Streams|Calls|Reconnect)'

[ $# -gt 0 ] || set -- fake qemu lab
step 'system packages' sh build/deps.sh build run lab
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'kernel and initramfs of the VM' bin/adapter vmm setup
step 'image busybox, from Debian packages' "$GO" run ./build/images --if-missing busybox
for vmm in "$@"; do
	echo "soak: $vmm, $VMTEST_SOAK times"
	case $vmm in
	fake)
		"$GO" test -count=1 -v -timeout 2h -run "TestSuite/$parts" ./internal/vm/vmtest
		;;
	qemu)
		VMTEST_REQUIRE=qemu "$GO" test -count=1 -v -timeout 3h -run "TestSuiteOnQEMU/$parts" ./internal/vm/shimdriver
		;;
	lab)
		sh build/lab.sh --timeout 6h -- "VMTEST_SOAK=$VMTEST_SOAK VMTEST_REQUIRE=libkrun exec shimdriver.test \
			-test.run 'TestSuiteOnLibkrun/$parts' -test.v -test.timeout 6h"
		;;
	*)
		echo "soak: no VMM named $vmm: use fake, qemu, lab" >&2
		exit 2
		;;
	esac
done
