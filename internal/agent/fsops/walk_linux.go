package fsops

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/rexp"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// walkChunk is how much of a directory's entries is held in order at a time, in
// bytes of memory; reading takes twice that for a moment. A larger directory, of
// more than some 100 000 entries, is read again for each chunk.
const (
	walkChunk   = 8 << 20
	direntBytes = 64 // without the name
)

// filter selects files by gitignore patterns.
type filter struct{ include, exclude *rexp.Globs }

func newFilter(include, exclude []string) (filter, error) {
	var f filter
	var err error
	if f.include, err = rexp.ParseGlobs(include); err == nil {
		f.exclude, err = rexp.ParseGlobs(exclude)
	}
	if err != nil {
		return filter{}, fault.BadFileRequest("%v", err)
	}
	return f, nil
}

// file reports whether the file of that path is wanted; included tells that a
// directory above it is.
func (f filter) file(rel string, included bool) bool {
	return (included || f.include.Empty() || f.include.Match(rel, false)) && !f.exclude.Match(rel, false)
}

// walking goes through a tree in the order of its paths as bytes.
type walking struct {
	ctx    context.Context //nolint:containedctx // one walk
	filter filter
	// visit is called for each regular file that is wanted, by its name in the
	// open directory dir and its path relative to the root. Its error ends the
	// walk.
	visit func(dir int, name, rel string) error
}

// dirent is an entry of a directory. A directory's key ends in a slash, which
// puts what is below it where it belongs among the paths.
type dirent struct {
	key string
	dir bool
}

// directory walks dir, whose path relative to the root is rel. Links are not
// followed; directories below that cannot be read are passed over.
func (w *walking) directory(dir *directory, rel string, included bool, depth int) error {
	after := ""
	for {
		chunk, more, err := sortedEntries(w.ctx, dir, after)
		if err != nil {
			return err
		}
		for _, e := range chunk {
			if err := w.ctx.Err(); err != nil {
				return err
			}
			if err := w.entry(dir, e, rel, included, depth); err != nil {
				return err
			}
			after = e.key
		}
		if !more {
			return nil
		}
	}
}

func (w *walking) entry(dir *directory, e dirent, rel string, included bool, depth int) error {
	if !e.dir {
		path := rel + e.key
		if w.filter.file(path, included) {
			return w.visit(dir.fd, e.key, path)
		}
		return nil
	}
	name := e.key[:len(e.key)-1]
	path := rel + name
	if w.filter.exclude.Match(path, true) || depth >= maxDepth {
		return nil
	}
	sub, err := openDir(dir.fd, name)
	if err != nil {
		return nil // gone, no directory any more, or not to be read
	}
	defer sub.close()
	return w.directory(sub, rel+e.key, included || w.filter.include.Match(path, true), depth+1)
}

// sortedEntries returns the directories and other entries of dir whose keys come
// after the given one, in order, at most a walkChunk of them, and whether there are
// more. Where the directory cannot be read to its end, those before that count.
func sortedEntries(ctx context.Context, dir *directory, after string) ([]dirent, bool, error) {
	c := chunk{after: after}
	if err := dir.rewind(); err != nil {
		return nil, false, nil //nolint:nilerr // as a directory that cannot be read
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, false, err
		}
		entries, err := dir.f.ReadDir(listBatch)
		for _, e := range entries {
			c.add(e)
		}
		if err != nil || len(entries) == 0 {
			c.cut()
			return c.found, c.more, nil //nolint:nilerr // the end, or what cannot be read
		}
	}
}

// chunk collects the first entries of a directory, in the order of their keys, of
// those after a given one.
type chunk struct {
	after string
	found []dirent
	// size is the memory that found takes.
	size int
	// more tells that some were left out: all from the key limit on.
	more  bool
	limit string
}

func (c *chunk) add(e os.DirEntry) {
	d := dirent{key: e.Name(), dir: e.IsDir()}
	if d.dir {
		d.key += "/"
	}
	if d.key <= c.after || c.more && d.key >= c.limit {
		return
	}
	c.found = append(c.found, d)
	if c.size += d.size(); c.size >= 2*walkChunk {
		c.cut()
	}
}

// cut sorts what was found and leaves out what a chunk does not hold.
func (c *chunk) cut() {
	slices.SortFunc(c.found, func(a, b dirent) int { return cmp.Compare(a.key, b.key) })
	c.size = 0
	for i, d := range c.found {
		if c.size += d.size(); c.size > walkChunk {
			c.size -= d.size()
			c.more, c.limit = true, d.key
			clear(c.found[i:])
			c.found = c.found[:i]
			return
		}
	}
}

func (d dirent) size() int { return direntBytes + len(d.key) }

// errSkip is a file that a walk passes over.
var errSkip = errors.New("not a file to search")

// openFile opens the regular file name in dir, not following a link.
func openFile(ctx context.Context, dir int, name string) (*file, unix.Stat_t, error) {
	st, err := statAt(dir, name, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, st, err
	}
	if !isType(st, unix.S_IFREG) {
		return nil, st, errSkip
	}
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, st, err
	}
	if err := unix.Fstat(fd, &st); err != nil || !isType(st, unix.S_IFREG) {
		closeFD(fd)
		return nil, st, errSkip
	}
	return &file{ctx: ctx, fd: fd}, st, nil
}

// isEOF reports whether err is the end of a file.
func isEOF(err error) bool { return errors.Is(err, io.EOF) }
