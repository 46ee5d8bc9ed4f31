//go:build !cgo || !(linux || darwin)

package main

import (
	"errors"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// openLibkrun needs cgo.
func openLibkrun(*bootspec.Spec) (libkrun.VM, error) {
	return nil, errors.New("this krun-shim was built without cgo and cannot load libkrun: build it with CGO_ENABLED=1")
}
