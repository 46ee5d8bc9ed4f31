package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

// node is one file of the image. Two paths with the same *node are hard links.
type node struct {
	typ      byte // tar.TypeReg, TypeDir or TypeSymlink
	mode     int64
	uid, gid int
	target   string // of a symlink
	body     body
	owner    string // package that shipped it; empty for what we made
}

// body is the content of a regular file: bytes in memory or a piece of the
// tree's spool file.
type body struct {
	data      []byte
	off, size int64
	spooled   bool
}

// tree is the root file system while it is put together: metadata in memory,
// content in one spool file. Paths are clean, relative and merged-usr: nothing
// is ever below bin, sbin, lib or lib64 themselves. Not safe for concurrent use.
type tree struct {
	nodes map[string]*node
	spool *os.File
	end   int64 // of the spool
	// newest is the latest modification time seen in any package, in Unix
	// seconds: the one time of the whole image.
	newest int64
}

// newTree starts an empty root. The spool has no name, so nothing is left of it
// however the process ends; the caller calls close.
func newTree(dir string) (*tree, error) {
	spool, err := os.CreateTemp(dir, "spool-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(spool.Name()); err != nil {
		return nil, errors.Join(err, spool.Close())
	}
	t := &tree{nodes: map[string]*node{}, spool: spool}
	t.nodes["."] = &node{typ: tar.TypeDir, mode: 0o755}
	return t, nil
}

func (t *tree) close() error { return t.spool.Close() }

// topLinks are the directories that Debian merged into /usr.
func topLinks() []string { return []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} }

// canonical turns a name from an archive into a path of the tree. A name that
// would leave the root is an error.
func canonical(name string) (string, error) {
	clean := path.Clean(strings.TrimPrefix(name, "/"))
	if clean == ".." || strings.HasPrefix(clean, "../") || path.IsAbs(clean) || strings.ContainsRune(clean, 0) {
		return "", fmt.Errorf("path %q leaves the root", name)
	}
	first, _, _ := strings.Cut(clean, "/")
	if slices.Contains(topLinks(), first) {
		clean = "usr/" + clean
	}
	return clean, nil
}

// add puts n at p, with any parent that is missing. Directories may come from
// several packages, the first one's mode stays; any other second entry is an
// error, as is a parent that is not a directory.
func (t *tree) add(p string, n *node) error {
	if old, ok := t.nodes[p]; ok {
		if old.typ == tar.TypeDir && n.typ == tar.TypeDir {
			return nil
		}
		return fmt.Errorf("/%s is in %s and again in %s", p, old.from(), n.from())
	}
	parent := path.Dir(p)
	if _, ok := t.nodes[parent]; !ok {
		if err := t.add(parent, &node{typ: tar.TypeDir, mode: 0o755, owner: n.owner}); err != nil {
			return err
		}
	}
	if up := t.nodes[parent]; up.typ != tar.TypeDir {
		return fmt.Errorf("/%s of %s lies below /%s, which is not a directory in %s", p, n.from(), parent, up.from())
	}
	t.nodes[p] = n
	return nil
}

func (n *node) from() string {
	if n.owner == "" {
		return "this recipe"
	}
	return "package " + n.owner
}

// mkdir makes a directory or sets the mode and owner of an existing one.
func (t *tree) mkdir(p string, mode int64, uid, gid int) error {
	if old, ok := t.nodes[p]; ok && old.typ == tar.TypeDir {
		old.mode, old.uid, old.gid = mode, uid, gid
		return nil
	}
	return t.add(p, &node{typ: tar.TypeDir, mode: mode, uid: uid, gid: gid})
}

// write makes a regular file, owned by root, in place of what is there.
func (t *tree) write(p string, mode int64, data []byte) error {
	delete(t.nodes, p)
	return t.add(p, &node{typ: tar.TypeReg, mode: mode, body: body{data: data, size: int64(len(data))}})
}

// symlink makes a symlink unless something is there already.
func (t *tree) symlink(p, target string) error {
	if _, ok := t.nodes[p]; ok {
		return nil
	}
	return t.add(p, &node{typ: tar.TypeSymlink, mode: 0o777, target: target})
}

// copy makes a file with the content of another one.
func (t *tree) copy(from, to string, mode int64) error {
	data, err := t.read(from)
	if err != nil {
		return err
	}
	return t.write(to, mode, data)
}

// read returns the content of a regular file.
func (t *tree) read(p string) ([]byte, error) {
	n, ok := t.nodes[p]
	if !ok || n.typ != tar.TypeReg {
		return nil, fmt.Errorf("/%s is not a file in the packages: the recipe does not fit this Debian release", p)
	}
	return io.ReadAll(t.open(n))
}

// has tells whether p exists.
func (t *tree) has(p string) bool { _, ok := t.nodes[p]; return ok }

