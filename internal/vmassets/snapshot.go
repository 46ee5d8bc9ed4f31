package vmassets

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	snapshotDir = "snapshots"
	snapshotExt = ".state"
	failedExt   = ".failed"
	// snapshotFormat changes whenever the same inputs give another snapshot.
	snapshotFormat = "1"
	// keepSnapshots is how many stay even when they are old; each has some 60 MB
	// or more, and is of one size of VM.
	keepSnapshots = 4
	// keepSnapshot is how long one stays after its last use at least: a VM has
	// read it within seconds.
	keepSnapshot = 5 * time.Minute
	// retrySnapshot is how long a failed attempt is not repeated.
	retrySnapshot = time.Minute
)

// ErrNoSnapshot tells that making this snapshot failed a short time ago.
var ErrNoSnapshot = errors.New("no snapshot of this machine can be made at the moment")

// SnapshotInputs are all that the content of a snapshot depends on.
type SnapshotInputs struct {
	// Files are programs and data that must be as they were, byte by byte: the
	// emulator, the program that runs it, the kernel. They are not read: Go programs
	// tell by their build ID, others by what the system says of the file.
	Files []string
	// Contents are small files that must say the same, whatever their age.
	Contents []string
	// Machine describes the rest, such as the number of CPUs.
	Machine string
}

// Snapshot returns the path of the saved guest that was made with these inputs
// below root, the VMM directory. The first call has it made: save writes it to
// the file, which it does not close; others wait meanwhile, in this process and
// in others. The file stays for at least five minutes after the latest call that
// returned it. After a failure, and for a minute, the error is
// ErrNoSnapshot.
func Snapshot(ctx context.Context, root string, in SnapshotInputs, save func(context.Context, *os.File) error) (string, error) {
	path, err := snapshot(ctx, root, in, save)
	if err != nil {
		return "", fmt.Errorf("snapshot: %w", err)
	}
	return path, nil
}

func snapshot(ctx context.Context, root string, in SnapshotInputs, save func(context.Context, *os.File) error) (string, error) {
	name, err := in.name()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, snapshotDir)
	path, failed := filepath.Join(dir, name+snapshotExt), filepath.Join(dir, name+failedExt)
	if use(path) {
		return path, nil
	}
	if recent(failed, retrySnapshot) {
		return "", ErrNoSnapshot
	}
	lock, err := lockDir(ctx, dir, nil)
	if err != nil {
		return "", err
	}
	defer lock.Close() //nolint:errcheck // only a lock
	if use(path) {
		return path, nil
	}
	if recent(failed, retrySnapshot) {
		return "", ErrNoSnapshot
	}
	// Durable: a snapshot that a crash of the host cut short would not be noticed.
	err = writeFile(dir, name+snapshotExt, true, func(f *os.File) error { return save(ctx, f) })
	if err != nil {
		if ctx.Err() == nil {
			err = errors.Join(err, writeFile(dir, name+failedExt, false, func(*os.File) error { return nil }))
		}
		return "", err
	}
	return path, pruneSnapshots(dir, time.Now())
}

// name is the same for inputs that make the same snapshot.
func (in SnapshotInputs) name() (string, error) {
	parts := []string{snapshotFormat, in.Machine}
	for _, file := range in.Files {
		info, err := os.Stat(file)
		if err != nil {
			return "", err
		}
		parts = append(parts, file, identity(file, info))
	}
	for _, file := range in.Contents {
		content, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		parts = append(parts, file, strconv.Quote(string(content)))
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	return hex.EncodeToString(sum[:16]), nil
}

// recent tells whether the file was written less than limit ago. One of the
// future was not: the clock has been set back since, nobody knows how far.
func recent(path string, limit time.Duration) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	age := time.Since(info.ModTime())
	return age >= 0 && age < limit
}

// pruneSnapshots removes what nobody has used for a while: a VM has read its
// snapshot long before. The caller holds the lock.
func pruneSnapshots(dir string, now time.Time) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type file struct {
		path string
		used time.Time
	}
	var snapshots []file
	var errs []error
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		path := filepath.Join(dir, e.Name())
		switch {
		case filepath.Ext(path) == snapshotExt:
			snapshots = append(snapshots, file{path, info.ModTime()})
		case filepath.Ext(path) == failedExt && !recent(path, retrySnapshot):
			errs = append(errs, os.RemoveAll(path))
		}
	}
	slices.SortFunc(snapshots, func(a, b file) int { return b.used.Compare(a.used) })
	for i, s := range snapshots {
		if i >= keepSnapshots && now.Sub(s.used) > keepSnapshot {
			errs = append(errs, os.RemoveAll(s.path))
		}
	}
	return errors.Join(errs...)
}
