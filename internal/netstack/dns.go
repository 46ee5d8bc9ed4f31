package netstack

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// dnsHeader is the size of a message's header, and plainUDP of the longest
	// answer to a question without EDNS (RFC 1035, 4.1.1 and 4.2.1).
	dnsHeader = 12
	plainUDP  = 512
	// maxUDPAnswer is the longest answer over UDP that is asked for, and maxQuery
	// the longest question that is read: a question has one name, of 255 bytes.
	maxUDPAnswer = 4096
	maxQuery     = 4096
	// maxQueries bounds what is asked at the same time; beyond it the guest is told
	// that the server failed.
	maxQueries = 128
	// dnsIdle ends a TCP connection without questions (RFC 7766, 6.2.3).
	dnsIdle = 10 * time.Second
	// hostTTL is how long, in seconds, the guest may remember the gateway's name.
	hostTTL = 60
	// dnsZone is answered here, and never asked of others.
	dnsZone = "iii.internal."
	// prohibitedCode explains a denial (RFC 8914, 4.19), in EDNS's option 15.
	prohibitedCode   = 18
	extendedErrorOpt = 15
)

// dnsServer answers the guest's questions at the gateway's port 53. A question is
// not passed on but asked anew, with its name, its type and the EDNS flags that
// matter, so that nothing else of the guest's message gets out. The answer is
// passed on as it came.
//
// A name that the policy denies does not exist (NXDOMAIN): what asks for it ends
// at once, where REFUSED would make it try again. EDNS clients are also told that
// it is prohibited.
type dnsServer struct {
	g        *Gateway
	resolver *resolver
	slots    chan struct{}
}

func newDNSServer(g *Gateway) *dnsServer {
	conf := g.opts.ResolvConf
	if conf == "" {
		conf = "/etc/resolv.conf"
	}
	return &dnsServer{
		g:        g,
		resolver: &resolver{conf: conf, dial: g.opts.Dial},
		slots:    make(chan struct{}, maxQueries),
	}
}

// answerDatagram answers a question that came in a datagram.
func (g *Gateway) answerDatagram(id stack.TransportEndpointID, network tcpip.NetworkProtocolNumber, payload []byte) {
	if len(payload) < dnsHeader || len(payload) > maxQuery {
		return
	}
	select {
	case g.dns.slots <- struct{}{}:
	default:
		if q, rcode := parseQuery(payload); rcode == dnsmessage.RCodeSuccess {
			g.sendDatagram(id, network, q.fail(dnsmessage.RCodeServerFailure))
		}
		return
	}
	query := append([]byte(nil), payload...)
	g.running.Go(func() {
		defer func() { <-g.dns.slots }()
		if reply := g.dns.answer(query, "udp"); reply != nil {
			g.sendDatagram(id, network, reply)
		}
	})
}

// serveDNS answers the questions of a TCP connection, one after the other.
func (g *Gateway) serveDNS(conn net.Conn) {
	stop := g.onEnd(func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	for g.ctx.Err() == nil {
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		query, err := readMessage(conn, maxQuery)
		if err != nil || len(query) < dnsHeader {
			return
		}
		var reply []byte
		select {
		case g.dns.slots <- struct{}{}:
			reply = g.dns.answer(query, "tcp")
			<-g.dns.slots
		case <-g.ctx.Done():
			return
		}
		if reply == nil || len(reply) > 0xffff {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(dnsIdle))
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

// answer returns the reply to a message of the guest, nil for none.
func (d *dnsServer) answer(message []byte, network string) []byte {
	q, rcode := parseQuery(message)
	switch {
	case q == nil:
		return nil
	case rcode != dnsmessage.RCodeSuccess:
		return q.fail(rcode)
	}
	d.g.counters.query()
	name := strings.ToLower(q.question.Name.String())
	if name == dnsZone || strings.HasSuffix(name, "."+dnsZone) {
		return d.own(q, name)
	}
	if err := d.g.checker.AllowName(name); err != nil {
		d.g.denials.name(strings.TrimSuffix(name, "."), reasonOf(err))
		return q.deny()
	}
	reply, err := d.resolve(q, network)
	if err != nil {
		return q.fail(dnsmessage.RCodeServerFailure)
	}
	d.learn(q, reply)
	binary.BigEndian.PutUint16(reply, q.id)
	if network == "udp" && len(reply) > q.size() {
		return q.truncate(reply)
	}
	return reply
}

// resolve asks the host's servers in the way that the guest asked. A server that
// does not speak TCP is asked by UDP.
func (d *dnsServer) resolve(q *query, network string) ([]byte, error) {
	message, err := q.again()
	if err != nil {
		return nil, err
	}
	reply, err := d.resolver.ask(d.g.ctx, network, message, q.question)
	if err != nil && network == "tcp" && d.g.ctx.Err() == nil {
		return d.resolver.ask(d.g.ctx, "udp", message, q.question)
	}
	return reply, err
}

// own answers for the zone of the gateway's own names.
func (d *dnsServer) own(q *query, name string) []byte {
	if name != HostName+"." || len(d.g.hostPorts) == 0 {
		return q.fail(dnsmessage.RCodeNameError)
	}
	var addrs []netip.Addr
	switch q.question.Type {
	case dnsmessage.TypeA:
		addrs = append(addrs, d.g.opts.Gateway4)
	case dnsmessage.TypeAAAA:
		if d.g.opts.Gateway6.IsValid() {
			addrs = append(addrs, d.g.opts.Gateway6)
		}
	}
	return q.addresses(addrs, hostTTL)
}

// learn tells the checker which addresses the guest now knows for a name: those
// of the answer that belong to it, by way of aliases where there are any.
func (d *dnsServer) learn(q *query, reply []byte) {
	var parser dnsmessage.Parser
	if _, err := parser.Start(reply); err != nil || parser.SkipAllQuestions() != nil {
		return
	}
	records, err := parser.AllAnswers()
	if err != nil {
		return
	}
	aliases := map[string][]string{}
	for _, record := range records {
		if alias, ok := record.Body.(*dnsmessage.CNAMEResource); ok {
			from := strings.ToLower(record.Header.Name.String())
			aliases[from] = append(aliases[from], strings.ToLower(alias.CNAME.String()))
		}
	}
	names := map[string]bool{}
	for next := []string{strings.ToLower(q.question.Name.String())}; len(next) > 0; {
		name := next[len(next)-1]
		next = next[:len(next)-1]
		if !names[name] {
			names[name] = true
			next = append(next, aliases[name]...)
		}
	}
	for _, record := range records {
		if !names[strings.ToLower(record.Header.Name.String())] {
			continue
		}
		var addr netip.Addr
		switch body := record.Body.(type) {
		case *dnsmessage.AResource:
			addr = netip.AddrFrom4(body.A)
		case *dnsmessage.AAAAResource:
			addr = netip.AddrFrom16(body.AAAA)
		default:
			continue
		}
		d.g.checker.Learn(q.question.Name.String(), []netip.Addr{addr}, time.Duration(record.Header.TTL)*time.Second)
	}
}
