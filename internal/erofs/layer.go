package erofs

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// Names with a meaning of their own (OCI image spec, layer.md).
const (
	whiteoutPrefix = ".wh."
	aufsPrefix     = ".wh..wh."
	opaqueMarker   = ".wh..wh..opq"
)

// inlineMax is the longest end of a file that goes behind its inode. Longer ones
// would leave much of a metadata block unused.
const inlineMax = 2048

// targetMax is the longest target of a symbolic link (Linux: PATH_MAX - 1).
const targetMax = 4095

// link is a hard link whose target had not come yet.
type link struct {
	parent       *inode
	base         string
	inode        *inode // the placeholder under base
	name, target string
}

// AddLayer merges the next layer, a tar stream, and reads it to its very end, so
// that a digest computed on the way is of the whole stream. ctx is looked at
// between entries and reads. Errors are [LimitError], [EntryError], those of
// archive/tar for a stream that is no tar, and those of r and the files, wrapped.
func (b *Builder) AddLayer(ctx context.Context, r io.Reader) (err error) {
	if b.broken {
		return errFinished
	}
	b.broken = true
	b.layer++
	ended := func() error {
		if ctx.Err() == nil {
			return nil
		}
		return context.Cause(ctx)
	}
	in := &layerReader{ended: ended, r: r, b: b}
	tr := tar.NewReader(in)
	var links []link
	for {
		header, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return in.explain("reading the next tar entry", err)
		}
		if links, err = b.add(header, tr, links); err != nil {
			return in.explain(fmt.Sprintf("entry %q", clip(header.Name)), err)
		}
	}
	if err := b.resolveLinks(links); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return in.explain("reading behind the end of the tar", err)
	}
	b.broken = false
	return nil
}

// layerReader bounds the stream, ends when ended says so and remembers why it
// did, which archive/tar would hide in some places.
type layerReader struct {
	ended func() error
	r     io.Reader
	b     *Builder
	err   error
}

func (l *layerReader) Read(p []byte) (int, error) {
	if l.err = l.ended(); l.err != nil {
		return 0, l.err
	}
	n, err := l.r.Read(p)
	l.b.stream += int64(n)
	if l.b.stream > l.b.limits.stream() {
		err = &LimitError{What: "bytes of tar stream", Limit: l.b.limits.stream()}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		l.err = err
	}
	return n, err
}

