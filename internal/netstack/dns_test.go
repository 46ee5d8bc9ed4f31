package netstack_test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

const server1, server2 = "198.51.100.53", "198.51.100.54"

// zone is a name server: what it answers, and what it was asked.
type zone struct {
	mu      sync.Mutex
	records map[string][]dnsmessage.Resource // "a.test. TypeA"
	rcodes  map[string]dnsmessage.RCode
	asked   []string
	queries [][]byte
	mute    bool
}

func newZone() *zone {
	return &zone{records: map[string][]dnsmessage.Resource{}, rcodes: map[string]dnsmessage.RCode{}}
}

func (z *zone) set(name string, ttl uint32, bodies ...dnsmessage.ResourceBody) {
	z.mu.Lock()
	defer z.mu.Unlock()
	var all []dnsmessage.Resource
	kind := dnsmessage.TypeA
	for _, body := range bodies {
		owner := name
		if a, ok := body.(owned); ok {
			owner, body = a.name, a.ResourceBody
		}
		head := dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(owner), Class: dnsmessage.ClassINET, TTL: ttl}
		switch body.(type) {
		case *dnsmessage.AAAAResource:
			kind = dnsmessage.TypeAAAA
		case *dnsmessage.TXTResource:
			kind = dnsmessage.TypeTXT
		case *dnsmessage.SRVResource:
			kind = dnsmessage.TypeSRV
		}
		all = append(all, dnsmessage.Resource{Header: head, Body: body})
	}
	z.records[name+" "+kind.String()] = all
}

// owned is a record of another name than was asked for.
type owned struct {
	name string
	dnsmessage.ResourceBody
}

func a(text string) dnsmessage.ResourceBody {
	return &dnsmessage.AResource{A: netip.MustParseAddr(text).As4()}
}

func aaaa(text string) dnsmessage.ResourceBody {
	return &dnsmessage.AAAAResource{AAAA: netip.MustParseAddr(text).As16()}
}

func alias(owner, to string) dnsmessage.ResourceBody {
	return owned{owner, &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(to)}}
}

func (z *zone) questions() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.asked)
}

// answer answers one message; over UDP with at most what was asked for.
func (z *zone) answer(query []byte, udp bool) []byte {
	z.mu.Lock()
	defer z.mu.Unlock()
	var parser dnsmessage.Parser
	head, err := parser.Start(query)
	if err != nil {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	key := strings.ToLower(question.Name.String()) + " " + question.Type.String()
	z.asked = append(z.asked, key)
	z.queries = append(z.queries, slices.Clone(query))
	if z.mute {
		return nil
	}
	reply := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: head.ID, Response: true, RecursionDesired: true, RecursionAvailable: true, RCode: z.rcodes[key]},
		Questions: []dnsmessage.Question{question},
		Answers:   z.records[key],
	}
	packed, err := reply.Pack()
	if err != nil {
		panic(err)
	}
	if udp && len(packed) > 512 {
		reply.Truncated, reply.Answers = true, nil
		packed, _ = reply.Pack()
	}
	return packed
}

// serve serves z as the name server at addr.
func (z *zone) serve(t testing.TB, w *world, addr string) {
	w.packets(t, addr+":53", func(b []byte) [][]byte {
		if reply := z.answer(b, true); reply != nil {
			return [][]byte{reply}
		}
		return nil
	})
	w.listen(t, addr+":53", func(conn *net.TCPConn) {
		for {
			query, err := readDNS(conn)
			if err != nil {
				return
			}
			if reply := z.answer(query, false); reply != nil {
				_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...))
			}
		}
	})
}

func readDNS(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	message := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(r, message)
	return message, err
}

func question(id uint16, name string, kind dnsmessage.Type, edns int) []byte {
	message := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	if edns > 0 {
		message.Additionals = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("."), Type: dnsmessage.TypeOPT, Class: dnsmessage.Class(edns)},
			Body:   &dnsmessage.OPTResource{Options: []dnsmessage.Option{{Code: 65001, Data: []byte("smuggled")}}},
		}}
	}
	packed, err := message.Pack()
	if err != nil {
		panic(err)
	}
	return packed
}

