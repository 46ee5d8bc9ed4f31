package agentlink

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"
)

// A serial port has no connections: after one end drops a session, bytes of it
// are still under way, in both directions, and the other end may not even
// notice. Before HTTP/2 the ends therefore agree on a place in each stream. Each
// attempt of each end has its own new number, H the host's, G the guest's:
//
//	guest  REQ 0 G   when no HEL comes: ends a session that only the host
//	                 still believes in
//	host   HEL H 0   again every 100 ms until answered
//	guest  ACK H G   to each HEL
//	host   GO_ H G   once; the host's next byte belongs to what follows
//	guest  UP_ H G   once; the guest's next byte belongs to what follows
//
// Each end throws away all before the line it waits for. UP_ exists because the
// host may have sent several HEL, so that more ACK follow the first; the numbers
// make sure that no line of an earlier attempt is taken for one of this.
//
// A line is "\nIII-LINK " verb " ", H and G as 16 hexadecimal digits each, "\n". Read
// as the head of an HTTP/2 frame it claims 0x0a4949 bytes, above every frame limit, so a
// peer still in an old session gives up at once, unless it is in the middle of a
// frame; to end that too, each REQ and some HEL are preceded by more newlines
// than the largest frame has bytes.
const (
	linePrefix = "\nIII-LINK "
	verbAsk    = "REQ"
	verbHello  = "HEL"
	verbAck    = "ACK"
	verbGo     = "GO_"
	verbUp     = "UP_"
	verbSize   = 3
	nonceSize  = 16
	noNonce    = "0000000000000000"
	lineSize   = len(linePrefix) + verbSize + 1 + 2*nonceSize + 1

	// padSize exceeds HTTP/2's default largest frame, 16 384 bytes and a head.
	padSize = 20 << 10
	// padFirst and padEvery say which HEL are padded: not the first ones, since
	// a guest that just booted has no old session.
	padFirst = 5
	padEvery = 20

	// step is how long one read or write waits before the context is looked at
	// again, and so the pause between two HEL.
	step = 100 * time.Millisecond
	// askFirst is how long the guest waits for HEL before it sends REQ, askEvery
	// the pause until the next. A host without a session needs no REQ.
	askFirst = 500 * time.Millisecond
	askEvery = 2 * time.Second
	// upTimeout is how long the host waits for UP_ before a new attempt.
	upTimeout = 5 * time.Second
)

// ResyncGuest waits on c until the host has resynchronised the link. When it
// returns nil, the next byte read is the first the host sent after it, and the
// host will get the next byte written. It discards whatever the host sent
// before, in constant memory, and never reads beyond the host's last line. It
// ends with ctx's error within about 100 ms of ctx's end; other errors are c's.
// c is left without a deadline.
func ResyncGuest(ctx context.Context, c Conn) (err error) {
	s := syncer{c: c}
	defer func() { err = s.finish(err) }()
	ours, err := newNonce()
	if err != nil {
		return err
	}
	theirs := ""
	ask := time.Now().Add(askFirst)
	for {
		got, err := s.next(ctx, ask)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			ask = time.Now().Add(askEvery)
			if err := s.ask(ctx, ours); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		switch {
		case got.verb == verbHello:
			theirs = got.host
			if err := s.send(ctx, line{verbAck, theirs, ours}); err != nil {
				return err
			}
		case got == line{verbGo, theirs, ours}:
			return s.send(ctx, line{verbUp, theirs, ours})
		}
	}
}

