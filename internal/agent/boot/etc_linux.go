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
)

// maxHosts is the most of an image's hosts file that is looked at.
const maxHosts = 1 << 20

// writeEtc completes the files of etc that belong to the guest rather than to
// the image. What an image has there stays.
func writeEtc(etc, hostname string) error {
	if err := ensureDir(etc, 0o755, true); err != nil {
		return err
	}
	return errors.Join(
		replaceFile(filepath.Join(etc, "hostname"), hostname+"\n"),
		completeHosts(filepath.Join(etc, "hosts"), hostname),
		// Without a network there is no server to name, but programs that open
		// the file without need get along.
		ensureFile(filepath.Join(etc, "resolv.conf"), "# no name server: this guest has no network\n"),
	)
}

// completeHosts adds localhost and the host's own name where they are missing.
func completeHosts(path, hostname string) error {
	old, err := readUpTo(path, maxHosts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	add := ""
	if !namesHost(old, "localhost") {
		add += "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	if !namesHost(old, hostname) {
		add += "127.0.1.1\t" + hostname + "\n"
	}
	if add == "" {
		return nil
	}
	if len(old) > 0 && old[len(old)-1] != '\n' {
		add = "\n" + add
	}
	return replaceFile(path, string(old)+add)
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

// ensureFile writes content to path unless there is something to read.
func ensureFile(path, content string) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return replaceFile(path, content)
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