// ask asks the gateway.
func (g *guest) ask(t testing.TB, tcp bool, message []byte) dnsmessage.Message {
	t.Helper()
	var reply []byte
	var err error
	if tcp {
		conn := g.mustTCP(t, "198.18.0.1:53")
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...))
		reply, err = readDNS(conn)
	} else {
		conn := g.udp(t, "198.18.0.1:53")
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = conn.Write(message)
		reply = make([]byte, 65535)
		var n int
		n, err = conn.Read(reply)
		reply = reply[:n]
	}
	if err != nil {
		t.Fatalf("no answer: %v\n%s", err, g.logs)
	}
	var parsed dnsmessage.Message
	if err := parsed.Unpack(reply); err != nil {
		t.Fatalf("answer %x: %v", reply, err)
	}
	if id := binary.BigEndian.Uint16(message); parsed.ID != id || !parsed.Response {
		t.Errorf("the answer to %d is %d", id, parsed.ID)
	}
	return parsed
}

func TestDNSPassesAnswersOn(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.set("a.test.", 60, a("203.0.113.5"), a("203.0.113.6"))
	z.set("a.test.", 60, aaaa("2001:db8::5"))
	z.set("srv.test.", 60, &dnsmessage.SRVResource{Priority: 1, Port: 443, Target: dnsmessage.MustNewName("a.test.")})
	text := strings.Repeat("x", 250)
	z.set("long.test.", 60, &dnsmessage.TXTResource{TXT: []string{text, text, text, text}})
	z.rcodes["gone.test. TypeA"] = dnsmessage.RCodeNameError
	z.rcodes["bad.test. TypeA"] = dnsmessage.RCodeServerFailure
	z.serve(t, w, server1)
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	for _, tcp := range []bool{false, true} {
		for i, test := range []struct {
			name  string
			kind  dnsmessage.Type
			rcode dnsmessage.RCode
			count int
		}{
			{"a.test.", dnsmessage.TypeA, dnsmessage.RCodeSuccess, 2},
			{"A.TEST.", dnsmessage.TypeAAAA, dnsmessage.RCodeSuccess, 1},
			{"srv.test.", dnsmessage.TypeSRV, dnsmessage.RCodeSuccess, 1},
			{"a.test.", dnsmessage.Type(65), dnsmessage.RCodeSuccess, 0},
			{"gone.test.", dnsmessage.TypeA, dnsmessage.RCodeNameError, 0},
			{"bad.test.", dnsmessage.TypeA, dnsmessage.RCodeServerFailure, 0},
		} {
			reply := g.ask(t, tcp, question(uint16(i+1), test.name, test.kind, i%2*1232))
			if reply.RCode != test.rcode || len(reply.Answers) != test.count || reply.Questions[0].Name.String() != test.name {
				t.Errorf("tcp %t: %s %s: %s with %d answers", tcp, test.name, test.kind, reply.RCode, len(reply.Answers))
			}
		}
	}
	// What is too long for a datagram says so, and comes by TCP.
	if reply := g.ask(t, false, question(9, "long.test.", dnsmessage.TypeTXT, 0)); !reply.Truncated {
		t.Error("a long answer is not truncated")
	}
	if reply := g.ask(t, true, question(9, "long.test.", dnsmessage.TypeTXT, 0)); reply.Truncated || len(reply.Answers) != 1 {
		t.Errorf("by TCP: %+v", reply.Header)
	}
	if s := g.Stats(); s.DNSQueries != 14 || s.BytesIn != 0 {
		t.Errorf("stats are %+v", s)
	}
	// Nothing of the guest's message but the question leaves.
	for _, query := range z.queries {
		if strings.Contains(string(query), "smuggled") {
			t.Error("an option of the guest's got out")
		}
	}
}

