//go:build cgo && (linux || darwin)

package main

import (
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// openLibkrun loads libkrun and begins a VM. Its log goes to standard error.
func openLibkrun(spec *bootspec.Spec) (libkrun.VM, error) {
	k := spec.Libkrun
	lib, err := krun.Open(k.Library, k.Firmware)
	if err != nil {
		return nil, err
	}
	if err := lib.InitLog(2, krun.LogWarn); err != nil {
		return nil, err
	}
	if !lib.Has(krun.FeatureBlk) {
		return nil, fmt.Errorf("%s was built without disks (BLK=1): install another build, or name one with III_LIBKRUN_PATH", k.Library)
	}
	if spec.Guest.Interface != nil && !lib.Has(krun.FeatureNet) {
		return nil, fmt.Errorf("%s was built without network devices (NET=1): install another build, name one with III_LIBKRUN_PATH, or take --vmm qemu", k.Library)
	}
	return lib.NewContext()
}
