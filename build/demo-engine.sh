#!/bin/sh
# The adapter as iii uses it: an engine, the adapter as its worker, and one call
# from the command line. Nothing of it is left running, however it ends.
set -eu
cd "$(dirname "$0")/.."
. build/step.sh
: "${GO:=go}" "${MAKE:=make}"
# Only what is here decides which worker the adapter is.
unset III_CONFIG_NAME III_ISOLATION III_NAMESPACE III_WORKER_NAME

engine=.cache/demo-engine/engine
engine_out=.cache/log/demo-engine.engine.out
adapter_log=.cache/log/demo-engine.adapter.log
call_out=.cache/log/demo-engine.call.out
engine_pid= adapter_pid= call_pid=

# The adapter before its engine: then it can take its leave.
end() {
	trap '' INT TERM HUP
	for pid in $call_pid $adapter_pid $engine_pid; do
		kill "$pid" 2>/dev/null || :
		wait "$pid" || :
	done
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

start_engine() {
	: >"$engine_out" # without the line of an engine before
	"$engine" --port 0 >"$engine_out" &
	engine_pid=$!
	for _ in $(seq 100); do
		url=$(sed -n 's/^listening on //p' "$engine_out")
		[ -z "$url" ] || return 0
		sleep 0.1
	done
	echo 'the engine does not say where it listens' >&2
	return 1
}

start_adapter() {
	III_URL=$url bin/adapter serve >"$adapter_log" 2>&1 &
	adapter_pid=$!
	for _ in $(seq 100); do
		if "$engine" trigger sandbox-libkrun::adapter::info --address 127.0.0.1 --port "${url##*:}" --timeout-ms 5000; then
			return
		fi
		sleep 0.2
	done
	cat "$adapter_log"
	return 1
}

step 'system packages' sh build/deps.sh build run
step 'build adapter, krun-shim, guest-agent' "$MAKE" build
step 'build the engine for development' "$GO" build -o "$engine" ./test/cmd/engine
step 'kernel and initramfs of the VM' bin/adapter vmm setup
step 'image python, from Debian packages' "$GO" run ./build/images --if-missing python
step 'engine' start_engine
step 'adapter serve' start_adapter

echo "engine trigger sandbox-libkrun::run image=python lang=python 'code=print(6*7)'"
# In the background, since a shell heeds signals while it waits, and only then.
"$engine" trigger sandbox-libkrun::run image=python lang=python 'code=print(6*7)' \
	--address 127.0.0.1 --port "${url##*:}" --timeout-ms 300000 >"$call_out" &
call_pid=$!
if ! wait $call_pid; then
	call_pid=
	echo "failed; the adapter's log:" >&2
	tail -n 20 "$adapter_log" >&2
	exit 1
fi
call_pid=
result=$(sed -n 's/^  "stdout": "\(.*\)\\n",*$/\1/p' "$call_out")
if [ "$result" != 42 ]; then
	echo 'failed: the reply should have 42 on stdout:' >&2
	cat "$call_out" >&2
	exit 1
fi
echo "$result"