func TestDNSWhenResolversFail(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.set("a.test.", 60, a("203.0.113.5"))
	w.fail("udp", server1+":53", unix.ENETUNREACH)
	w.fail("tcp", server1+":53", unix.ENETUNREACH)
	conf := resolvConf(t)
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = conf })
	ask := func() dnsmessage.RCode {
		return g.ask(t, false, question(1, "a.test.", dnsmessage.TypeA, 0)).RCode
	}
	// No server, a server that cannot be reached, none again because the file is
	// gone: an error at once, and all is well when the host has a server again.
	if rcode := ask(); rcode != dnsmessage.RCodeServerFailure {
		t.Errorf("without a server: %s", rcode)
	}
	writeConf(t, conf, server1)
	eventually(t, "the new server is asked", func() bool {
		return ask() == dnsmessage.RCodeServerFailure && slices.Contains(w.dials(), "udp "+server1+":53")
	})
	if err := os.Remove(conf); err != nil {
		t.Fatal(err)
	}
	if rcode := ask(); rcode != dnsmessage.RCodeServerFailure {
		t.Errorf("without the file: %s", rcode)
	}
	z.serve(t, w, server2)
	writeConf(t, conf, server1, server2)
	eventually(t, "the second server answers", func() bool { return ask() == dnsmessage.RCodeSuccess })
	// The one that fails is asked first still; over TCP, too.
	if reply := g.ask(t, true, question(1, "a.test.", dnsmessage.TypeA, 0)); reply.RCode != dnsmessage.RCodeSuccess || len(reply.Answers) != 1 {
		t.Errorf("by TCP: %s", reply.RCode)
	}
}

func TestDNSRefusesWhatIsNoQuestion(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.serve(t, w, server1)
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	two := question(1, "a.test.", dnsmessage.TypeA, 0)
	two[5] = 2
	two = append(two, question(1, "b.test.", dnsmessage.TypeA, 0)[12:]...)
	none := question(1, "a.test.", dnsmessage.TypeA, 0)[:12]
	none[5] = 0
	update := question(1, "a.test.", dnsmessage.TypeA, 0)
	update[2] |= 5 << 3
	dotted := question(1, "axb.test.", dnsmessage.TypeA, 0)
	dotted[14] = '.'
	short := question(1, "a.test.", dnsmessage.TypeA, 0)
	short = short[:len(short)-2]
	loop := append(question(1, "a.test.", dnsmessage.TypeA, 0)[:12], 0xc0, 12, 0, 1, 0, 1)
	for name, test := range map[string]struct {
		message []byte
		rcode   dnsmessage.RCode
	}{
		"two questions":     {two, dnsmessage.RCodeFormatError},
		"none":              {none, dnsmessage.RCodeFormatError},
		"an update":         {update, dnsmessage.RCodeNotImplemented},
		"a dot in a label":  {dotted, dnsmessage.RCodeFormatError},
		"cut off":           {short, dnsmessage.RCodeFormatError},
		"a pointer to self": {loop, dnsmessage.RCodeFormatError},
		"a zone transfer":   {question(1, "a.test.", dnsmessage.TypeAXFR, 0), dnsmessage.RCodeNotImplemented},
	} {
		if reply := g.ask(t, false, test.message); reply.RCode != test.rcode {
			t.Errorf("%s: %s", name, reply.RCode)
		}
	}
	if asked := z.questions(); len(asked) > 0 {
		t.Errorf("the server was asked %v", asked)
	}
}

func TestHostName(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.serve(t, w, server1)
	for _, ports := range [][]uint16{nil, {8080}} {
		g := boot(t, w, func(o *netstack.Options) {
			o.ResolvConf = resolvConf(t, server1)
			o.Policy.HostPorts = ports
		})
		for kind, want := range map[dnsmessage.Type]string{dnsmessage.TypeA: gateway4.String(), dnsmessage.TypeAAAA: gateway6.String(), dnsmessage.TypeTXT: ""} {
			reply := g.ask(t, false, question(1, "Host.iii.internal.", kind, 0))
			if len(ports) == 0 {
				if reply.RCode != dnsmessage.RCodeNameError {
					t.Errorf("without ports: %s", reply.RCode)
				}
				continue
			}
			got := ""
			for _, answer := range reply.Answers {
				switch body := answer.Body.(type) {
				case *dnsmessage.AResource:
					got = netip.AddrFrom4(body.A).String()
				case *dnsmessage.AAAAResource:
					got = netip.AddrFrom16(body.AAAA).String()
				}
			}
			if reply.RCode != dnsmessage.RCodeSuccess || got != want {
				t.Errorf("%s: %s, %s", kind, reply.RCode, got)
			}
		}
		if reply := g.ask(t, false, question(1, "other.iii.internal.", dnsmessage.TypeA, 0)); reply.RCode != dnsmessage.RCodeNameError {
			t.Errorf("another name of the zone: %s", reply.RCode)
		}
	}
	if asked := z.questions(); len(asked) > 0 {
		t.Errorf("others were asked %v", asked)
	}
}

