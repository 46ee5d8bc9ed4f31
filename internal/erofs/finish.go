package erofs

import (
	"slices"
	"strings"
)

// Finish writes directories, inodes and superblock and gives the file its
// length. The image is complete then but not synced.
func (b *Builder) Finish() (Stats, error) {
	if b.broken {
		return Stats{}, errFinished
	}
	b.broken = true
	order, metaSize := b.place()
	for _, i := range order {
		if i.isDir() {
			if err := b.writeDir(i); err != nil {
				return Stats{}, err
			}
		}
	}
	meta := b.data.next()
	if err := b.writeInodes(order); err != nil {
		return Stats{}, err
	}
	blocks := meta + uint32((metaSize+blockSize-1)/blockSize)
	if err := b.data.flush(); err != nil {
		return Stats{}, err
	}
	b.stats.Inodes = len(order)
	b.stats.Size = int64(blocks) * blockSize
	if err := b.data.file.Truncate(b.stats.Size); err != nil {
		return Stats{}, err
	}
	super := superblock(uint16(b.tree.root.nid), uint64(len(order)), blocks, meta)
	if _, err := b.data.file.WriteAt(super, 0); err != nil {
		return Stats{}, err
	}
	return b.stats, nil
}

// place sorts the directories, numbers the inodes in the order in which they will
// be written, the children of a directory side by side, and returns them with the
// size of the metadata in bytes.
func (b *Builder) place() ([]*inode, int64) {
	// Number 0 would be no valid inode number for programs.
	position := int64(slotSize)
	order := []*inode{b.tree.root}
	b.tree.root.nid = place(b.tree.root, b.tree.root, &position)
	for at := 0; at < len(order); at++ {
		dir := order[at]
		if !dir.isDir() {
			continue
		}
		for _, c := range dir.dir.sorted {
			if c.inode.nid != 0 {
				continue // ".", ".." or a further name
			}
			c.inode.nid = place(c.inode, dir, &position)
			order = append(order, c.inode)
		}
	}
	return order, position
}

// place gives i the next free position and returns its number. A directory is
// sorted and measured first, for which its parent is needed.
func place(i, parent *inode, position *int64) uint64 {
	if i.isDir() {
		seal(i, parent)
	}
	head, tail := inodeSize+int64(i.xattrLen), int64(0)
	if i.inline {
		tail = i.size % blockSize
		if i.isSymlink() {
			tail = i.size
		}
	}
	at := (*position + slotSize - 1) / slotSize * slotSize
	inode := at % blockSize
	// The inode and what lies inline may not cross a block's end.
	if inode+inodeSize > blockSize || tail > 0 && (inode+head)/blockSize != (inode+head+tail-1)/blockSize {
		at = (at + blockSize - 1) / blockSize * blockSize
	}
	*position = at + head + tail
	return uint64(at / slotSize)
}

// seal turns a directory's map into a sorted list with "." and "..", and sets its
// size, layout and link count.
func seal(i, parent *inode) {
	list := make([]child, 0, len(i.dir.children)+2)
	list = append(list, child{".", i}, child{"..", parent})
	i.nlink = 2
	for name, d := range i.dir.children {
		list = append(list, child{name, d.inode})
		if d.inode.isDir() {
			i.nlink++
		}
	}
	slices.SortFunc(list, func(a, b child) int { return strings.Compare(a.name, b.name) })
	i.dir.children, i.dir.sorted = nil, list
	full, rest := 0, list
	for {
		n, used := blockful(rest)
		if n == len(rest) {
			i.size = int64(full)*blockSize + int64(used)
			i.inline = used < blockSize && inodeSize+int(i.xattrLen)+used <= blockSize
			return
		}
		full++
		rest = rest[n:]
	}
}

// blockful returns how many of list fit one directory block, and their bytes.
func blockful(list []child) (n, used int) {
	for _, c := range list {
		if used+direntSize+len(c.name) > blockSize {
			break
		}
		used += direntSize + len(c.name)
		n++
	}
	return n, used
}

// encodeBlock writes list to buf, which it fits: entries first, then names.
func encodeBlock(buf []byte, list []child) []byte {
	buf = buf[:len(list)*direntSize]
	for k, c := range list {
		putDirent(buf[k*direntSize:], c.inode.nid, len(buf), direntType(c.inode.mode))
		buf = append(buf, c.name...)
	}
	return buf
}

// writeDir writes a directory's blocks, all but the last when that is inline.
func (b *Builder) writeDir(i *inode) error {
	var buf [blockSize]byte
	rest := i.dir.sorted
	first := true
	for len(rest) > 0 {
		n, _ := blockful(rest)
		if n == len(rest) && i.inline {
			break
		}
		if first {
			block, err := b.startBlocks(i.size)
			if err != nil {
				return err
			}
			i.block, first = block, false
		}
		if _, err := b.data.Write(encodeBlock(buf[:], rest[:n])); err != nil {
			return err
		}
		b.data.pad()
		rest = rest[n:]
	}
	i.dir.sorted = rest
	return nil
}

// writeInodes writes the metadata area.
func (b *Builder) writeInodes(order []*inode) error {
	var buf, gap [blockSize]byte
	position := int64(0)
	write := func(p []byte) error {
		n, err := b.data.Write(p)
		position += int64(n)
		return err
	}
	for number, i := range order {
		for at := int64(i.nid) * slotSize; position < at; {
			if err := write(gap[:min(blockSize, at-position)]); err != nil {
				return err
			}
		}
		clear(buf[:inodeSize])
		encodeInode(buf[:inodeSize], i, uint32(number+1))
		if err := write(buf[:inodeSize]); err != nil {
			return err
		}
		for at, left := i.xattrAt, int64(i.xattrLen); left > 0; {
			n := min(left, blockSize)
			if err := b.side.read(buf[:n], at); err != nil {
				return err
			}
			if err := write(buf[:n]); err != nil {
				return err
			}
			at, left = at+n, left-n
		}
		tail, err := b.inlineTail(buf[:], i)
		if err != nil {
			return err
		}
		if err := write(tail); err != nil {
			return err
		}
	}
	b.data.pad()
	return nil
}

// inlineTail returns, in buf, what goes behind i's inode.
func (b *Builder) inlineTail(buf []byte, i *inode) ([]byte, error) {
	switch {
	case !i.inline:
		return nil, nil
	case i.isDir():
		return encodeBlock(buf, i.dir.sorted), nil
	case i.isSymlink():
		buf = buf[:i.size]
	default:
		buf = buf[:i.size%blockSize]
	}
	return buf, b.side.read(buf, i.tailAt)
}
