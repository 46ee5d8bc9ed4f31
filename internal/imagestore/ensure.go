package imagestore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

// EnsureOptions of [Store.Ensure] and [Store.Pull].
type EnsureOptions struct {
	// Name is the image's catalog name. If Options.LayoutDir has a layout of that
	// name, the image comes from there and the reference is not looked at.
	Name string
	// PullMissing allows to ask a registry for an image that is not in the store.
	// Local sources need no leave. Pull does not look at it.
	PullMissing bool
	// Progress is told how far things are, a few times a second, by one
	// goroutine at a time. It must not block. It is not called for an image
	// that is there already.
	Progress func(Progress)
}

// Ensure returns the image that ref names. A registry's image that the store has is
// returned as it was last pulled, without any network; otherwise it is pulled, if
// the options allow it. Local sources are looked at each time, so a changed layout
// is a new image. Callers that ask for the same image at the same time, in other
// processes too, wait for the one that works, or take over from it when it fails.
//
// The caller closes the image. On error nothing of it is left in the store. Errors,
// wrapped or not: [ErrNotCached], [ReferenceError], [PlatformError], [LimitError],
// [EntryError], [DigestError], [LayoutError], [RegistryError], [CredentialsError],
// [InsecureError], [NoSpaceError], the cause of ctx's end, or the file system's.
func (s *Store) Ensure(ctx context.Context, ref string, opts EnsureOptions) (*Image, error) {
	return s.get(ctx, ref, opts, false)
}

// Pull is [Store.Ensure], but asks the source what the reference stands for now. An
// older image that it stood for stays until it is collected.
func (s *Store) Pull(ctx context.Context, ref string, opts EnsureOptions) (*Image, error) {
	opts.PullMissing = true
	return s.get(ctx, ref, opts, true)
}

func (s *Store) get(ctx context.Context, ref string, opts EnsureOptions, fresh bool) (*Image, error) {
	src, err := s.source(ref, opts.Name)
	if err != nil {
		return nil, err
	}
	if src.inStore || !fresh && !src.local {
		image, err := s.cached(ctx, src)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return image, err
		}
		if src.inStore || !opts.PullMissing {
			return nil, &NotCachedError{Ref: src.ref}
		}
	}
	track := &tracker{report: opts.Progress, now: Progress{Ref: ref, Phase: PhaseResolve}}
	if src.local {
		return s.getLocal(ctx, src, track)
	}
	return s.getRemote(ctx, src, track, fresh)
}

// cached returns what the store has for src; fs.ErrNotExist if nothing.
func (s *Store) cached(ctx context.Context, src source) (*Image, error) {
	digest := src.digest
	var rec refRecord
	if err := readJSON(s.refFile(src.ref), &rec); err == nil && rec.Ref == src.ref {
		digest = rec.Digest
	} else if digest == "" {
		return nil, fs.ErrNotExist
	}
	h, err := v1.NewHash(digest)
	if err != nil {
		return nil, fs.ErrNotExist // a damaged record
	}
	return s.open(ctx, h, src.ref)
}

// getLocal returns the image of a layout or archive. One whose source is gone is
// served from the store.
func (s *Store) getLocal(ctx context.Context, src source, track *tracker) (_ *Image, err error) {
	from, err := src.open()
	if err == nil {
		defer func() { err = errors.Join(err, from.close()) }()
		var image *resolved
		if image, err = s.resolve(ctx, src.ref, from); err == nil {
			return s.obtain(ctx, src, image, track)
		}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if image, cachedErr := s.cached(ctx, src); cachedErr == nil {
		s.opts.Log.Warn("image comes from the store because its source is gone", "image", src.ref, "error", err)
		return image, nil
	}
	return nil, err
}

// getRemote asks a registry, one caller for one reference at a time.
func (s *Store) getRemote(ctx context.Context, src source, track *tracker, fresh bool) (_ *Image, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	if err := s.lock(ctx, refKey(src.ref, s.opts.Arch), track, &undo); err != nil {
		return nil, err
	}
	if !fresh {
		if image, err := s.cached(ctx, src); err == nil || !errors.Is(err, fs.ErrNotExist) {
			return image, err
		}
	}
	track.phase(PhaseResolve)
	from, err := src.open()
	if err != nil {
		return nil, err
	}
	undo.Add(from.close)
	image, err := s.resolve(ctx, src.ref, from)
	if err != nil {
		return nil, err
	}
	return s.obtain(ctx, src, image, track)
}

// lock takes the lock called key; undo frees it.
func (s *Store) lock(ctx context.Context, key string, track *tracker, undo *cleanup.Stack) error {
	l, err := acquire(ctx, filepath.Join(s.locksDir(), key+".lock"), track.waiting)
	if err != nil {
		return s.named(err, 0)
	}
	undo.Add(track.holds(l))
	return nil
}

// obtain returns a resolved image, made now if need be, and records that the
// reference stands for it.
func (s *Store) obtain(ctx context.Context, src source, image *resolved, track *tracker) (_ *Image, err error) {
	var undo cleanup.Stack
	got, err := s.open(ctx, image.digest, src.ref)
	if errors.Is(err, fs.ErrNotExist) {
		got, err = s.obtainNew(ctx, image, track)
	}
	if err != nil {
		return nil, err
	}
	undo.Add(got.Close)
	defer func() { err = undo.RunOnError(err) }()
	var old refRecord
	if err := readJSON(s.refFile(src.ref), &old); err == nil && old.Digest == got.Digest && old.Ref == src.ref {
		return got, nil
	}
	rec := refRecord{Ref: src.ref, Arch: s.opts.Arch, Digest: got.Digest, Pulled: time.Now()}
	return got, s.withWork(func(w *workDir) error { return w.writeJSON(s.refFile(src.ref), rec) })
}

// obtainNew makes the image, or waits for another that does.
func (s *Store) obtainNew(ctx context.Context, image *resolved, track *tracker) (_ *Image, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	if err := s.lock(ctx, image.digest.Hex, track, &undo); err != nil {
		return nil, err
	}
	got, err := s.open(ctx, image.digest, image.ref)
	if !errors.Is(err, fs.ErrNotExist) {
		return got, err
	}
	return s.fill(ctx, image, track)
}

// refKey names a reference's record and lock.
func refKey(ref, arch string) string {
	sum := sha256.Sum256([]byte(arch + "\x00" + ref))
	return hex.EncodeToString(sum[:16])
}

func (s *Store) refFile(ref string) string {
	return filepath.Join(s.refsDir(), refKey(ref, s.opts.Arch)+".json")
}
