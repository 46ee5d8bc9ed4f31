package agentlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// The env frame, numbers big-endian:
//
//	4 bytes magic "IIIE", 4 version, 4 length, payload, 4 CRC-32C of all before
//
// The checksum finds torn and mixed-up bytes; it is no protection against a
// forger, and needs to be none: only the host can write to the port.
const (
	envMagic   = "IIIE"
	envHead    = len(envMagic) + 8
	envTrailer = 4
)

// WriteEnv sends payload, at most [MaxEnv] bytes, as one frame in one Write.
// The writer must keep its end open until the guest has read the frame: QEMU
// drops what is unread when the host end closes.
func WriteEnv(w io.Writer, payload []byte) error {
	if len(payload) > MaxEnv {
		return fmt.Errorf("env frame: payload has %d bytes, more than %d", len(payload), MaxEnv)
	}
	frame := make([]byte, 0, envHead+len(payload)+envTrailer)
	frame = append(frame, envMagic...)
	frame = binary.BigEndian.AppendUint32(frame, ProtocolVersion)
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(payload)))
	frame = append(frame, payload...)
	frame = binary.BigEndian.AppendUint32(frame, checksum(frame))
	if _, err := w.Write(frame); err != nil {
		return fmt.Errorf("env frame: %w", err)
	}
	return nil
}

// ReadEnv reads exactly one frame from r and returns its payload. It takes no
// more memory than the frame says, and refuses before allocating a frame that
// claims more than [MaxEnv]. A frame cut short is io.ErrUnexpectedEOF, none at
// all io.EOF.
func ReadEnv(r io.Reader) ([]byte, error) {
	var head [envHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("env frame: %w", err)
	}
	if string(head[:len(envMagic)]) != envMagic {
		return nil, fmt.Errorf("env frame: it begins with %q, not %q", head[:len(envMagic)], envMagic)
	}
	if v := binary.BigEndian.Uint32(head[len(envMagic):]); v != ProtocolVersion {
		return nil, versionError("env frame", v)
	}
	length := binary.BigEndian.Uint32(head[len(envMagic)+4:])
	if length > MaxEnv {
		return nil, fmt.Errorf("env frame: it claims %d bytes, more than %d", length, MaxEnv)
	}
	rest := make([]byte, int(length)+envTrailer)
	if _, err := io.ReadFull(r, rest); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("env frame: %w", err)
	}
	payload := rest[:length:length]
	sum := crc32.Update(checksum(head[:]), castagnoli(), payload)
	if sum != binary.BigEndian.Uint32(rest[length:]) {
		return nil, errors.New("env frame: checksum does not match: bytes were lost or changed on the port")
	}
	return payload, nil
}

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli()) }

// castagnoli is cached by hash/crc32, which also uses the CPU's instruction.
func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

func versionError(what string, theirs uint32) error {
	return fmt.Errorf("%s: the other end speaks protocol version %d, this one %d: "+
		"adapter, krun-shim and guest-agent must come from one build", what, theirs, ProtocolVersion)
}