// explain prefers the stream's own error over what others made of it, and leaves
// those that name the entry themselves as they are.
func (l *layerReader) explain(doing string, err error) error {
	if l.err != nil {
		err = l.err
	}
	var limit *LimitError
	var entry *EntryError
	if errors.As(err, &limit) || errors.As(err, &entry) {
		return err
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// add merges one tar entry, whose body is r.
func (b *Builder) add(h *tar.Header, r io.Reader, links []link) ([]link, error) {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return links, nil
	}
	if err := b.tree.count(h.Name); err != nil {
		return links, err
	}
	name, err := b.clean(h.Name)
	if err != nil {
		return links, err
	}
	if skip, err := b.whiteout(h.Name, name); skip || err != nil {
		return links, err
	}
	if name == "" {
		return links, b.addRoot(h)
	}
	parent, base, err := b.tree.parent(name, true)
	if err != nil {
		return links, entryError(h.Name, err)
	}
	if len(base) > nameMax {
		return links, &LimitError{What: "bytes in a file name", Limit: nameMax, Path: h.Name}
	}
	if h.Typeflag == tar.TypeLink {
		return b.addLink(h, parent, base, name, links)
	}
	i, err := b.newInode(h, r)
	if err != nil {
		return links, err
	}
	return links, b.tree.replace(parent, base, i)
}

// clean returns name without leading, doubled and trailing slashes and ".";
// "" is the root.
func (b *Builder) clean(name string) (string, error) {
	if len(name) > b.limits.PathLen {
		return "", &LimitError{What: "bytes in a path", Limit: int64(b.limits.PathLen), Path: name}
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", &EntryError{Path: name, Reason: "has a zero byte in its name"}
	}
	for component := range strings.SplitSeq(name, "/") {
		if component == ".." {
			return "", &EntryError{Path: name, Reason: `has ".." in its name`}
		}
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

// whiteout carries name out if it is a whiteout or opaque marker, and tells
// whether the entry is thereby dealt with.
func (b *Builder) whiteout(raw, name string) (bool, error) {
	dir, base := path.Split(name)
	for component := range strings.SplitSeq(dir, "/") {
		if strings.HasPrefix(component, aufsPrefix) {
			return true, nil
		}
		if strings.HasPrefix(component, whiteoutPrefix) {
			return true, &EntryError{Path: raw, Reason: "lies below a whiteout"}
		}
	}
	if !strings.HasPrefix(base, whiteoutPrefix) {
		return false, nil
	}
	if strings.HasPrefix(base, aufsPrefix) && base != opaqueMarker {
		return true, nil
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return true, &EntryError{Path: raw, Reason: "is a whiteout of nothing that could have a name"}
	}
	parent, _, err := b.tree.walk(dir, false)
	switch {
	case errors.Is(err, errNoEntry), errors.Is(err, errNotDir):
		return true, nil // nothing there to hide
	case err != nil:
		return true, entryError(raw, err)
	case base == opaqueMarker:
		return true, b.tree.prune(parent)
	default:
		return true, b.tree.hide(parent, hidden)
	}
}

// addRoot takes the root directory's own attributes.
func (b *Builder) addRoot(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return &EntryError{Path: h.Name, Reason: "would replace the root directory"}
	}
	i, err := b.newInode(h, nil)
	if err != nil {
		return err
	}
	i.dir = b.tree.root.dir
	b.tree.root = i
	return nil
}

// addLink gives an existing inode one more name, or notes that it has to be done
// when the layer's other entries are there.
func (b *Builder) addLink(h *tar.Header, parent *inode, base, name string, links []link) ([]link, error) {
	target, err := b.clean(h.Linkname)
	if err != nil {
		return links, fmt.Errorf("hard link %q: target: %w", clip(h.Name), err)
	}
	if target == name {
		return links, &EntryError{Path: h.Name, Reason: "is a hard link to itself"}
	}
	i, err := b.linkTarget(target)
	if err != nil && !errors.Is(err, errNoEntry) {
		return links, entryError(h.Name, fmt.Errorf("is a hard link to %q, which %w", clip(h.Linkname), err))
	}
	if i == nil || i.pending {
		i = &inode{pending: true}
		links = append(links, link{parent: parent, base: base, inode: i, name: h.Name, target: target})
	}
	if parent.dir.children[base].inode == i {
		return links, nil // already a name of it
	}
	return links, b.tree.replace(parent, base, i)
}

// linkTarget finds the inode that a hard link is to share. It may be the
// placeholder of another link.
func (b *Builder) linkTarget(target string) (*inode, error) {
	if target == "" {
		return nil, errors.New("is the root directory")
	}
	parent, base, err := b.tree.parent(target, false)
	if err != nil {
		return nil, err
	}
	i := parent.dir.children[base].inode
	switch {
	case i == nil:
		return nil, errNoEntry
	case i.isDir():
		return nil, errors.New("is a directory")
	}
	return i, nil
}

// resolveLinks replaces the placeholders of links by their targets' inodes. Every
// link is looked up once, however long the chains of links to links are.
func (b *Builder) resolveLinks(links []link) error {
	byInode := make(map[*inode]*link, len(links))
	for k := range links {
		byInode[links[k].inode] = &links[k]
	}
	var chain []*link
	for k := range links {
		l := &links[k]
		if l.parent.dir.children[l.base].inode != l.inode {
			continue // replaced by a later entry, or put right with a chain
		}
		chain = chain[:0]
		var end *inode
		for end == nil {
			if chain = append(chain, l); len(chain) > len(links) {
				return &EntryError{Path: l.name, Reason: "is a hard link to itself by way of others"}
			}
			i, err := b.linkTarget(l.target)
			if err != nil {
				return entryError(l.name, fmt.Errorf("is a hard link to %q, which %w in this layer or below", clip(l.target), err))
			}
			if i.pending {
				l = byInode[i]
			} else {
				end = i
			}
		}
		for _, l := range chain {
			b.tree.put(l.parent, l.base, end)
		}
	}
	return nil
}

// entryError turns an error of the tree into one about name.
func entryError(name string, err error) error {
	var limit *LimitError
	if errors.As(err, &limit) {
		return err
	}
	return &EntryError{Path: name, Reason: err.Error()}
}
