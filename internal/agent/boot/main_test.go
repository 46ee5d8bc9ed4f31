//go:build linux

package boot

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// helperEnv makes the test binary run a part that changes its whole process.
const helperEnv = "BOOT_TEST_HELPER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		if err := enterStrangeImage(dir); err != nil {
			fmt.Println("FAIL", err)
			os.Exit(1)
		}
		fmt.Println("PASS")
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}
