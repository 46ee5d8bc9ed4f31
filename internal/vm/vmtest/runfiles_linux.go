package vmtest

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// LockRunFiles makes a test the only one of this host, those of other packages
// included, that runs code in fakes until it ends: the contract's run writes the
// code to /tmp/run.*, and a fake has no /tmp of its own.
func LockRunFiles(t testing.TB) {
	t.Helper()
	file, err := os.OpenFile(os.TempDir()+"/vmtest-run.lock", os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
}
