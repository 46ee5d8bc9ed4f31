package vmtest

import (
	"os"
	"strings"
	"testing"
)

// emulatedEnv tells, when it is 1, that this host's hardware virtualization is
// emulated, as in the lab.
const emulatedEnv = "VMTEST_EMULATED"

// LostByEmulator tells whether err is a boot's whose guest ended before it printed
// anything, on a host that is emulated and may have caused that. It says so in the
// test's log: the caller boots once more, and once only.
func LostByEmulator(t testing.TB, err error) bool {
	t.Helper()
	if err == nil || os.Getenv(emulatedEnv) != "1" || !strings.Contains(err.Error(), "before its agent was there and printed nothing") {
		return false
	}
	t.Logf("a guest ended without a word in this emulated machine, the next one counts: %v", err)
	return true
}
