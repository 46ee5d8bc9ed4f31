package erofs

import (
	"archive/tar"
	"fmt"
	"io"
	"math"
)

// newInode makes the inode that h describes and stores the body r.
func (b *Builder) newInode(h *tar.Header, r io.Reader) (*inode, error) {
	i, err := b.attributes(h)
	if err != nil {
		return nil, err
	}
	if err := b.storeXattrs(h, i); err != nil {
		return nil, err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		i.mode |= modeRegular
		return i, b.storeFile(h, r, i)
	case tar.TypeDir:
		i.mode |= modeDir
		i.dir = &directory{}
	case tar.TypeSymlink:
		i.mode = modeSymlink | 0o777 // Linux knows no other
		return i, b.storeSymlink(h, i)
	case tar.TypeChar, tar.TypeBlock:
		i.mode |= modeChar
		if h.Typeflag == tar.TypeBlock {
			i.mode = i.mode&^modeType | modeBlock
		}
		number, ok := deviceNumber(h.Devmajor, h.Devminor)
		if !ok {
			return nil, &EntryError{Path: h.Name, Reason: fmt.Sprintf("has the device number %d:%d, which Linux has not", h.Devmajor, h.Devminor)}
		}
		i.block = number
	case tar.TypeFifo:
		i.mode |= modeFIFO
	default:
		return nil, &EntryError{Path: h.Name, Reason: fmt.Sprintf("is of tar type %q, which has no meaning in an image", h.Typeflag)}
	}
	return i, nil
}

// attributes takes over owner, permission bits and time.
func (b *Builder) attributes(h *tar.Header) (*inode, error) {
	// The highest user number means "none" in Linux.
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return nil, &EntryError{Path: h.Name, Reason: fmt.Sprintf("has the owner %d:%d, which Linux has not", h.Uid, h.Gid)}
	}
	return &inode{
		mode: uint16(h.Mode & 0o7777), uid: uint32(h.Uid), gid: uint32(h.Gid),
		mtime: h.ModTime.Unix(), mtimeNsec: uint32(h.ModTime.Nanosecond()),
	}, nil
}

// storeFile writes a regular file's whole blocks to the image and its end, if
// that is short, to the side file.
func (b *Builder) storeFile(h *tar.Header, r io.Reader, i *inode) error {
	if h.Size > b.limits.FileSize {
		return &LimitError{What: "bytes in one file", Limit: b.limits.FileSize, Path: h.Name}
	}
	if err := b.charge(h.Size, h.Name); err != nil {
		return err
	}
	i.size = h.Size
	whole, tail := h.Size, h.Size%blockSize
	if tail > 0 && tail <= inlineMax && inodeSize+int64(i.xattrLen)+tail <= blockSize {
		i.inline = true
		whole -= tail
	}
	if whole > 0 {
		block, err := b.startBlocks(whole)
		if err != nil {
			return err
		}
		i.block = block
		if err := b.data.copy(r, whole); err != nil {
			return err
		}
		b.data.pad()
	}
	if i.inline {
		var err error
		i.tailAt, err = b.side.copy(r, tail)
		return err
	}
	return nil
}

// storeSymlink keeps the target in the side file, where path lookups read it, and
// in a block of its own when it does not fit behind the inode.
func (b *Builder) storeSymlink(h *tar.Header, i *inode) error {
	target := h.Linkname
	if len(target) > targetMax {
		return &LimitError{What: "bytes in a symbolic link", Limit: targetMax, Path: h.Name}
	}
	if target == "" {
		return &EntryError{Path: h.Name, Reason: "is a symbolic link to nothing"}
	}
	i.size = int64(len(target))
	if err := b.charge(i.size, h.Name); err != nil {
		return err
	}
	var err error
	if i.tailAt, err = b.side.add([]byte(target)); err != nil {
		return err
	}
	if i.inline = inodeSize+int64(i.xattrLen)+i.size <= blockSize; i.inline {
		return nil
	}
	if i.block, err = b.startBlocks(i.size); err != nil {
		return err
	}
	if _, err := b.data.Write([]byte(target)); err != nil {
		return err
	}
	b.data.pad()
	return nil
}

// startBlocks returns the block at which n bytes may begin.
func (b *Builder) startBlocks(n int64) (uint32, error) {
	first := b.data.next()
	if int64(first)+n/blockSize+1 >= math.MaxUint32 {
		return 0, &LimitError{What: "blocks of 4 KiB", Limit: math.MaxUint32}
	}
	return first, nil
}

// punch frees the blocks of a file that no name is left of.
func (b *Builder) punch(i *inode) error {
	whole := i.size
	if i.inline {
		whole -= i.size % blockSize
	}
	return b.data.erase(i.block, uint32((whole+blockSize-1)/blockSize))
}
