//go:build linux

package procs_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// helperEnv makes the test binary run one of the programs of helpers instead of
// the tests: some must be PID 1 of their own pid namespace.
const helperEnv = "PROCS_TEST_HELPER"

func TestMain(m *testing.M) {
	switch name := os.Getenv(helperEnv); name {
	case "":
		goleak.VerifyTestMain(m)
	case "reap-all":
		os.Exit(reapAllMain())
	default:
		fmt.Fprintf(os.Stderr, "no helper %q\n", name)
		os.Exit(2)
	}
}
