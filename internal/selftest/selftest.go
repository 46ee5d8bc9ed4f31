// Package selftest finds out whether a VM boots on this host and whether its link
// carries what sandboxes need, with no image but an empty one.
package selftest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Size is what is streamed each way, in bytes: four times what a link of vsock
// carries before it stands still where its buffers are too small (libkrun #772).
const Size = 1 << 20

// memoryMiB is the least that guests of every VMM boot in.
const memoryMiB = 128

// Result is how long the parts took.
type Result struct {
	// Boot is from the request for a VM to its agent's answer.
	Boot time.Duration
	// In and Out are for Size bytes into the guest and out of it.
	In, Out time.Duration
}

// imageName is the image that is booted.
const imageName = "selftest.erofs"

// Run boots a VM, writes a file into it, reads it back, compares the two, and ends
// the VM. It takes seconds, also where the guest stands still before ctx ends. The
// VM's image, of a few KiB, stays in dir, which is made: the spec that is kept of a
// failed boot names it. The error of a VM has the ends of its logs.
func Run(ctx context.Context, launcher *vm.Launcher, dir string) (r Result, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	lower := filepath.Join(dir, imageName)
	if err := emptyImage(lower); err != nil {
		return r, fmt.Errorf("make an empty image: %w", err)
	}
	began := time.Now()
	machine, err := launcher.Launch(ctx, vm.Request{MemoryMiB: memoryMiB, Lower: lower})
	if err != nil {
		return r, err
	}
	undo.Add(machine.Kill)
	r.Boot = time.Since(began)
	if r.In, r.Out, err = stream(ctx, machine.Guest()); err != nil {
		return r, fmt.Errorf("stream %d bytes: %w", Size, err)
	}
	return r, nil
}

// emptyImage writes an EROFS of a root directory, whole or not at all.
func emptyImage(path string) (err error) {
	if err := layout.MakePrivate(filepath.Dir(path)); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), "selftest-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var files [2]*os.File
	for i, name := range []string{"image", "side"} {
		if files[i], err = os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, files[i].Close()) }()
	}
	if _, err := erofs.NewBuilder(files[0], files[1], erofs.Limits{}).Finish(); err != nil {
		return err
	}
	return os.Rename(files[0].Name(), path)
}

func stream(ctx context.Context, client *guest.Client) (in, out time.Duration, err error) {
	sent := make([]byte, Size)
	_, _ = rand.Read(sent) // never fails
	path := fmt.Sprintf("/tmp/selftest-%x", sent[:8])
	began := time.Now()
	if _, err := client.WriteFile(ctx, path, guest.WriteOptions{Mode: 0o600}, bytes.NewReader(sent)); err != nil {
		return 0, 0, fmt.Errorf("into the guest: %w", err)
	}
	in = time.Since(began)
	defer func() { err = errors.Join(err, client.Remove(ctx, path, false)) }()
	began = time.Now()
	file, err := client.OpenFile(ctx, path)
	if err != nil {
		return 0, 0, fmt.Errorf("out of the guest: %w", err)
	}
	defer func() { _ = file.Close() }() // it never fails
	got, err := io.ReadAll(io.LimitReader(file, Size+1))
	if err != nil {
		return 0, 0, fmt.Errorf("out of the guest: %w", err)
	}
	if !bytes.Equal(got, sent) {
		return 0, 0, errors.New("out of the guest came other bytes than went in")
	}
	return in, time.Since(began), nil
}