// ResyncHost is the host's part of [ResyncGuest], with the same promises. It
// keeps asking until the guest answers, be it still booting, or ctx ends.
func ResyncHost(ctx context.Context, c Conn) (err error) {
	s := syncer{c: c}
	defer func() { err = s.finish(err) }()
	hellos := 0
	for {
		nonce, err := newNonce()
		if err != nil {
			return err
		}
		theirs, err := s.untilAck(ctx, nonce, &hellos)
		if err != nil {
			return err
		}
		err = s.goUntilUp(ctx, nonce, theirs)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

func newNonce() (string, error) {
	var raw [nonceSize / 2]byte
	if _, err := rand.Read(raw[:]); err != nil {
		return "", fmt.Errorf("resync: %w", err)
	}
	return hex.EncodeToString(raw[:]), nil
}

// syncer finds lines in the stream of c.
type syncer struct {
	c Conn
	// buf holds the bytes read that may begin a line, never more than one line.
	buf [lineSize]byte
	n   int
}

func (s *syncer) finish(err error) error {
	if clearErr := s.c.SetDeadline(time.Time{}); err == nil && clearErr != nil {
		err = clearErr
	}
	if err != nil {
		return fmt.Errorf("resync: %w", err)
	}
	return nil
}

// untilAck sends HEL until the guest answers, and returns the guest's number.
func (s *syncer) untilAck(ctx context.Context, ours string, hellos *int) (theirs string, err error) {
	for {
		if err := s.hello(ctx, ours, *hellos); err != nil {
			return "", err
		}
		*hellos++
		until := time.Now().Add(step)
		for {
			got, err := s.next(ctx, until)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return "", err
			}
			if got.verb == verbAck && got.host == ours {
				return got.guest, nil
			}
		}
	}
}

// goUntilUp sends GO_ and waits for UP_. A guest that started over meanwhile
// answers an old HEL with a new number, and gets a GO_ of its own.
func (s *syncer) goUntilUp(ctx context.Context, ours, theirs string) error {
	if err := s.send(ctx, line{verbGo, ours, theirs}); err != nil {
		return err
	}
	until := time.Now().Add(upTimeout)
	for {
		got, err := s.next(ctx, until)
		if err != nil {
			return err
		}
		switch {
		case got == line{verbUp, ours, theirs}:
			return nil
		case got.verb == verbAck && got.host == ours && got.guest != theirs:
			theirs = got.guest
			if err := s.send(ctx, line{verbGo, ours, theirs}); err != nil {
				return err
			}
		}
	}
}

// hello writes what it can of the n-th HEL within one step: a guest that reads
// nothing must not keep the host from reading. A torn line does no harm, the
// next one begins with a newline.
func (s *syncer) hello(ctx context.Context, nonce string, n int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	msg := line{verbHello, nonce, noNonce}.bytes()
	if n >= padFirst && (n-padFirst)%padEvery == 0 {
		msg = append(padding(), msg...)
	}
	if err := s.c.SetDeadline(time.Now().Add(step)); err != nil {
		return err
	}
	_, err := s.c.Write(msg)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// ask makes a host that is still in an old session leave it.
func (s *syncer) ask(ctx context.Context, ours string) error {
	return s.write(ctx, append(padding(), line{verbAsk, noNonce, ours}.bytes()...))
}

func padding() []byte { return bytes.Repeat([]byte("\n"), padSize) }

// send writes one whole line.
func (s *syncer) send(ctx context.Context, l line) error {
	return s.write(ctx, l.bytes())
}

// write writes all of rest, however long that takes.
func (s *syncer) write(ctx context.Context, rest []byte) error {
	for len(rest) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.c.SetDeadline(time.Now().Add(step)); err != nil {
			return err
		}
		n, err := s.c.Write(rest)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// line is one line: its verb and the numbers of host and guest.
type line struct{ verb, host, guest string }

func (l line) bytes() []byte {
	return []byte(linePrefix + l.verb + " " + l.host + l.guest + "\n")
}

// next returns the next line of the stream. It reads only as many bytes as the
// shortest way to the end of a line still needs, so it never takes a byte of
// what follows it. It ends with os.ErrDeadlineExceeded at until.
func (s *syncer) next(ctx context.Context, until time.Time) (line, error) {
	for s.n < lineSize {
		if err := ctx.Err(); err != nil {
			return line{}, err
		}
		now := time.Now()
		if !now.Before(until) {
			return line{}, os.ErrDeadlineExceeded
		}
		deadline := now.Add(step)
		if until.Before(deadline) {
			deadline = until
		}
		if err := s.c.SetDeadline(deadline); err != nil {
			return line{}, err
		}
		n, err := s.c.Read(s.buf[s.n:])
		s.n += n
		s.trim()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return line{}, err
		}
	}
	s.n = 0
	rest := string(s.buf[len(linePrefix):])
	verb, nonces := rest[:verbSize], rest[verbSize+1:]
	return line{verb, nonces[:nonceSize], nonces[nonceSize : 2*nonceSize]}, nil
}

// trim drops bytes from the front of buf until what is left may begin a line.
func (s *syncer) trim() {
	b := s.buf[:s.n]
	for len(b) > 0 && !beginsLine(b) {
		next := bytes.IndexByte(b[1:], '\n')
		if next < 0 {
			b = nil
			break
		}
		b = b[1+next:]
	}
	s.n = copy(s.buf[:], b)
}

func beginsLine(b []byte) bool {
	for i, c := range b {
		var ok bool
		switch at := i - len(linePrefix); {
		case at < 0:
			ok = c == linePrefix[i]
		case at < verbSize:
			ok = c == '_' || 'A' <= c && c <= 'Z'
		case at == verbSize:
			ok = c == ' '
		case i == lineSize-1:
			ok = c == '\n'
		default:
			ok = '0' <= c && c <= '9' || 'a' <= c && c <= 'f'
		}
		if !ok {
			return false
		}
	}
	return true
}
