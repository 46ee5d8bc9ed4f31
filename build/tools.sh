#!/bin/sh
# Builds development tools at the versions that tools/go.mod pins, into
# .tools/bin, unless they are there already.
#
# usage: tools.sh NAME ...
set -eu
cd "$(dirname "$0")/.."
: "${GO:=go}"

# A tool is as its go.sum and its compiler are: golangci-lint, for one, refuses
# code that is newer than the Go it was built with.
key=$({ cat tools/go.sum && "$GO" version; } | cksum | tr -cd '0-9')
mkdir -p .tools/bin .tools/stamp

for name in "$@"; do
	stamp=.tools/stamp/$name-$key
	[ -e "$stamp" ] && [ -x ".tools/bin/$name" ] && continue
	package=$(awk -v name="$name" '/^tool \(/ { on = 1 } on && $1 ~ "/" name "$" { print $1 } /^\)/ { on = 0 }' tools/go.mod)
	if [ -z "$package" ]; then
		echo "tools: $name is not a tool of tools/go.mod" >&2
		exit 2
	fi
	echo "tools: building $name"
	new=.tools/$name.$$
	trap 'rm -f "$new"' EXIT
	(cd tools && CGO_ENABLED=0 "$GO" build -trimpath -ldflags '-s -w' -o "../$new" "$package")
	mv "$new" ".tools/bin/$name"
	rm -f ".tools/stamp/$name-"*
	: >"$stamp"
done
