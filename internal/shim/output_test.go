package shim_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func TestConsoleLogIsBoundedAndKeepsBothEnds(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	v.machine.say("first line\r\n", "")
	for range 300 {
		v.machine.say(strings.Repeat("a noisy guest\r\n", 1000), "")
	}
	v.machine.say("last line\r\n", "")
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.wait()
	log, err := os.ReadFile(filepath.Join(v.spec.Dir, "console.log"))
	if err != nil {
		t.Fatal(err)
	}
	if len(log) > 256<<10 {
		t.Errorf("it has %d bytes", len(log))
	}
	for _, want := range []string{"first line\r\n", "last line\r\n", " bytes left out ...]"} {
		if !bytes.Contains(log, []byte(want)) {
			t.Errorf("%q is missing", want)
		}
	}
	if got := len(v.console.String()); got < 4_500_000 {
		t.Errorf("the copy has %d bytes", got)
	}
}

func TestVMMLogIsBounded(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	for range 100 {
		v.machine.say("", strings.Repeat("noise\n", 1000))
	}
	v.machine.powerOff(bootspec.End{Class: bootspec.EndCrashed, Message: "crash", ExitCode: 1})
	v.expectEnd(bootspec.EndCrashed, "crash: noise")
	if got := len(v.log.String()); got > 80<<10 {
		t.Errorf("the shim log has %d bytes", got)
	}
}
