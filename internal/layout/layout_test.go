package layout_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

func TestFromEnvironment(t *testing.T) {
	t.Parallel()
	runByUser := "/tmp/iii-sandbox-" + strconv.Itoa(os.Getuid())
	for _, tt := range []struct {
		name string
		env  map[string]string
		want layout.Roots
	}{
		{"home alone", map[string]string{"HOME": "/h"}, layout.Roots{
			Cache: "/h/.cache/iii-sandbox", Data: "/h/.local/share/iii-sandbox", State: "/h/.local/state/iii-sandbox", Run: runByUser,
		}},
		{"xdg", map[string]string{
			"XDG_CACHE_HOME": "/c", "XDG_DATA_HOME": "/d", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r",
		}, layout.Roots{Cache: "/c/iii-sandbox", Data: "/d/iii-sandbox", State: "/s/iii-sandbox", Run: "/r/iii-sandbox"}},
		{"relative xdg does not count", map[string]string{
			"HOME": "/h", "XDG_CACHE_HOME": "c", "XDG_RUNTIME_DIR": "r",
		}, layout.Roots{Cache: "/h/.cache/iii-sandbox", Data: "/h/.local/share/iii-sandbox", State: "/h/.local/state/iii-sandbox", Run: runByUser}},
		{"ours come first and are taken as they are", map[string]string{
			"HOME": "/h", "XDG_CACHE_HOME": "/c", "III_SANDBOX_CACHE_DIR": "/1", "III_SANDBOX_DATA_DIR": "/2",
			"III_SANDBOX_STATE_DIR": "/3/../4", "III_SANDBOX_RUN_DIR": "/5/",
		}, layout.Roots{Cache: "/1", Data: "/2", State: "/4", Run: "/5"}},
	} {
		got, err := layout.FromEnvironment(func(key string) string { return tt.env[key] })
		if err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v; want %+v", tt.name, got, err, tt.want)
		}
	}
}

func TestFromEnvironmentWithoutHome(t *testing.T) {
	t.Parallel()
	_, err := layout.FromEnvironment(func(string) string { return "" })
	if err == nil {
		t.Fatal("no error")
	}
	for _, name := range []string{"III_SANDBOX_CACHE_DIR", "III_SANDBOX_DATA_DIR", "III_SANDBOX_STATE_DIR"} {
		if !strings.Contains(err.Error(), "set "+name) {
			t.Errorf("the error does not name %s: %v", name, err)
		}
	}
}

func TestRelativeOverridesBecomeAbsolute(t *testing.T) {
	t.Parallel()
	got, err := layout.FromEnvironment(func(key string) string {
		if strings.HasPrefix(key, "III_") {
			return "x"
		}
		return ""
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{got.Cache, got.Data, got.State, got.Run} {
		if !filepath.IsAbs(root) {
			t.Errorf("%q is relative", root)
		}
	}
}

func TestValidID(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"a", "0", "vm-1", "a-", strings.Repeat("z", 64)} {
		if !layout.ValidID(id) {
			t.Errorf("%q is refused", id)
		}
	}
	for _, id := range []string{"", "-a", "A", "a/b", "..", ".", "a.b", "a_b", "a\x00", "ä", strings.Repeat("z", 65)} {
		if layout.ValidID(id) {
			t.Errorf("%q is accepted", id)
		}
	}
}

// No two files of a VM, nor of two VMs, share a name.
func TestNamesAreDistinct(t *testing.T) {
	t.Parallel()
	roots := layout.Roots{Cache: "/c", Data: "/d", State: "/s", Run: "/r"}
	seen := map[string]bool{}
	for _, id := range []string{"a", "b"} {
		m := roots.Machine(id)
		for _, path := range []string{m.Socket, m.Lock(), m.Spec(), m.Upper(), m.Console(), m.ShimLog(), m.End(), m.Record(), roots.FailedSpec(id)} {
			if seen[path] || !filepath.IsAbs(path) {
				t.Errorf("%q is not a name of its own", path)
			}
			seen[path] = true
		}
		if filepath.Dir(m.Dir) != roots.Machines() || filepath.Dir(m.Socket) != roots.Run {
			t.Errorf("machine %+v is elsewhere", m)
		}
	}
	for _, path := range []string{roots.Images(), roots.VMM(), roots.ImageLayouts(), roots.Machines(), roots.MachinesLock(), roots.BootSlot(0), roots.BootSlot(1)} {
		if seen[path] {
			t.Errorf("%q is not a name of its own", path)
		}
		seen[path] = true
	}
}

func TestCheckSocket(t *testing.T) {
	t.Parallel()
	fits := layout.Machine{Socket: "/" + strings.Repeat("x", layout.MaxSocketPath-1)}
	if err := fits.CheckSocket(); err != nil {
		t.Error(err)
	}
	fits.Socket += "x"
	if err := fits.CheckSocket(); err == nil || !strings.Contains(err.Error(), "III_SANDBOX_RUN_DIR") {
		t.Errorf("error is %v", err)
	}
}

func TestMakePrivate(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	dir := filepath.Join(base, "a", "b")
	for range 2 {
		if err := layout.MakePrivate(dir); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{dir, filepath.Dir(dir)} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	// Readable by others is the owner's choice.
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := layout.MakePrivate(dir); err != nil {
		t.Error(err)
	}
}

func TestMakePrivateRefuses(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	private := filepath.Join(base, "private")
	if err := os.Mkdir(private, 0o700); err != nil {
		t.Fatal(err)
	}
	shared := filepath.Join(base, "shared")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shared, 0o770); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(private, link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		shared:                     "chmod 700",
		link:                       "not a directory",
		file:                       "not a directory",
		filepath.Join(file, "sub"): "not a directory",
	} {
		if err := layout.MakePrivate(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", path, err, want)
		}
	}
}

func TestMakePrivateRefusesTheDirectoryOfAnotherUser(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Chown(dir, 12345, -1); err != nil {
		t.Skipf("only root can give a directory away: %v", err)
	}
	if err := layout.MakePrivate(dir); err == nil || !strings.Contains(err.Error(), "belongs to user 12345") {
		t.Errorf("error is %v", err)
	}
}
