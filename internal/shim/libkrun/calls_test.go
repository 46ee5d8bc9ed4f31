package libkrun_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

//nolint:gochecknoglobals // read-only: how the testing package has flags
var update = flag.Bool("update", false, "write the golden files")

func spec() *bootspec.Spec {
	return &bootspec.Spec{
		Version: bootspec.Version, ID: "vm-1", VMM: bootspec.Libkrun, Lifetime: bootspec.Tied,
		Dir: "/state/vm-1", Socket: "/run/vm-1.sock", CPUs: 2, MemoryMiB: 512,
		Lower:   bootspec.Disk{Path: "/images/lower.erofs", ReadOnly: true},
		Upper:   bootspec.Disk{Path: "/state/vm-1/upper.ext4"},
		Libkrun: &bootspec.LibkrunSpec{Library: "/lib/libkrun.so.1", Firmware: "/lib/libkrunfw.so.5", Root: "/state/vm-1/root"},
		Guest:   bootspec.Guest{Token: "do-not-show", Hostname: "box", Env: []string{"SECRET=swordfish", "A=caf\u00e9\n\""}},
	}
}

func variants() map[string]func(*bootspec.Spec) {
	return map[string]func(*bootspec.Spec){
		"ephemeral": func(*bootspec.Spec) {},
		"confined":  func(*bootspec.Spec) {},
		"durable":   func(s *bootspec.Spec) { s.Upper.Durable, s.Upper.Path = true, "/volumes/a.ext4" },
		"network":   func(s *bootspec.Spec) { s.Guest.Interface = bootspec.NewInterface(1500, false) },
		"nested":    func(s *bootspec.Spec) { s.Libkrun.Nested = true },
		"single":    func(s *bootspec.Spec) { s.CPUs = 1 },
		"large":     func(s *bootspec.Spec) { s.CPUs, s.MemoryMiB = 16, 65536 },
	}
}

// The whole sequence, one call a line.
func TestCalls(t *testing.T) {
	t.Parallel()
	for name, change := range variants() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := spec()
			change(s)
			var confined *libkrun.Ruleset
			if name == "confined" {
				confined = &libkrun.Ruleset{Flags: 1}
			}
			got := libkrun.Calls(s, confined).String()
			path := filepath.Join("testdata", name+".calls")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if runtime.GOARCH != "amd64" {
				want = bytes.ReplaceAll(want, []byte(` "noreplace-smp"`), nil)
			}
			if got != string(want) {
				t.Errorf("the calls are\n%s\nwant (go test -update writes it)\n%s", got, want)
			}
			if strings.Contains(got, "swordfish") || strings.Contains(got, "do-not-show") || strings.Contains(got, "caf") {
				t.Error("the calls have secrets, or what libkrun aborts on")
			}
		})
	}
}
