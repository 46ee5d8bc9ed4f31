package netstack

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	// dnsPort is that of DNS, on both sides.
	dnsPort = 53
	// maxServers is how many name servers resolv.conf may have (resolv.conf(5)).
	maxServers = 3
	// serverTimeout bounds the wait for one server's answer, rounds how often all
	// are asked. Together they stay below what guests wait for one server (glibc:
	// 5 s) as long as one of them answers.
	serverTimeout = 2 * time.Second
	rounds        = 2
	// confAge is how long resolv.conf is not looked at again.
	confAge = time.Second
	// maxConf is the most of resolv.conf that is read.
	maxConf = 64 << 10
)

// errNoServers tells that the host has no resolver.
var errNoServers = errors.New("the host names no DNS server")

// resolver asks the host's name servers.
type resolver struct {
	conf string
	dial func(ctx context.Context, network, address string) (net.Conn, error)

	mu      sync.Mutex
	checked time.Time
	stamp   os.FileInfo
	servers []string // address and port
}

// current returns the host's name servers as they are now.
func (r *resolver) current() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.checked) < confAge {
		return r.servers
	}
	info, err := os.Stat(r.conf)
	if err != nil {
		r.servers, r.stamp = nil, nil
		return nil
	}
	r.checked = time.Now()
	if r.stamp != nil && os.SameFile(r.stamp, info) && r.stamp.ModTime().Equal(info.ModTime()) && r.stamp.Size() == info.Size() {
		return r.servers
	}
	f, err := os.Open(r.conf)
	if err != nil {
		r.servers, r.stamp = nil, nil
		return nil
	}
	defer f.Close() //nolint:errcheck // it was only read
	text, err := io.ReadAll(io.LimitReader(f, maxConf))
	if err != nil {
		r.servers, r.stamp = nil, nil
		return nil
	}
	r.stamp = info
	r.servers = nameServers(string(text))
	return r.servers
}

// nameServers reads the name servers out of a resolv.conf.
func nameServers(text string) []string {
	var servers []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" || len(servers) == maxServers {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(addr, dnsPort).String())
		}
	}
	return servers
}

// ask sends query to the servers in turn and returns the first answer that is
// one: an error of one server is the answer only where no other has a better. The
// network is "udp" or "tcp". It fails at once when no server can be reached.
func (r *resolver) ask(ctx context.Context, network string, query []byte, question dnsmessage.Question) ([]byte, error) {
	servers := r.current()
	if len(servers) == 0 {
		return nil, errNoServers
	}
	var failed []byte // an answer, but one that another server may better
	var errs error
	for range rounds {
		waited := false
		for _, server := range servers {
			reply, err := r.askOne(ctx, network, server, query, question)
			switch {
			case ctx.Err() != nil:
				return nil, ctx.Err()
			case err != nil:
				errs = errors.Join(errs, err)
				var timeout net.Error
				waited = waited || errors.As(err, &timeout) && timeout.Timeout()
			case serverFailed(reply):
				failed = reply
			default:
				return reply, nil
			}
		}
		if failed != nil {
			return failed, nil
		}
		if !waited {
			break // asking again would end the same
		}
	}
	return nil, errs
}

func serverFailed(reply []byte) bool {
	switch dnsmessage.RCode(reply[3] & 0xf) {
	case dnsmessage.RCodeServerFailure, dnsmessage.RCodeRefused, dnsmessage.RCodeNotImplemented:
		return true
	}
	return false
}

// askOne asks one server, from a port of its own and under an id of its own.
func (r *resolver) askOne(ctx context.Context, network, server string, query []byte, question dnsmessage.Question) ([]byte, error) {
	deadline := time.Now().Add(serverTimeout)
	dialing, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	conn, err := r.dial(dialing, network, server)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", server, err)
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	// By the caller's end alone: the deadline's error has to be a time-out.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(deadline)
	query = bytes.Clone(query)
	if _, err := rand.Read(query[:2]); err != nil {
		return nil, err
	}
	if network == "tcp" {
		query = append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	}
	if _, err := conn.Write(query); err != nil {
		return nil, fmt.Errorf("ask %s: %w", server, err)
	}
	for {
		reply, err := readReply(network, conn)
		if err != nil {
			return nil, fmt.Errorf("ask %s: %w", server, err)
		}
		id := query[:2]
		if network == "tcp" {
			id = query[2:4]
		}
		if isReply(reply, id, question) {
			return reply, nil
		}
		// Somebody guesses: the real answer may still come.
	}
}

func readReply(network string, conn net.Conn) ([]byte, error) {
	if network == "tcp" {
		return readMessage(conn, maxMessage)
	}
	buf := make([]byte, 4096) // what dnsServer asks for at most
	n, err := conn.Read(buf)
	return buf[:n], err
}

// maxMessage is the longest message of DNS over TCP.
const maxMessage = 1<<16 - 1

var errLongMessage = errors.New("the message is longer than any that is expected")

// readMessage reads one message of DNS over TCP: its length first, and nothing
// behind one that is larger than limit.
func readMessage(r io.Reader, limit int) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	size := int(binary.BigEndian.Uint16(length[:]))
	if size > limit {
		return nil, errLongMessage
	}
	message := make([]byte, size)
	_, err := io.ReadFull(r, message)
	return message, err
}

// isReply tells whether message answers question under id.
func isReply(message, id []byte, question dnsmessage.Question) bool {
	if len(message) < dnsHeader || !bytes.Equal(message[:2], id) {
		return false
	}
	var parser dnsmessage.Parser
	header, err := parser.Start(message)
	if err != nil || !header.Response {
		return false
	}
	answered, err := parser.Question()
	if errors.Is(err, dnsmessage.ErrSectionDone) {
		// Some servers repeat no question in an error.
		return header.RCode != dnsmessage.RCodeSuccess
	}
	return err == nil && answered.Type == question.Type && answered.Class == question.Class &&
		strings.EqualFold(answered.Name.String(), question.Name.String())
}
