package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// recordVersion is the version of a record's file.
const recordVersion = 1

// maxRecord bounds a record's file, in bytes.
const maxRecord = 64 << 10

// ErrNotKept tells that no kept VM has that id, or that it has ended.
var ErrNotKept = errors.New("no such vm is kept")

// Label is what a kept VM's record says for people.
type Label struct {
	// Name need not be unique and may be empty.
	Name string
	// Image names what it was made from.
	Image string
}

// Record describes a kept VM to later processes of the same user.
type Record struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Image   string `json:"image,omitempty"`
	VMM     string `json:"vmm"`
	// CPUs and MemoryMiB are its size.
	CPUs      int `json:"cpus"`
	MemoryMiB int `json:"memory_mib"`
	// Created is when it was kept.
	Created time.Time `json:"created"`
	// IdleTimeout ends it when it gets no call for so long; 0 means never.
	IdleTimeout time.Duration `json:"idle_timeout_ns"`
	// Shim is the shim's process; its PID is 0 where there is none (tests).
	Shim proc.Identity `json:"shim"`
	// Socket is the shim's.
	Socket string `json:"socket"`
}

// Release lets a VM launched as Detached outlive this process: other processes
// of the user find it by Launcher.List and Attach until it is stopped or idle
// for its time. This process may go on to use it until Close. Killed before it
// returns, it leaves the VM either kept or ended.
func (m *Machine) Release(label Label) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.kept {
		return nil
	}
	if m.spec.Lifetime != Detached {
		return fmt.Errorf("keep vm %s: it was launched to end with this process", m.id)
	}
	select {
	case <-m.ended:
		return fmt.Errorf("keep vm %s: %w", m.id, m.endErr)
	default:
	}
	record := Record{
		Version: recordVersion, ID: m.id, Name: label.Name, Image: label.Image, VMM: m.spec.VMM,
		CPUs: m.spec.CPUs, MemoryMiB: m.spec.MemoryMiB, Created: time.Now().UTC(),
		IdleTimeout: m.spec.IdleTimeout(), Socket: m.dir.Socket,
	}
	if pid := m.process.PID(); pid != 0 {
		identity, err := proc.Identify(pid)
		if err != nil {
			return fmt.Errorf("keep vm %s: %w", m.id, err)
		}
		record.Shim = identity
	}
	body, err := json.Marshal(record)
	if err != nil {
		return err
	}
	// The record first: a VM let go without one could not be found.
	if err := renameio.WriteFile(m.dir.Record(), body, 0o600); err != nil {
		return fmt.Errorf("keep vm %s: %w", m.id, err)
	}
	if err := m.process.Release(); err != nil {
		return fmt.Errorf("keep vm %s: %w", m.id, errors.Join(err, os.Remove(m.dir.Record())))
	}
	m.kept = true
	return m.dir.lock.Close()
}

// List returns the kept VMs of this user that are alive, oldest first. It first
// removes what dead ones left.
func (l *Launcher) List(ctx context.Context) ([]Record, error) {
	l.tidy(ctx)
	entries, err := os.ReadDir(l.roots.Machines())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var kept []Record
	for _, entry := range entries {
		if !layout.ValidID(entry.Name()) {
			continue
		}
		record, err := l.record(entry.Name())
		switch {
		case err == nil:
			kept = append(kept, record)
		case !errors.Is(err, ErrNotKept):
			l.log.Warn("read the record of a kept vm", "vm_id", entry.Name(), "error", err)
		}
	}
	slices.SortFunc(kept, func(a, b Record) int { return a.Created.Compare(b.Created) })
	return kept, nil
}

// record reads the record of a kept VM that is alive; ErrNotKept otherwise.
func (l *Launcher) record(id string) (Record, error) {
	files := l.roots.Machine(id)
	body, err := readSmall(files.Record(), maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, fmt.Errorf("vm %q: %w", id, ErrNotKept)
	}
	if err != nil {
		return Record{}, err
	}
	var r Record
	if err := json.Unmarshal(body, &r); err != nil {
		return Record{}, fmt.Errorf("record of vm %q: %w", id, err)
	}
	if r.Version != recordVersion {
		return Record{}, fmt.Errorf("record of vm %q has version %d, this build reads %d: stop it with the build that made it", id, r.Version, recordVersion)
	}
	if r.ID != id {
		return Record{}, fmt.Errorf("record of vm %q is that of %q", id, r.ID)
	}
	if r.Shim.PID != 0 && !r.Shim.Alive() {
		return Record{}, fmt.Errorf("vm %q: %w", id, ErrNotKept)
	}
	r.Socket = files.Socket
	return r, nil
}

// readSmall reads a regular file of at most limit bytes.
func readSmall(path string, limit int64) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes", path, limit)
	}
	body := make([]byte, info.Size())
	n, err := file.ReadAt(body, 0)
	if int64(n) == info.Size() {
		err = nil
	}
	return body[:n], err
}
