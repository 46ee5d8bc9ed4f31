#!/bin/sh
# Every test. Where QEMU cannot run its VMs this fails rather than skips; set
# VMTEST_REQUIRE= (empty) to allow the skip. III_TEST_IMAGES= (empty) skips the
# build of a whole image, which needs the network; III_TEST_SDKS= (empty) allows
# to skip the clients of Node, Python and, where there is cargo, Rust, whose
# packages come from npm, PyPI and crates.io.
#
# usage: test.sh [go test flag or package ...]
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}" "${VMTEST_REQUIRE=qemu}" "${III_TEST_IMAGES=1}" "${III_TEST_SDKS=1}"
export VMTEST_REQUIRE III_TEST_IMAGES III_TEST_SDKS

step 'system packages' sh build/deps.sh build run test
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'modules of the tests' "$GO" list -deps -test ./...
step 'test runner' sh build/tools.sh gotestsum
step 'kernel and initramfs of the VM' bin/adapter vmm setup
step 'images python, node, git, busybox' "$GO" run ./build/images --if-missing python node git busybox

[ $# -gt 0 ] || set -- ./...
# The summary ends with every skipped test and its reason.
.tools/bin/gotestsum --format pkgname --format-hide-empty-pkg --jsonfile .cache/log/test.json -- \
	-shuffle=on -count=1 -timeout=18m "$@"
