#!/bin/sh
# Prints the version that a build is stamped with. A commit tagged v0.2.N is
# 0.2.N; any other is 0.2.0-dev+<commit>, with .dirty after it when tracked files
# differ from the commit. A source tree without git (a tarball) is 0.2.0-dev.
set -eu
cd "$(dirname "$0")/.."

series=0.2.0-dev

# A tarball unpacked inside some other repository must not take its commit.
if ! git ls-files --error-unmatch go.mod >/dev/null 2>&1; then
	echo "$series"
	exit
fi
dirty=
git diff --quiet HEAD -- . 2>/dev/null || dirty=.dirty
if tag=$(git describe --exact-match --match 'v0.2.*' HEAD 2>/dev/null) && [ -z "$dirty" ]; then
	echo "${tag#v}"
	exit
fi
echo "$series+$(git rev-parse --short=12 HEAD)$dirty"
