package erofs

import (
	"encoding/binary"
	"hash/crc32"
)

// Numbers of the on-disk format, all little endian (kernel: fs/erofs/erofs_fs.h).
const (
	blockSize  = 4096
	blockBits  = 12
	slotSize   = 32 // an inode's number is its offset in the metadata / 32
	inodeSize  = 64 // the extended inode
	direntSize = 12
	nameMax    = 255

	superOffset   = 1024
	superSize     = 128
	superMagic    = 0xE0F5E1E2
	compatChksum  = 0x1
	compatMtime   = 0x2
	formatPlain   = 0<<1 | 1 // extended inode, data in whole blocks
	formatInline  = 2<<1 | 1 // extended inode, the rest of the last block behind it
	xattrHeadSize = 12
	xattrAlign    = 4
)

// File types of a directory entry.
const (
	typeRegular = 1 + iota
	typeDir
	typeChar
	typeBlock
	typeFIFO
	typeSocket
	typeSymlink
)

// Type bits of a mode, as in Linux' stat.
const (
	modeType    = 0o170000
	modeSocket  = 0o140000
	modeSymlink = 0o120000
	modeRegular = 0o100000
	modeBlock   = 0o060000
	modeDir     = 0o040000
	modeChar    = 0o020000
	modeFIFO    = 0o010000
)

func direntType(mode uint16) byte {
	switch mode & modeType {
	case modeRegular:
		return typeRegular
	case modeDir:
		return typeDir
	case modeChar:
		return typeChar
	case modeBlock:
		return typeBlock
	case modeFIFO:
		return typeFIFO
	case modeSocket:
		return typeSocket
	default:
		return typeSymlink
	}
}

// deviceNumber is Linux' 32-bit encoding of a device: 12 bits major, 20 minor.
func deviceNumber(major, minor int64) (uint32, bool) {
	if major < 0 || major >= 1<<12 || minor < 0 || minor >= 1<<20 {
		return 0, false
	}
	return uint32(minor&0xff | major<<8 | minor&^0xff<<12), true
}

// superblock returns block 0. Its checksum is CRC-32C without the final
// inversion, over the block from the superblock on.
func superblock(rootNid uint16, inodes uint64, blocks, metaBlock uint32) []byte {
	block := make([]byte, blockSize)
	sb := block[superOffset:]
	le := binary.LittleEndian
	le.PutUint32(sb[0:], superMagic)
	le.PutUint32(sb[8:], compatChksum|compatMtime)
	sb[12] = blockBits
	le.PutUint16(sb[14:], rootNid)
	le.PutUint64(sb[16:], inodes)
	le.PutUint32(sb[36:], blocks)
	le.PutUint32(sb[40:], metaBlock)
	le.PutUint32(sb[4:], ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
	return block
}

// encodeInode writes i's 64 bytes to buf. number is for 32-bit stat only.
func encodeInode(buf []byte, i *inode, number uint32) {
	le := binary.LittleEndian
	format := uint16(formatPlain)
	if i.inline {
		format = formatInline
	}
	le.PutUint16(buf[0:], format)
	if i.xattrLen > 0 {
		le.PutUint16(buf[2:], uint16((i.xattrLen-xattrHeadSize)/xattrAlign+1))
	}
	le.PutUint16(buf[4:], i.mode)
	le.PutUint64(buf[8:], uint64(i.size))
	le.PutUint32(buf[16:], i.block)
	le.PutUint32(buf[20:], number)
	le.PutUint32(buf[24:], i.uid)
	le.PutUint32(buf[28:], i.gid)
	le.PutUint64(buf[32:], uint64(i.mtime))
	le.PutUint32(buf[40:], i.mtimeNsec)
	le.PutUint32(buf[44:], i.nlink)
}

func putDirent(buf []byte, nid uint64, nameOff int, fileType byte) {
	le := binary.LittleEndian
	le.PutUint64(buf[0:], nid)
	le.PutUint16(buf[8:], uint16(nameOff))
	buf[10] = fileType
	buf[11] = 0
}
