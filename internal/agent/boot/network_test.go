//go:build linux

package boot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func guestOn(network *bootspec.Interface) *bootspec.Guest {
	return &bootspec.Guest{Hostname: "box", Interface: network}
}

// What an image may have in the place of the file, and what becomes of it.
func TestResolvConf(t *testing.T) {
	t.Parallel()
	const servers = resolvHead + "the network's name servers\nnameserver 198.18.0.1\n"
	const none = resolvHead + "no name server, since there is no network\n"
	write := func(name, text string) func(string) error {
		return func(etc string) error { return os.WriteFile(filepath.Join(etc, name), []byte(text), 0o444) }
	}
	link := func(target string) func(string) error {
		return func(etc string) error { return os.Symlink(target, etc+"/resolv.conf") }
	}
	for _, c := range []struct {
		name string
		make func(etc string) error
		// with and without are the contents with and without a network; empty means
		// that there is no file to read.
		with, without string
	}{
		{"missing", func(string) error { return nil }, servers, none},
		{"the builder's", write("resolv.conf", "nameserver 10.0.0.53\n"), servers, "nameserver 10.0.0.53\n"},
		{"of an earlier boot", write("resolv.conf", servers), servers, none},
		{"link to nothing", link("../run/systemd/resolve/stub-resolv.conf"), servers, none},
		{"link to a file", func(etc string) error {
			if err := write("real", "nameserver 10.0.0.53\n")(etc); err != nil {
				return err
			}
			return link("real")(etc)
		}, servers, "nameserver 10.0.0.53\n"},
		{"link to itself", link("resolv.conf"), servers, ""},
		{"directory", func(etc string) error { return os.MkdirAll(etc+"/resolv.conf/x", 0o700) }, servers, ""},
		{"fifo", func(etc string) error { return unix.Mkfifo(etc+"/resolv.conf", 0o600) }, servers, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, network := range []*bootspec.Interface{nil, bootspec.NewInterface(1500, false)} {
				etc, want := t.TempDir(), c.without
				if network != nil {
					want = c.with
				}
				if err := c.make(etc); err != nil {
					t.Fatal(err)
				}
				if err := writeEtc(etc, guestOn(network)); err != nil {
					t.Fatal(err)
				}
				info, err := os.Stat(etc + "/resolv.conf")
				if want == "" {
					if err == nil && info.Mode().IsRegular() {
						t.Error("without a network it was replaced")
					}
					continue
				}
				if got, err := os.ReadFile(etc + "/resolv.conf"); err != nil || string(got) != want {
					t.Errorf("it is %q, %v, want %q", got, err, want)
				}
			}
			if text, err := os.ReadFile(filepath.Join(t.TempDir(), "real")); err == nil {
				t.Errorf("the link's target is %q", text)
			}
		})
	}
}

func TestHostAlias_IsOnlyWhereThePolicyOpensPorts(t *testing.T) {
	t.Parallel()
	etc := t.TempDir()
	const lines = "198.18.0.1\thost.iii.internal\nfd9c:3f1e:7a52::1\thost.iii.internal\n"
	if err := os.WriteFile(etc+"/hosts", []byte("127.0.0.1 localhost box"), 0o600); err != nil {
		t.Fatal(err)
	}
	// A durable disk boots again and again, with and without.
	for _, alias := range []bool{true, true, false, true} {
		if err := writeEtc(etc, guestOn(bootspec.NewInterface(1500, alias))); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(etc + "/hosts")
		if err != nil {
			t.Fatal(err)
		}
		if has := strings.Count(string(got), lines) == 1 && strings.Count(string(got), bootspec.HostAlias) == 2; has != alias {
			t.Errorf("alias %v: hosts is %q", alias, got)
		}
		if !strings.HasPrefix(string(got), "127.0.0.1 localhost box\n") && alias {
			t.Errorf("the image's lines are gone: %q", got)
		}
	}
}
