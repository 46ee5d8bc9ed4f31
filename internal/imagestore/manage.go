package imagestore

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// Entry is an image in the store.
type Entry struct {
	Digest string `json:"digest"`
	// Refs are the references that stand for it, in full, sorted.
	Refs []string `json:"refs"`
	// Pins are the names of those who pinned it, sorted.
	Pins []string `json:"pins,omitempty"`
	Arch string   `json:"arch"`
	// Size is the length of the lower in bytes, Allocated what it takes on disk.
	Size      int64 `json:"size"`
	Allocated int64 `json:"allocated"`
	// Pulled is when the image was made, Used when it was last opened.
	Pulled time.Time `json:"pulled"`
	Used   time.Time `json:"used"`
	// InUse tells that a VM or an open Image holds it.
	InUse bool `json:"in_use"`
}

// List returns the images in the order of their digests. What comes or goes
// meanwhile may or may not be there.
func (s *Store) List(ctx context.Context) ([]Entry, error) {
	refs, err := s.refs()
	if err != nil {
		return nil, err
	}
	dirs, err := os.ReadDir(s.imagesDir())
	if err != nil {
		return nil, err
	}
	var entries []Entry
	for _, d := range dirs {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		digest, err := v1.NewHash(strings.Replace(d.Name(), "-", ":", 1))
		if err != nil {
			continue // nothing of ours
		}
		entry, err := s.entry(digest)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, r := range refs {
			if r.Digest == entry.Digest {
				entry.Refs = append(entry.Refs, r.Ref)
			}
		}
		slices.Sort(entry.Refs)
		entries = append(entries, entry)
	}
	return entries, nil
}

// entry describes one image, but for its references.
func (s *Store) entry(digest v1.Hash) (Entry, error) {
	dir := s.imageDir(digest)
	e := Entry{Digest: digest.String(), Refs: []string{}}
	var rec record
	if err := readJSON(filepath.Join(dir, fileRecord), &rec); err == nil {
		e.Arch, e.Pulled = rec.Arch, rec.Made
	} else if errors.Is(err, fs.ErrNotExist) {
		return Entry{}, err
	}
	if info, err := os.Stat(filepath.Join(dir, fileRecord)); err == nil {
		e.Used = info.ModTime()
	}
	info, err := os.Lstat(filepath.Join(dir, fileLower))
	if err != nil {
		return Entry{}, err
	}
	e.Size = info.Size()
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Allocated = st.Blocks * 512
	}
	if e.Pins, err = pins(dir); err != nil {
		return Entry{}, err
	}
	lower, err := s.claim(digest)
	if errors.Is(err, flock.ErrLocked) {
		e.InUse = true
		return e, nil
	}
	if err != nil {
		return Entry{}, err
	}
	return e, flock.Unlock(lower)
}

// claim locks an image's lower exclusively: flock.ErrLocked when it is in use,
// fs.ErrNotExist when it is gone. Who opens images waits that long.
func (s *Store) claim(digest v1.Hash) (*os.File, error) {
	lower, err := os.OpenFile(filepath.Join(s.imageDir(digest), fileLower), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	err = flock.Try(lower, flock.Exclusive)
	if err == nil {
		var ok bool
		if ok, err = stillThere(lower); ok {
			return lower, nil
		}
		if err == nil {
			err = fs.ErrNotExist
		}
	}
	return nil, errors.Join(err, flock.Unlock(lower))
}

// refs reads all records of references. Damaged ones are left out.
func (s *Store) refs() ([]refRecord, error) {
	files, err := os.ReadDir(s.refsDir())
	if err != nil {
		return nil, err
	}
	var list []refRecord
	for _, f := range files {
		var rec refRecord
		if err := readJSON(filepath.Join(s.refsDir(), f.Name()), &rec); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				s.opts.Log.Warn("reference record cannot be read", "error", err)
			}
			continue
		}
		list = append(list, rec)
	}
	return list, nil
}

// Remove takes an image out of the store, by digest or by reference. A reference
// that shares its image with others is forgotten and no more. An image that is in
// use or pinned is an [InUseError] and stays as it is; one that is not there is
// [ErrNotCached].
func (s *Store) Remove(ctx context.Context, refOrDigest string) error {
	refs, err := s.refs()
	if err != nil {
		return err
	}
	digest, mine := "", []refRecord{}
	if h, err := v1.NewHash(refOrDigest); err == nil {
		digest = h.String()
		mine = slices.DeleteFunc(slices.Clone(refs), func(r refRecord) bool { return r.Digest != digest })
	} else {
		src, err := s.source(refOrDigest, refOrDigest)
		if err != nil {
			return err
		}
		for _, r := range refs {
			if r.Ref == src.ref && r.Arch == s.opts.Arch {
				digest, mine = r.Digest, []refRecord{r}
			}
		}
	}
	h, err := v1.NewHash(digest)
	if err != nil {
		return &NotCachedError{Ref: refOrDigest}
	}
	others := slices.ContainsFunc(refs, func(r refRecord) bool { return r.Digest == digest && !slices.Contains(mine, r) })
	if !others {
		err := s.evict(ctx, h, true)
		if err != nil && (!errors.Is(err, fs.ErrNotExist) || len(mine) == 0) {
			if errors.Is(err, fs.ErrNotExist) {
				return &NotCachedError{Ref: refOrDigest}
			}
			return err
		}
	}
	for _, r := range mine {
		if err := s.forget(r); err != nil {
			return err
		}
	}
	return nil
}

