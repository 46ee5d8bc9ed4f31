package erofs

import (
	"errors"
	"path"
	"strings"
)

// maxLinks is how many symbolic links one path may go through, as in Linux.
const maxLinks = 40

// inode is one file of the merged tree. There may be a million: everything long
// lies in the side file.
type inode struct {
	mode      uint16 // type and permission bits
	inline    bool   // the last size%blockSize bytes lie behind the inode
	pending   bool   // a hard link whose target has not come yet
	xattrLen  uint32 // bytes of the encoded xattrs at xattrAt, a multiple of 4
	nlink     uint32 // for directories set by Finish
	uid, gid  uint32
	mtimeNsec uint32
	block     uint32 // first data block, or the device number
	mtime     int64  // seconds since 1970, may be negative
	size      int64
	tailAt    int64  // side file: inline data, or a symlink's target in any case
	xattrAt   int64  // side file
	nid       uint64 // set by Finish
	dir       *directory
}

func (i *inode) isDir() bool     { return i.dir != nil }
func (i *inode) isSymlink() bool { return i.mode&modeType == modeSymlink }

// dentry is a name's inode, and the layer that put it there.
type dentry struct {
	inode *inode
	layer int32
}

type directory struct {
	children map[string]dentry // nil when there are none; Finish turns it into sorted
	pruned   int32             // the layer that last hid everything from below
	sorted   []child
}

type child struct {
	name  string
	inode *inode
}

// Errors of the path walk; add and remove turn them into EntryErrors.
var (
	errNoEntry  = errors.New("does not exist")
	errNotDir   = errors.New("lies below a file that is no directory")
	errLinkLoop = errors.New("goes through more than 40 symbolic links")
)

// tree is the merged tree of the layers so far.
type tree struct {
	b       *Builder
	root    *inode
	entries int
	frees   func(*inode) error // a regular file lost its last name
}

func newTree(b *Builder) *tree {
	return &tree{b: b, root: newDir(), frees: b.punch}
}

func newDir() *inode {
	return &inode{mode: modeDir | 0o755, dir: &directory{}}
}

// count admits one more entry or implied directory.
func (t *tree) count(name string) error {
	if t.entries >= t.b.limits.Entries {
		return &LimitError{What: "entries", Limit: int64(t.b.limits.Entries), Path: name}
	}
	t.entries++
	return nil
}

// walk finds the directory that name's components lead to, following symbolic
// links inside the root. create makes what is missing. It returns the number of
// components below the root too.
func (t *tree) walk(name string, create bool) (*inode, int, error) {
	stack := []*inode{t.root}
	rest := strings.Split(name, "/")
	links := 0
	for len(rest) > 0 {
		component := rest[0]
		rest = rest[1:]
		here := stack[len(stack)-1]
		switch component {
		case "", ".":
			continue
		case "..": // only a link's target can have it
			if len(stack) > 1 {
				stack = stack[:len(stack)-1]
			}
			continue
		}
		next := here.dir.children[component].inode
		if next == nil {
			if !create {
				return nil, 0, errNoEntry
			}
			if len(component) > nameMax {
				return nil, 0, &LimitError{What: "bytes in a file name", Limit: nameMax, Path: name}
			}
			if err := t.count(name); err != nil {
				return nil, 0, err
			}
			next = newDir()
			t.put(here, component, next)
		}
		switch {
		case next.isSymlink():
			if links++; links > maxLinks {
				return nil, 0, errLinkLoop
			}
			target, err := t.b.side.readString(next.tailAt, next.size)
			if err != nil {
				return nil, 0, err
			}
			if strings.HasPrefix(target, "/") {
				stack = stack[:1]
			}
			rest = append(strings.Split(target, "/"), rest...)
		case !next.isDir():
			return nil, 0, errNotDir
		default:
			if len(stack) > t.b.limits.Depth {
				return nil, 0, &LimitError{What: "levels of directories", Limit: int64(t.b.limits.Depth), Path: name}
			}
			stack = append(stack, next)
		}
	}
	return stack[len(stack)-1], len(stack) - 1, nil
}

// parent finds the directory of name, which is clean and not the root, and
// returns it with name's last component.
func (t *tree) parent(name string, create bool) (*inode, string, error) {
	dir, base := path.Split(name)
	parent, depth, err := t.walk(dir, create)
	if err != nil {
		return nil, "", err
	}
	if depth+1 > t.b.limits.Depth {
		return nil, "", &LimitError{What: "levels of directories", Limit: int64(t.b.limits.Depth), Path: name}
	}
	return parent, base, nil
}

// put gives inode a name, which is free.
func (t *tree) put(parent *inode, base string, i *inode) {
	if parent.dir.children == nil {
		parent.dir.children = make(map[string]dentry)
	}
	i.nlink++
	parent.dir.children[base] = dentry{inode: i, layer: t.b.layer}
}

// replace gives inode the name, in place of whatever had it. A directory over a
// directory takes its children on.
func (t *tree) replace(parent *inode, base string, i *inode) error {
	if old := parent.dir.children[base].inode; old != nil {
		if old.isDir() && i.isDir() {
			i.dir = old.dir
		} else if err := t.drop(old); err != nil {
			return err
		}
	}
	t.put(parent, base, i)
	return nil
}

// drop takes one name from an inode, and from everything below a directory.
func (t *tree) drop(i *inode) error {
	if i.isDir() {
		for _, c := range i.dir.children {
			if err := t.drop(c.inode); err != nil {
				return err
			}
		}
		i.dir.children = nil
		return nil
	}
	if i.nlink--; i.nlink > 0 || i.mode&modeType != modeRegular {
		return nil
	}
	return t.frees(i)
}

// hide takes away what lower layers put at base.
func (t *tree) hide(parent *inode, base string) error {
	d := parent.dir.children[base]
	switch {
	case d.inode == nil:
		return nil
	case d.inode.isDir():
		if err := t.prune(d.inode); err != nil {
			return err
		}
		if d.layer == t.b.layer {
			return nil
		}
		if len(d.inode.dir.children) > 0 {
			// It is there for this layer's entries alone: as if they had made it.
			kept := newDir()
			kept.dir = d.inode.dir
			t.put(parent, base, kept)
			return nil
		}
	case d.layer == t.b.layer:
		return nil
	default:
		if err := t.drop(d.inode); err != nil {
			return err
		}
	}
	delete(parent.dir.children, base)
	return nil
}

// prune hides everything that lower layers put below i. Doing it twice in one
// layer is one scan, so a layer full of opaque markers costs no more.
func (t *tree) prune(i *inode) error {
	if i.dir.pruned == t.b.layer {
		return nil
	}
	i.dir.pruned = t.b.layer
	for name := range i.dir.children {
		if err := t.hide(i, name); err != nil {
			return err
		}
	}
	return nil
}