func TestHostPorts(t *testing.T) {
	t.Parallel()
	w := newWorld()
	address := netip.MustParseAddrPort(w.listen(t, "unused", echo))
	g := boot(t, w, func(o *netstack.Options) {
		o.Policy = egress.Policy{Mode: egress.Restricted, HostPorts: []uint16{address.Port(), 1}}
	})
	for _, gateway := range []netip.Addr{gateway4, gateway6} {
		conn := g.mustTCP(t, netip.AddrPortFrom(gateway, address.Port()).String())
		_, _ = conn.Write([]byte("ping"))
		_ = conn.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
			t.Error(err)
		}
		_ = conn.Close()
		for _, port := range []uint16{1, address.Port() - 1} { // open without a listener, and not open
			if conn, err := g.tcp(t, netip.AddrPortFrom(gateway, port).String()); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("port %d: %v", port, err)
				if conn != nil {
					_ = conn.Close()
				}
			}
		}
	}
}

func TestRestrictedNames(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.set("ok.example.com.", 60, alias("ok.example.com.", "edge.cdn.test."), owned{"edge.cdn.test.", a("203.0.113.5")}, owned{"unrelated.test.", a("203.0.113.66")})
	z.set("ok.example.com.", 60, aaaa("2001:db8::5"))
	z.set("evil.test.", 60, a("203.0.113.99"))
	z.set("inside.example.com.", 0, a("127.0.0.1"), a("169.254.169.254"), a("192.0.2.77"), a("198.18.0.1"))
	z.serve(t, w, server1)
	for _, dst := range []string{"203.0.113.5:443", "[2001:db8::5]:443", "203.0.113.99:443", "203.0.113.66:443", "203.0.113.5:80", "203.0.113.7:443"} {
		w.listen(t, dst, echo)
	}
	g := boot(t, w, func(o *netstack.Options) {
		o.ResolvConf = resolvConf(t, server1)
		o.Policy = egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "*.example.com", Ports: []string{"443", "53"}}}}
	})
	denied := func(dst string) {
		t.Helper()
		if conn, err := g.tcp(t, dst); err == nil {
			_ = conn.Close()
			t.Errorf("%s is reached", dst)
		}
	}
	// Nothing before an answer; then what the answer says, on the rule's ports.
	denied("203.0.113.5:443")
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		if reply := g.ask(t, kind == dnsmessage.TypeA, question(1, "OK.Example.com.", kind, 0)); reply.RCode != dnsmessage.RCodeSuccess || len(reply.Answers) == 0 {
			t.Fatalf("%s: %s", kind, reply.RCode)
		}
	}
	g.reaches(t, "203.0.113.5:443")
	g.reaches(t, "[2001:db8::5]:443")
	denied("203.0.113.5:80")
	denied("203.0.113.66:443") // in the answer, but of another name
	denied("203.0.113.7:443")

	// A name that is denied is not asked for, so nothing of it gets out either.
	before := len(z.questions())
	for _, name := range []string{"evil.test.", "example.com.", "secret-0123456789.evil.test.", "ok.example.com.evil.test.", "5.113.0.203.in-addr.arpa."} {
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeTXT, dnsmessage.TypePTR} {
			reply := g.ask(t, kind == dnsmessage.TypeTXT, question(1, name, kind, 1232))
			if reply.RCode != dnsmessage.RCodeNameError || len(reply.Answers) > 0 {
				t.Errorf("%s %s: %s", name, kind, reply.RCode)
			}
			if len(reply.Additionals) != 1 || len(reply.Additionals[0].Body.(*dnsmessage.OPTResource).Options) != 1 {
				t.Errorf("%s: the reason is not told: %+v", name, reply.Additionals)
			}
		}
	}
	if asked := z.questions(); len(asked) != before {
		t.Errorf("the server was asked %v", asked[before:])
	}
	denied("203.0.113.99:443")
	if log := g.logs.String(); !strings.Contains(log, "evil.test") {
		t.Errorf("log is %s", log)
	}

	// Other servers are no way around, by UDP, TCP or TLS.
	for _, dst := range []string{"8.8.8.8:53", server1 + ":53", "1.1.1.1:853", "[2001:4860:4860::8888]:53"} {
		if dst[0] != '[' { // the guest's stack does not understand every refusal by IPv6
			denied(dst)
		}
		conn := g.udp(t, dst)
		_, _ = conn.Write(question(1, "evil.test.", dnsmessage.TypeA, 0))
	}
	// Nor is an allowed name that leads inside.
	g.ask(t, false, question(1, "inside.example.com.", dnsmessage.TypeA, 0))
	for _, dst := range []string{"169.254.169.254:443", "192.0.2.77:443", "198.18.0.1:443"} {
		denied(dst)
	}
	for _, dial := range w.dials() {
		if !slices.Contains([]string{"tcp 203.0.113.5:443", "tcp [2001:db8::5]:443", "udp " + server1 + ":53", "tcp " + server1 + ":53"}, dial) {
			t.Errorf("reached %s", dial)
		}
	}
	// An open connection goes on when its name means something else.
	conn := g.mustTCP(t, "203.0.113.5:443")
	defer func() { _ = conn.Close() }()
	z.set("ok.example.com.", 0, a("203.0.113.7"))
	denied("203.0.113.7:443")
	g.ask(t, false, question(1, "ok.example.com.", dnsmessage.TypeA, 0))
	g.reaches(t, "203.0.113.7:443")
	_, _ = conn.Write([]byte("ping"))
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
		t.Error(err)
	}
}

