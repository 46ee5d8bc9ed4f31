#!/bin/sh
# Makes the Go code of api/proto, or checks that the committed one is the same.
#
# usage: generate.sh [--check]
set -eu
cd "$(dirname "$0")/.."
sh build/tools.sh buf protoc-gen-go protoc-gen-go-grpc
PATH=$PWD/.tools/bin:$PATH

mkdir -p .cache
new=$(mktemp -d .cache/generate.XXXXXX)
trap 'rm -rf "$new"' EXIT
# buf.gen.yaml puts its output two directories up, at the top of the tree.
(cd api/proto && buf generate --output "../../$new/api/proto")

if [ "${1:-}" = --check ]; then
	if ! diff -r --exclude=proto "$new/api" api; then
		echo "generated code differs: run \`make generate\` and commit api/" >&2
		exit 1
	fi
	exit
fi
for dir in "$new"/api/*/; do
	name=$(basename "$dir")
	rm -rf "api/$name"
	mv "$dir" "api/$name"
done
