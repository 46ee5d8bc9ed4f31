# Sourced by the scripts beside it: one line per step, its output kept in a log
# that is shown when the step fails. A line of it that begins with "note: " is
# shown in any case.

mkdir -p .cache/log
steps=0

# step LABEL COMMAND ...
step() {
	label=$1
	shift
	steps=$((steps + 1))
	log=.cache/log/$(basename "$0" .sh)-$steps.log
	printf '%-48s ' "$label"
	began=$(date +%s)
	if ! "$@" >"$log" 2>&1 </dev/null; then
		echo failed
		tail -n 60 "$log" >&2
		echo "failed: $label (all of its output: $log)" >&2
		exit 1
	fi
	echo "$(($(date +%s) - began)) s"
	sed -n 's/^note: /  /p' "$log"
}