// removeAll takes p and all below it away.
func (t *tree) removeAll(p string) {
	for q := range t.nodes {
		if q == p || strings.HasPrefix(q, p+"/") {
			delete(t.nodes, q)
		}
	}
}

func (t *tree) open(n *node) io.Reader {
	if n.body.spooled {
		return io.NewSectionReader(t.spool, n.body.off, n.body.size)
	}
	return bytes.NewReader(n.body.data)
}

// paths lists the tree depth first, names of a directory sorted: parents come
// before children, and what is below a directory comes in one run.
func (t *tree) paths() []string {
	return slices.SortedFunc(maps.Keys(t.nodes), func(a, b string) int {
		return slices.Compare(elements(a), elements(b))
	})
}

func elements(p string) []string {
	if p == "." {
		return nil
	}
	return strings.Split(p, "/")
}

// addTar merges the file system of one package. keep chooses what is taken.
func (t *tree) addTar(owner string, r io.Reader, keep func(p string) bool) error {
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		p, err := canonical(h.Name)
		if err != nil {
			return err
		}
		t.newest = max(t.newest, h.ModTime.Unix())
		if p == "." || !keep(p) || (h.Typeflag == tar.TypeSymlink && isTopLink(p)) {
			continue
		}
		if err := t.addEntry(owner, p, h, archive); err != nil {
			return err
		}
	}
}

// isTopLink reports usr/bin and the like: a package that ships the symlink bin
// itself says nothing new.
func isTopLink(p string) bool {
	return path.Dir(p) == "usr" && slices.Contains(topLinks(), path.Base(p))
}

func (t *tree) addEntry(owner, p string, h *tar.Header, content io.Reader) error {
	n := &node{typ: h.Typeflag, mode: h.Mode & 0o7777, uid: h.Uid, gid: h.Gid, owner: owner}
	switch h.Typeflag {
	case tar.TypeDir:
	case tar.TypeSymlink:
		n.target, n.mode = h.Linkname, 0o777
	case tar.TypeReg:
		size, err := io.Copy(io.NewOffsetWriter(t.spool, t.end), content)
		if err != nil {
			return err
		}
		n.body = body{off: t.end, size: size, spooled: true}
		t.end += size
	case tar.TypeLink:
		q, err := canonical(h.Linkname)
		if err != nil {
			return err
		}
		first, ok := t.nodes[q]
		if !ok || first.typ != tar.TypeReg {
			return fmt.Errorf("/%s is a hard link to /%s, which is no file before it", p, q)
		}
		n = first
	default:
		return fmt.Errorf("/%s has tar type %q, which no image here needs", p, h.Typeflag)
	}
	return t.add(p, n)
}

// writeTar writes the layer: sorted by path, every time set to the tree's.
// Of hard links the first path has the content.
func (t *tree) writeTar(w io.Writer) error {
	archive := tar.NewWriter(w)
	first := map[*node]string{}
	for _, p := range t.paths() {
		n := t.nodes[p]
		h := &tar.Header{
			Typeflag: n.typ, Name: p, Mode: n.mode, Uid: n.uid, Gid: n.gid, Linkname: n.target,
			ModTime: time.Unix(t.newest, 0).UTC(),
		}
		switch n.typ {
		case tar.TypeDir:
			h.Name += "/"
		case tar.TypeReg:
			if q, seen := first[n]; seen {
				h.Typeflag, h.Linkname = tar.TypeLink, q
			} else {
				first[n] = p
				h.Size = n.body.size
			}
		}
		if err := archive.WriteHeader(h); err != nil {
			return fmt.Errorf("/%s: %w", p, err)
		}
		if h.Size == 0 {
			continue
		}
		if _, err := io.Copy(archive, t.open(n)); err != nil {
			return fmt.Errorf("/%s: %w", p, err)
		}
	}
	return archive.Close()
}

// extract writes the tree into the empty directory dir with the invoking user
// as owner: enough to run its programs from there. Symlinks come last, so no
// write follows one.
func (t *tree) extract(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	err = t.extractInto(root)
	return errors.Join(err, root.Close())
}

func (t *tree) extractInto(root *os.Root) error {
	stamp := time.Unix(t.newest, 0)
	var links []string
	for _, p := range t.paths() {
		n := t.nodes[p]
		var err error
		switch {
		case p == ".":
		case n.typ == tar.TypeDir:
			err = root.Mkdir(p, 0o700)
		case n.typ == tar.TypeSymlink:
			links = append(links, p)
		default:
			if err = t.extractFile(root, p, n); err == nil {
				err = root.Chtimes(p, stamp, stamp)
			}
		}
		if err != nil {
			return err
		}
	}
	for _, p := range links {
		if err := root.Symlink(t.nodes[p].target, p); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) extractFile(root *os.Root, p string, n *node) error {
	f, err := root.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, os.FileMode(n.mode&0o500|0o600))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, t.open(n))
	return errors.Join(err, f.Close())
}
