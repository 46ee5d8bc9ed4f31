package erofs

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// Prefix numbers of xattr names (EROFS_XATTR_INDEX_*).
const (
	indexUser = 1 + iota
	indexACLAccess
	indexACLDefault
	indexTrusted
	_ // lustre
	indexSecurity
)

// paxXattr begins the PAX records that hold binary xattrs; paxACL those that hold
// ACLs as text.
const (
	paxXattr = "SCHILY.xattr."
	paxACL   = "SCHILY.acl."
)

// valueMax is the longest value that the format can hold, one byte less than
// Linux allows. areaMax bounds all of an inode's xattrs: Linux could not list more.
const (
	valueMax = 1<<16 - 1
	areaMax  = 1 << 17
)

type xattr struct {
	index byte
	name  string // behind the prefix
	value string
}

// storeXattrs encodes h's xattrs to the side file.
func (b *Builder) storeXattrs(h *tar.Header, i *inode) error {
	var list []xattr
	for key, value := range h.PAXRecords {
		if strings.HasPrefix(key, paxACL) {
			return &EntryError{Path: h.Name, Reason: "has an ACL as text (" + key + "), which names users that we cannot number"}
		}
		full, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		x, ok := splitName(full)
		if !ok {
			b.stats.DroppedXattrs++
			continue
		}
		x.value = value
		if err := x.check(h, full); err != nil {
			return err
		}
		list = append(list, x)
	}
	if len(list) == 0 {
		return nil
	}
	area := encodeXattrs(list)
	if len(area) > areaMax {
		return &LimitError{What: "bytes of xattrs in one file", Limit: areaMax, Path: h.Name}
	}
	if err := b.charge(int64(len(area)), h.Name); err != nil {
		return err
	}
	at, err := b.side.add(area)
	i.xattrAt, i.xattrLen = at, uint32(len(area))
	return err
}

// splitName finds the number of name's prefix. It is false for a name that Linux
// has no place for.
func splitName(name string) (xattr, bool) {
	switch name {
	case "system.posix_acl_access":
		return xattr{index: indexACLAccess}, true
	case "system.posix_acl_default":
		return xattr{index: indexACLDefault}, true
	}
	prefix, rest, ok := strings.Cut(name, ".")
	if !ok || rest == "" {
		return xattr{}, false
	}
	switch prefix {
	case "user":
		return xattr{index: indexUser, name: rest}, true
	case "trusted":
		return xattr{index: indexTrusted, name: rest}, true
	case "security":
		return xattr{index: indexSecurity, name: rest}, true
	}
	return xattr{}, false
}

// check refuses what the kernel could not show again.
func (x xattr) check(h *tar.Header, full string) error {
	if len(full) > nameMax || strings.IndexByte(full, 0) >= 0 {
		return &EntryError{Path: h.Name, Reason: fmt.Sprintf("has an xattr with an impossible name, %q", clip(full))}
	}
	if len(x.value) > valueMax {
		return &LimitError{What: "bytes in an xattr", Limit: valueMax, Path: h.Name}
	}
	if x.index != indexACLAccess && x.index != indexACLDefault {
		return nil
	}
	// Version 2, then entries of tag, permissions and id (linux/posix_acl_xattr.h).
	if len(x.value) < 4 || len(x.value)%8 != 4 || binary.LittleEndian.Uint32([]byte(x.value)) != 2 {
		return &EntryError{Path: h.Name, Reason: "has a damaged ACL in " + full}
	}
	return nil
}

// encodeXattrs returns the header and the entries, sorted, each padded to 4 bytes.
func encodeXattrs(list []xattr) []byte {
	slices.SortFunc(list, func(a, b xattr) int {
		if a.index != b.index {
			return int(a.index) - int(b.index)
		}
		return strings.Compare(a.name, b.name)
	})
	var buf bytes.Buffer
	buf.Write(make([]byte, xattrHeadSize))
	for _, x := range list {
		buf.WriteByte(byte(len(x.name)))
		buf.WriteByte(x.index)
		buf.Write(binary.LittleEndian.AppendUint16(nil, uint16(len(x.value))))
		buf.WriteString(x.name)
		buf.WriteString(x.value)
		for buf.Len()%xattrAlign != 0 {
			buf.WriteByte(0)
		}
	}
	return buf.Bytes()
}
