package vmtest_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func TestMain(m *testing.M) {
	vmtest.PlayClient()
	goleak.VerifyTestMain(m)
}
