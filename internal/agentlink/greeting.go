package agentlink

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// The greeting, numbers big-endian:
//
//	guest: 4 bytes magic "IIIG", 4 version, 2 length, token
//	host:  4 bytes magic "IIIW", 4 version, 1 verdict (0 welcome, 1 refused),
//	       8 wall clock (Unix nanoseconds), 2 length, reason
//
// Magic and version keep their place in every later version, and so does the
// whole of the host's answer, so that a refusal can always be read.
const (
	greetMagic   = "IIIG"
	welcomeMagic = "IIIW"
	greetHead    = len(greetMagic) + 4 + 2
	welcomeHead  = len(welcomeMagic) + 4 + 1 + 8 + 2

	maxToken  = 256
	maxReason = 1024

	verdictWelcome = 0
	verdictRefused = 1

	// greetTimeout bounds the exchange. An emulated guest on a busy host may
	// take seconds for it.
	greetTimeout = 30 * time.Second
)

// ErrRefused is in the error of [Greet] when the host answered that it does not
// want this agent. Trying again on the same VM is of no use.
var ErrRefused = errors.New("the host refused the link")

// Greet introduces the agent: it sends the token, at most 256 bytes, and reads
// the host's verdict. On success it returns the host's wall clock at that
// moment; c then carries the next protocol from its first byte. It takes at
// most 30 s and leaves c without a deadline. After an error c is of no use,
// except on a serial port, which may be resynchronised unless the error is
// [ErrRefused].
func Greet(c Conn, token string) (hostTime time.Time, err error) {
	if len(token) > maxToken {
		return time.Time{}, fmt.Errorf("greeting: token has %d bytes, more than %d", len(token), maxToken)
	}
	stop, err := limit(c)
	if err != nil {
		return time.Time{}, err
	}
	defer func() { err = stop(err) }()

	msg := make([]byte, 0, greetHead+len(token))
	msg = append(msg, greetMagic...)
	msg = binary.BigEndian.AppendUint32(msg, ProtocolVersion)
	msg = binary.BigEndian.AppendUint16(msg, uint16(len(token)))
	msg = append(msg, token...)
	if _, err := c.Write(msg); err != nil {
		return time.Time{}, fmt.Errorf("greeting: %w", err)
	}
	return readWelcome(c)
}

func readWelcome(c Conn) (time.Time, error) {
	var head [welcomeHead]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return time.Time{}, fmt.Errorf("greeting: read the answer: %w", err)
	}
	if string(head[:4]) != welcomeMagic {
		return time.Time{}, fmt.Errorf("greeting: the answer begins with %q, not %q", head[:4], welcomeMagic)
	}
	length := int(binary.BigEndian.Uint16(head[17:]))
	if length > maxReason {
		return time.Time{}, fmt.Errorf("greeting: the answer claims a reason of %d bytes, more than %d", length, maxReason)
	}
	reason := make([]byte, length)
	if _, err := io.ReadFull(c, reason); err != nil {
		return time.Time{}, fmt.Errorf("greeting: read the answer: %w", err)
	}
	if head[8] != verdictWelcome {
		return time.Time{}, fmt.Errorf("greeting: %w: %q", ErrRefused, reason)
	}
	if v := binary.BigEndian.Uint32(head[4:]); v != ProtocolVersion {
		return time.Time{}, versionError("greeting", v)
	}
	return time.Unix(0, int64(binary.BigEndian.Uint64(head[9:]))), nil
}

// Welcome is the host's part: it reads the greeting, compares the token in
// constant time, and answers with now, which is the host's wall clock. An agent
// of another version or with another token is told so, and Welcome returns the
// same as an error. It takes at most 30 s, reads nothing beyond the greeting,
// and leaves c without a deadline. After an error the caller closes c or
// resynchronises it.
func Welcome(c Conn, token string, now time.Time) (err error) {
	stop, err := limit(c)
	if err != nil {
		return err
	}
	defer func() { err = stop(err) }()

	verdict, err := readGreeting(c, token)
	if err != nil {
		return err
	}
	answer := make([]byte, 0, welcomeHead+maxReason)
	answer = append(answer, welcomeMagic...)
	answer = binary.BigEndian.AppendUint32(answer, ProtocolVersion)
	reason := ""
	if verdict == nil {
		answer = append(answer, verdictWelcome)
	} else {
		answer = append(answer, verdictRefused)
		reason = verdict.Error()
		reason = reason[:min(len(reason), maxReason)]
	}
	answer = binary.BigEndian.AppendUint64(answer, uint64(now.UnixNano()))
	answer = binary.BigEndian.AppendUint16(answer, uint16(len(reason)))
	answer = append(answer, reason...)
	if _, err := c.Write(answer); err != nil {
		return errors.Join(verdict, fmt.Errorf("greeting: answer: %w", err))
	}
	return verdict
}

// readGreeting returns why the agent is refused as verdict, and as err what
// leaves nobody to answer to.
func readGreeting(c Conn, token string) (verdict, err error) {
	var head [greetHead]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return nil, fmt.Errorf("greeting: %w", err)
	}
	if string(head[:4]) != greetMagic {
		return nil, fmt.Errorf("greeting: it begins with %q, not %q", head[:4], greetMagic)
	}
	if v := binary.BigEndian.Uint32(head[4:]); v != ProtocolVersion {
		return versionError("greeting", v), nil
	}
	length := int(binary.BigEndian.Uint16(head[8:]))
	if length > maxToken {
		return nil, fmt.Errorf("greeting: it claims a token of %d bytes, more than %d", length, maxToken)
	}
	theirs := make([]byte, length)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return nil, fmt.Errorf("greeting: %w", err)
	}
	// An empty token proves nothing, even if ours were empty by mistake.
	if token == "" || subtle.ConstantTimeCompare(theirs, []byte(token)) != 1 {
		return errors.New("greeting: wrong token: it does not come from this VM's agent"), nil
	}
	return nil, nil
}

// limit puts the deadline on c; stop takes it off.
func limit(c Conn) (stop func(error) error, err error) {
	if err := c.SetDeadline(time.Now().Add(greetTimeout)); err != nil {
		return nil, fmt.Errorf("greeting: %w", err)
	}
	return func(err error) error {
		if clearErr := c.SetDeadline(time.Time{}); clearErr != nil && err == nil {
			return fmt.Errorf("greeting: %w", clearErr)
		}
		return err
	}, nil
}
