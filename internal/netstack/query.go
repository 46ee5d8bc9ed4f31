package netstack

import (
	"net/netip"

	"golang.org/x/net/dns/dnsmessage"
)

// query is one question of the guest.
type query struct {
	id               uint16
	question         dnsmessage.Question
	asked            bool // question is set
	recursion        bool
	checkingDisabled bool
	authentic        bool // the guest understands AD (RFC 6840, 5.7)
	edns             bool
	udpSize          int
	dnssecOK         bool
}

// parseQuery reads a message of the guest: nil means that it deserves no answer, a
// code other than success is the answer.
func parseQuery(message []byte) (*query, dnsmessage.RCode) {
	var parser dnsmessage.Parser
	head, err := parser.Start(message)
	if err != nil || head.Response {
		return nil, dnsmessage.RCodeFormatError
	}
	q := &query{
		id: head.ID, recursion: head.RecursionDesired, checkingDisabled: head.CheckingDisabled, authentic: head.AuthenticData,
	}
	if head.OpCode != 0 {
		return q, dnsmessage.RCodeNotImplemented
	}
	questions, err := parser.AllQuestions()
	if err != nil || len(questions) != 1 {
		return q, dnsmessage.RCodeFormatError
	}
	q.question, q.asked = questions[0], true
	switch q.question.Type {
	case dnsmessage.TypeAXFR, 251: // whole zones, IXFR with it: more than one message
		return q, dnsmessage.RCodeNotImplemented
	}
	if parser.SkipAllAnswers() != nil || parser.SkipAllAuthorities() != nil {
		return q, dnsmessage.RCodeFormatError
	}
	for {
		head, err := parser.AdditionalHeader()
		if err == dnsmessage.ErrSectionDone { //nolint:errorlint // the parser returns it bare
			return q, dnsmessage.RCodeSuccess
		}
		if err != nil || parser.SkipAdditional() != nil {
			return q, dnsmessage.RCodeFormatError
		}
		if head.Type == dnsmessage.TypeOPT {
			q.edns, q.udpSize, q.dnssecOK = true, int(head.Class), head.DNSSECAllowed()
		}
	}
}

// size is the longest answer that the guest takes over UDP.
func (q *query) size() int {
	if !q.edns {
		return plainUDP
	}
	return min(max(q.udpSize, plainUDP), maxUDPAnswer)
}

// again is the question as a message of the gateway's own. Its id is 0.
func (q *query) again() ([]byte, error) {
	builder := dnsmessage.NewBuilder(nil, dnsmessage.Header{
		RecursionDesired: q.recursion, CheckingDisabled: q.checkingDisabled, AuthenticData: q.authentic,
	})
	if err := q.build(&builder, nil); err != nil {
		return nil, err
	}
	return builder.Finish()
}

// build adds the question, answers to it, and EDNS where the guest spoke it.
func (q *query) build(builder *dnsmessage.Builder, answers []dnsmessage.Resource, options ...dnsmessage.Option) error {
	if q.asked {
		if err := builder.StartQuestions(); err != nil {
			return err
		}
		if err := builder.Question(q.question); err != nil {
			return err
		}
	}
	if err := builder.StartAnswers(); err != nil {
		return err
	}
	for _, answer := range answers {
		var err error
		switch body := answer.Body.(type) {
		case *dnsmessage.AResource:
			err = builder.AResource(answer.Header, *body)
		case *dnsmessage.AAAAResource:
			err = builder.AAAAResource(answer.Header, *body)
		}
		if err != nil {
			return err
		}
	}
	if !q.edns {
		return nil
	}
	if err := builder.StartAdditionals(); err != nil {
		return err
	}
	var head dnsmessage.ResourceHeader
	if err := head.SetEDNS0(q.size(), dnsmessage.RCodeSuccess, q.dnssecOK); err != nil {
		return err
	}
	return builder.OPTResource(head, dnsmessage.OPTResource{Options: options})
}

// reply is an answer of the gateway's own; nil where it cannot be written down.
func (q *query) reply(rcode dnsmessage.RCode, answers []dnsmessage.Resource, options ...dnsmessage.Option) []byte {
	builder := dnsmessage.NewBuilder(nil, dnsmessage.Header{
		ID: q.id, Response: true, RecursionDesired: q.recursion, RecursionAvailable: true, CheckingDisabled: q.checkingDisabled, RCode: rcode,
	})
	builder.EnableCompression()
	if q.build(&builder, answers, options...) != nil {
		return nil
	}
	message, err := builder.Finish()
	if err != nil {
		return nil
	}
	return message
}

func (q *query) fail(rcode dnsmessage.RCode) []byte { return q.reply(rcode, nil) }

// deny says that the name does not exist, and to whom understands it, why.
func (q *query) deny() []byte {
	return q.reply(dnsmessage.RCodeNameError, nil, dnsmessage.Option{Code: extendedErrorOpt, Data: []byte{0, prohibitedCode}})
}

// addresses answers with addresses; with none, that the name has none of the type
// that was asked for.
func (q *query) addresses(addrs []netip.Addr, ttl uint32) []byte {
	var answers []dnsmessage.Resource
	for _, addr := range addrs {
		head := dnsmessage.ResourceHeader{Name: q.question.Name, Class: dnsmessage.ClassINET, TTL: ttl}
		if addr.Is4() {
			answers = append(answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: addr.As4()}})
		} else {
			answers = append(answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}})
		}
	}
	return q.reply(dnsmessage.RCodeSuccess, answers)
}

// truncate is an answer too long for the guest: it has to ask by TCP.
func (q *query) truncate(long []byte) []byte {
	short := q.reply(dnsmessage.RCode(long[3]&0xf), nil)
	if short != nil {
		short[2] |= 0x02 // TC
	}
	return short
}
