// Package imagestore keeps container images as read-only EROFS files, the lowers
// of VMs, one per manifest digest.
//
// A [Store] is a directory that any number of processes may use at once:
//
//	images/sha256-<hex>/lower.erofs   the file system, never changed once it is there
//	images/sha256-<hex>/image.json    what it was made from; its mtime is the last use
//	images/sha256-<hex>/pins/         one file per pin
//	refs/<hash>.json                  the digest that a reference stood for when pulled
//	locks/                            flocked while a reference or digest is being pulled
//	tmp/                              one flocked directory per writer
//
// Things appear by rename alone, whole or not at all. Every lock is a flock, which
// the kernel frees with its process, so kill -9 leaves nothing but a directory in
// tmp, which the next [Open] or [Store.GC] of any process finds unlocked and removes.
//
// A lower is in use while anyone holds a shared flock on it: an [Image] that is not
// closed, or the shim of a VM. Only who gets the exclusive lock may remove it.
//
// # References
//
//	python, ghcr.io/acme/app:1, ghcr.io/acme/app@sha256:...   registries, as docker reads names
//	oci:<dir>[:tag]            a directory in OCI image layout
//	docker-archive:<tar>[:name]   a file as "docker save" writes it
//	sha256:<hex>               an image of this store, by manifest digest
//
// A docker archive has no manifest; its digest is that of the OCI manifest it would
// have with its layers uncompressed.
//
// Everything is verified: manifests, configs and blobs against their digests, the
// uncompressed layers against the config's diff IDs. Layers may be gzip, zstd
// or plain, whatever their media type says. sha256 is the only digest algorithm.
package imagestore

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// Limits bound what one image may have unpacked; zero fields mean the defaults,
// 10 GiB in all, 5 GiB a file, 1,000,000 entries.
type Limits = erofs.Limits

// Options of [Open]. The zero value is good.
type Options struct {
	// Log gets what was pulled, collected and left out. Nil discards it.
	Log *slog.Logger
	// LayoutDir has OCI layouts named like catalog images. Ensure and Pull look
	// there before any registry. "" is none.
	LayoutDir string
	// Arch is the processor of the images, in Go's words: runtime.GOARCH.
	Arch string
	// Limits of one image.
	Limits Limits
	// InsecureRegistries may be talked to over http, "host" or "host:port" each.
	// Loopback always may, everything else never.
	InsecureRegistries []string
	// Keychain finds credentials: those of docker's config file and its
	// credential helpers, and none where it has none.
	Keychain authn.Keychain
	// RetryWaits are the pauses before further tries of a request to a registry:
	// 1 s and 3 s. Empty but not nil means a single try.
	RetryWaits []time.Duration
	// StallTimeout ends a transfer in which nothing has come for so long: 60 s.
	StallTimeout time.Duration
}

// Store is an image store. Its methods may be called concurrently, from any
// number of stores and processes on the same directory. It needs no closing.
type Store struct {
	dir  string
	opts Options
}

// Open makes dir, which is to be the user's own, where it is missing, and removes
// what killed processes left. The error says what is wrong with dir.
func Open(dir string, opts Options) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("image store %q: %w", dir, err)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Arch == "" {
		opts.Arch = runtime.GOARCH
	}
	if opts.Keychain == nil {
		opts.Keychain = authn.DefaultKeychain
	}
	if opts.RetryWaits == nil {
		opts.RetryWaits = []time.Duration{time.Second, 3 * time.Second}
	}
	if opts.StallTimeout == 0 {
		opts.StallTimeout = time.Minute
	}
	s := &Store{dir: dir, opts: opts}
	for _, d := range []string{dir, s.imagesDir(), s.refsDir(), s.locksDir(), s.tmpDir()} {
		if err := layout.MakePrivate(d); err != nil {
			return nil, fmt.Errorf("image store: %w", s.named(err, 0))
		}
	}
	if _, err := s.collectLeftovers(); err != nil {
		return nil, fmt.Errorf("image store: remove leftovers: %w", err)
	}
	return s, nil
}

func (s *Store) imagesDir() string { return filepath.Join(s.dir, "images") }
func (s *Store) refsDir() string   { return filepath.Join(s.dir, "refs") }
func (s *Store) locksDir() string  { return filepath.Join(s.dir, "locks") }
func (s *Store) tmpDir() string    { return filepath.Join(s.dir, "tmp") }

func (s *Store) imageDir(digest v1.Hash) string {
	return filepath.Join(s.imagesDir(), digest.Algorithm+"-"+digest.Hex)
}

// Names in an image's directory.
const (
	fileLower  = "lower.erofs"
	fileRecord = "image.json"
	dirPins    = "pins"
)

// syncDir makes the names in dir survive a power cut.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}
