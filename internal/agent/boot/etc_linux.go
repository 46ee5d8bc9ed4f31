package boot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// maxHosts is the most of an image's hosts file that is looked at.
const maxHosts = 1 << 20

// writeEtc completes the files of etc that belong to the guest rather than to
// the image. What an image has there stays.
func writeEtc(etc string, spec *bootspec.Guest) error {
	if err := ensureDir(etc, 0o755, true); err != nil {
		return err
	}
	return errors.Join(
		replaceFile(filepath.Join(etc, "hostname"), spec.Hostname+"\n"),
		completeHosts(filepath.Join(etc, "hosts"), spec.Hostname, spec.Interface),
		writeResolvConf(filepath.Join(etc, "resolv.conf"), spec.Interface),
	)
}

// resolvHead begins a resolv.conf of ours.
const resolvHead = "# by the guest agent: "

// writeResolvConf names the network's servers. What an image has in the file's
// place goes: it is the builder's, or a link to what no program keeps here.
// Without a network there is no server to name, but programs that open the file
// without need get along; then only a file of ours is replaced.
func writeResolvConf(path string, network *bootspec.Interface) error {
	if network == nil {
		const none = resolvHead + "no name server, since there is no network\n"
		old, err := readUpTo(path, maxHosts)
		if err == nil && bytes.HasPrefix(old, []byte(resolvHead)) || errors.Is(err, fs.ErrNotExist) {
			return replaceFile(path, none)
		}
		return nil // whatever it is, the image's programs are used to it
	}
	lines := []string{resolvHead + "the network's name servers"}
	for _, server := range network.NameServers {
		lines = append(lines, "nameserver "+server.String())
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return replaceFile(path, strings.Join(lines, "\n")+"\n")
}

// completeHosts adds localhost and the host's own name where they are missing,
// and the alias of the gateways where it is to be had; that of an earlier boot
// goes.
func completeHosts(path, hostname string, network *bootspec.Interface) error {
	old, err := readUpTo(path, maxHosts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	kept := withoutAlias(string(old))
	add := ""
	if !namesHost(old, "localhost") {
		add += "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	if !namesHost(old, hostname) {
		add += "127.0.1.1\t" + hostname + "\n"
	}
	if network != nil && network.HostAlias {
		for _, gateway := range network.Gateways {
			add += gateway.String() + "\t" + bootspec.HostAlias + "\n"
		}
	}
	if add != "" && kept != "" && !strings.HasSuffix(kept, "\n") {
		add = "\n" + add
	}
	if kept+add == string(old) {
		return nil
	}
	return replaceFile(path, kept+add)
}

// withoutAlias leaves out the lines for HostAlias.
func withoutAlias(hosts string) string {
	var kept strings.Builder
	for line := range strings.Lines(hosts) {
		if !strings.HasSuffix(strings.TrimSpace(line), "\t"+bootspec.HostAlias) {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

func namesHost(hosts []byte, name string) bool {
	for line := range bytes.Lines(hosts) {
		text, _, _ := strings.Cut(string(line), "#")
		if fields := strings.Fields(text); len(fields) > 1 && slices.Contains(fields[1:], name) {
			return true
		}
	}
	return false
}

func readUpTo(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is left alone: it is no file of at most %d bytes", path, limit)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	return io.ReadAll(io.LimitReader(f, limit))
}

// replaceFile writes a file of mode 0644; a link that leads nowhere gives way,
// another is followed.
func replaceFile(path, content string) error {
	err := os.WriteFile(path, []byte(content), 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Remove(path); err != nil {
			return err
		}
		err = os.WriteFile(path, []byte(content), 0o644)
	}
	return err
}
