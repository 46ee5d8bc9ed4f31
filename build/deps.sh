#!/bin/sh
# Installs what the project needs from the system and does not find.
#
# usage: deps.sh build|run|test|lab ...
#
#   build  what `make build` needs: a C compiler for krun-shim
#   run    what a sandbox needs on a host without hardware virtualization: QEMU
#   test   what the tests compare our own work with, and run as clients
#   lab    what libkrun needs, and what fetches it
#
# As root on Debian or Ubuntu the missing packages are installed with apt-get,
# without a question. Elsewhere they are named, and the script succeeds: the
# command that needs one says so again.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
log=.cache/log/deps.log

missing=
need() { # need COMMAND-OR-FILE PACKAGE
	case $1 in
	/*) [ -e "$1" ] && return ;;
	*) command -v "$1" >/dev/null 2>&1 && return ;;
	esac
	case " $missing " in
	*" $2 "*) ;;
	*) missing="${missing:+$missing }$2" ;;
	esac
}

linux=false
[ "$(uname -s)" = Linux ] && linux=true
for group in "$@"; do
	case $group in
	build)
		need gcc gcc
		$linux && need /usr/include/stdlib.h libc6-dev
		;;
	run)
		case $(uname -m) in
		aarch64 | arm64) need qemu-system-aarch64 qemu-system-arm ;;
		*) need qemu-system-x86_64 qemu-system-x86 ;;
		esac
		;;
	test)
		need fsck.erofs erofs-utils
		need mkfs.ext4 e2fsprogs
		need xz xz-utils
		need git git
		need node nodejs
		need npm npm
		need python3 python3
		need pip3 python3-pip
		;;
	lab)
		need npm npm
		need /usr/lib/x86_64-linux-gnu/libcap-ng.so.0 libcap-ng0
		need /usr/lib/x86_64-linux-gnu/libgcc_s.so.1 libgcc-s1
		;;
	*)
		echo "deps: no group named $group: use build, run, test, lab" >&2
		exit 2
		;;
	esac
done

if [ -z "$missing" ]; then
	echo "deps: nothing to install ($*)"
	exit
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "note: not found: $missing; install them, on Debian: sudo apt-get install $missing"
	exit
fi

echo "deps: installing $missing"
mkdir -p "$(dirname "$log")"
apt() {
	DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
		-o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \
		"$@" </dev/null >>"$log" 2>&1
}
# shellcheck disable=SC2086 # one word per package
install() { apt install --no-install-recommends $missing; }
: >"$log"
# The package lists of a fresh machine are empty or name files that are gone.
if ! install && ! { apt update && install; }; then
	tail -n 20 "$log" >&2
	echo "deps: apt-get could not install $missing: see $log" >&2
	exit 1
fi