// forget removes a reference's record, unless it was written anew meanwhile.
func (s *Store) forget(r refRecord) error {
	file := filepath.Join(s.refsDir(), refKey(r.Ref, r.Arch)+".json")
	var now refRecord
	if err := readJSON(file, &now); err == nil && now.Digest != r.Digest {
		return nil
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// errReferenced tells that an image got a reference since it was looked at.
var errReferenced = errors.New("image has a reference")

// evict removes an image that nothing uses or pins and, unless referenced images
// are meant too, no reference stands for. It is gone at once for others.
func (s *Store) evict(ctx context.Context, digest v1.Hash, referenced bool) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	lower, err := s.claim(digest)
	if errors.Is(err, flock.ErrLocked) {
		return &InUseError{Digest: digest.String(), By: "a running VM or a pull"}
	}
	if err != nil {
		return err
	}
	// With the lock, no pin or reference can come: those who make them hold the image.
	dir := s.imageDir(digest)
	names, err := pins(dir)
	if err == nil && len(names) > 0 {
		err = &InUseError{Digest: digest.String(), By: strings.Join(names, ", ")}
	}
	if err == nil && !referenced {
		var refs []refRecord
		if refs, err = s.refs(); slices.ContainsFunc(refs, func(r refRecord) bool { return r.Digest == digest.String() }) {
			err = errReferenced
		}
	}
	if err == nil {
		err = s.withWork(func(w *workDir) error { return os.Rename(dir, w.join("evicted")) })
	}
	return errors.Join(err, flock.Unlock(lower))
}

// GCOptions of [Store.GC].
type GCOptions struct {
	// All removes also images that a reference stands for, and the references.
	All bool
	// UnusedFor spares images that were opened in this last time, whatever else
	// holds: a cache that is kept for a week, say. 0 spares none.
	UnusedFor time.Duration
}

// GCResult is what [Store.GC] did.
type GCResult struct {
	// Removed are the images that are gone.
	Removed []Entry `json:"removed"`
	// Kept is the number of images that would have gone, were they not in use or
	// pinned.
	Kept int `json:"kept"`
	// Freed is the disk space of the removed images, in bytes.
	Freed int64 `json:"freed"`
	// Leftovers is the number of broken pulls that were cleared away.
	Leftovers int `json:"leftovers"`
}

// GC removes what nothing needs: images that no reference stands for, records of
// references to images that are gone, old locks and what killed processes left. What
// is in use or pinned stays. It is safe to run at any time.
func (s *Store) GC(ctx context.Context, opts GCOptions) (GCResult, error) {
	var result GCResult
	var err error
	if result.Leftovers, err = s.collectLeftovers(); err != nil {
		return result, err
	}
	entries, err := s.List(ctx)
	if err != nil {
		return result, err
	}
	for _, e := range entries {
		if len(e.Refs) > 0 && !opts.All || opts.UnusedFor > 0 && time.Since(e.Used) < opts.UnusedFor {
			continue
		}
		h, err := v1.NewHash(e.Digest)
		if err != nil {
			return result, err
		}
		var inUse *InUseError
		switch err := s.evict(ctx, h, opts.All); {
		case errors.As(err, &inUse):
			result.Kept++
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, errReferenced): // somebody else was here
		case err != nil:
			return result, err
		default:
			result.Removed = append(result.Removed, e)
			result.Freed += e.Allocated
		}
	}
	return result, s.collectRecords()
}

// collectRecords removes references to nothing and locks that nobody holds. Both
// are done under the lock, so that no pull is disturbed.
func (s *Store) collectRecords() error {
	refs, err := s.refs()
	if err != nil {
		return err
	}
	for _, r := range refs {
		h, err := v1.NewHash(r.Digest)
		if err != nil {
			continue
		}
		if _, err := os.Lstat(s.imageDir(h)); errors.Is(err, fs.ErrNotExist) {
			if err := s.whenUnlocked(refKey(r.Ref, r.Arch), func() error { return s.forget(r) }); err != nil {
				return err
			}
		}
	}
	files, err := os.ReadDir(s.locksDir())
	if err != nil {
		return err
	}
	for _, f := range files {
		key, ok := strings.CutSuffix(f.Name(), ".lock")
		if !ok {
			continue
		}
		path := filepath.Join(s.locksDir(), f.Name())
		if err := s.whenUnlocked(key, func() error { return os.Remove(path) }); err != nil {
			return err
		}
	}
	return nil
}

// whenUnlocked runs f holding the lock called key, or not at all when it is held.
func (s *Store) whenUnlocked(key string, f func() error) error {
	file, err := flock.Open(filepath.Join(s.locksDir(), key+".lock"))
	if err != nil {
		return err
	}
	err = flock.Try(file, flock.Exclusive)
	if errors.Is(err, flock.ErrLocked) {
		return file.Close()
	}
	if err == nil {
		var there bool
		if there, err = stillThere(file); there {
			err = f()
		}
	}
	return errors.Join(err, file.Close())
}
