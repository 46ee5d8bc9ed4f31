#!/bin/sh
# Makes what is generated and committed, or checks that it is up to date:
#
#   api/*/v1                    from api/proto, by buf
#   internal/vmassets/upper     templates of writable disks, by mke2fs
#   docs/functions.md errors.md from the schemas and the table of codes
#
# usage: generate.sh [--check]
set -eu
cd "$(dirname "$0")/.."
: "${GO:=go}"
sh build/tools.sh buf protoc-gen-go protoc-gen-go-grpc
PATH=$PWD/.tools/bin:$PATH:/usr/sbin:/sbin

mkdir -p .cache
new=$(mktemp -d .cache/generate.XXXXXX)
trap 'rm -rf "$new"' EXIT
# buf.gen.yaml puts its output two directories up, at the top of the tree.
(cd api/proto && buf generate --output "../../$new/api/proto")

# Other versions of mke2fs lay out a file system in other ways, all of them good.
templates=internal/vmassets/upper
mke2fs=$(mke2fs -V 2>&1 | awk 'NR == 1 { print $2 }') || mke2fs=none
case $mke2fs in
1.47.*)
	mkdir -p "$new/upper"
	"$GO" run ./build/upper -dir "$new/upper"
	;;
*)
	echo "generate: $templates left alone: it is made by mke2fs 1.47, here is ${mke2fs:-none}"
	;;
esac

mkdir -p "$new/docs"
"$GO" run ./build/docs -dir "$new/docs"

if [ "${1:-}" = --check ]; then
	stale=false
	for page in "$new"/docs/*; do
		diff "$page" "docs/$(basename "$page")" || stale=true
	done
	diff -r --exclude=proto "$new/api" api || stale=true
	[ ! -d "$new/upper" ] || diff -r "$new/upper" "$templates" || stale=true
	if $stale; then
		echo "generate: committed files differ: run \`make generate\` and commit them" >&2
		exit 1
	fi
	exit
fi
for dir in "$new"/api/*/; do
	name=$(basename "$dir")
	# The directory that buf was pointed at is no output.
	[ "$name" != proto ] || continue
	rm -rf "api/$name"
	mv "$dir" "api/$name"
done
[ ! -d "$new/upper" ] || cp "$new"/upper/* "$templates/"
cp "$new"/docs/* docs/