// Answers that nobody asked for, or that are somebody's guess, are no answers.
func TestForgedAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.packets(t, server1+":53", func(query []byte) [][]byte {
		answer := func(change func(*dnsmessage.Message)) []byte {
			var m dnsmessage.Message
			if err := m.Unpack(query); err != nil {
				panic(err)
			}
			m.Response = true
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 60},
				Body:   &dnsmessage.AResource{A: [4]byte{203, 0, 113, 5}},
			}}
			change(&m)
			packed, err := m.Pack()
			if err != nil {
				panic(err)
			}
			return packed
		}
		evil := &dnsmessage.AResource{A: [4]byte{203, 0, 113, 66}}
		return [][]byte{
			answer(func(m *dnsmessage.Message) { m.ID++; m.Answers[0].Body = evil }),
			answer(func(m *dnsmessage.Message) { m.Response = false; m.Answers[0].Body = evil }),
			answer(func(m *dnsmessage.Message) {
				m.Questions[0].Name = dnsmessage.MustNewName("b.test.")
				m.Answers[0].Body = evil
			}),
			answer(func(m *dnsmessage.Message) { m.Questions[0].Type = dnsmessage.TypeTXT; m.Answers[0].Body = evil }),
			{1, 2, 3},
			answer(func(*dnsmessage.Message) {}),
		}
	})
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	reply := g.ask(t, false, question(1, "a.test.", dnsmessage.TypeA, 0))
	if len(reply.Answers) != 1 || reply.Answers[0].Body.(*dnsmessage.AResource).A != [4]byte{203, 0, 113, 5} {
		t.Errorf("answer is %+v", reply)
	}
}

// However much a guest asks, the questions in flight are bounded, and one too many
// is answered at once.
func TestManyQuestions(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.mute = true
	z.serve(t, w, server1)
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	conn := g.udp(t, "198.18.0.1:53")
	var reading sync.WaitGroup
	failed := make(chan struct{})
	reading.Go(func() {
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := conn.Read(make([]byte, 512)); err == nil {
			close(failed)
		}
	})
	for i := range 500 {
		_, _ = conn.Write(question(uint16(i), fmt.Sprintf("n%d.test.", i), dnsmessage.TypeA, 0))
	}
	<-failed
	reading.Wait()
	if dials := len(w.dials()); dials > 256 {
		t.Errorf("%d sockets for questions", dials)
	}
	// Close does not wait for servers that say nothing: the test's end shows it.
}
