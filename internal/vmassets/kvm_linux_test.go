package vmassets_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func TestHardwareVirtualizationNeedsDeviceAndProcessor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	device, with, without := filepath.Join(dir, "kvm"), filepath.Join(dir, "with"), filepath.Join(dir, "without")
	writeFile(t, device, nil, 0o600)
	writeFile(t, with, []byte("flags\t: fpu vmx tsc\n"), 0o600)
	writeFile(t, without, []byte("flags\t: fpu vmxless tsc\nvmx flags : svm\n"), 0o600)
	for name, c := range map[string]struct{ device, cpuinfo, arch, want string }{
		"all there":         {device, with, "amd64", ""},
		"not loaded":        {device + "x", with, "amd64", "not loaded: "},
		"names the module":  {device + "x", with, "amd64", "modprobe kvm_intel"},
		"nothing at all":    {device + "x", without, "amd64", "shows neither vmx nor svm, and "},
		"container on arm":  {device + "x", without, "arm64", "is missing: turn"},
		"no processor":      {device, without, "amd64", "nested"},
		"no use in opening": {dir, without, "amd64", "nested"},
		"no flag on arm64":  {device, without, "arm64", ""},
		"no file to open":   {dir, with, "amd64", "open"},
	} {
		err := vmassets.KVMUsable(c.device, c.cpuinfo, c.arch)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, without %q", name, err, c.want)
		}
	}
}
