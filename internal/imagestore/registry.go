package imagestore

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// registry reads one repository of a registry.
type registry struct {
	ref       string // for messages
	name      name.Reference
	puller    *remote.Puller
	transport *http.Transport
	waits     []time.Duration
	stall     time.Duration
}

func newRegistry(s *Store, ref string, parsed name.Reference) (*registry, error) {
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   downloads,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: s.opts.StallTimeout,
	}
	// We retry ourselves, bodies included.
	never := func(error) bool { return false }
	puller, err := remote.NewPuller(remote.WithTransport(&secureTransport{inner: t, allowed: s.insecure}),
		remote.WithAuthFromKeychain(keychain{s.opts.Keychain}), remote.WithRetryPredicate(never), remote.WithRetryStatusCodes(),
		remote.WithJobs(downloads), remote.WithUserAgent("iii-sandbox-libkrun"))
	if err != nil {
		return nil, err
	}
	return &registry{ref: ref, name: parsed, puller: puller, transport: t, waits: s.opts.RetryWaits, stall: s.opts.StallTimeout}, nil
}

// keychain marks the errors of another.
type keychain struct{ inner authn.Keychain }

// Resolve is authn.Keychain's.
func (k keychain) Resolve(r authn.Resource) (authn.Authenticator, error) {
	return k.ResolveContext(context.Background(), r)
}

// ResolveContext is authn.ContextKeychain's.
func (k keychain) ResolveContext(ctx context.Context, r authn.Resource) (authn.Authenticator, error) {
	auth, err := authn.Resolve(ctx, k.inner, r)
	if err != nil {
		return nil, &CredentialsError{Host: r.RegistryStr(), Err: err}
	}
	return auth, nil
}

// insecure tells whether the operator allows http to a registry.
func (s *Store) insecure(host string) bool {
	bare, _, err := net.SplitHostPort(host)
	if err != nil {
		bare = host
	}
	return slices.Contains(s.opts.InsecureRegistries, host) || slices.Contains(s.opts.InsecureRegistries, bare)
}

// secureTransport refuses http to hosts that are neither loopback nor listed,
// after redirects and for token servers too: go-containerregistry would use it for
// every private address.
type secureTransport struct {
	inner   http.RoundTripper
	allowed func(host string) bool
}

// RoundTrip is http.RoundTripper's.
func (t *secureTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !loopback(r.URL.Hostname()) && !t.allowed(r.URL.Host) {
		return nil, &InsecureError{Host: r.URL.Host}
	}
	return t.inner.RoundTrip(r)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (r *registry) local() bool { return false }

func (r *registry) close() error {
	r.transport.CloseIdleConnections()
	return nil
}

func (r *registry) root(ctx context.Context) (document, error) {
	return r.get(ctx, r.name)
}

func (r *registry) manifest(ctx context.Context, d v1.Descriptor) (document, error) {
	return r.get(ctx, r.name.Context().Digest(d.Digest.String()))
}

func (r *registry) get(ctx context.Context, ref name.Reference) (document, error) {
	var doc document
	err := r.retry(ctx, func(ctx context.Context) error {
		d, err := r.puller.Get(ctx, ref)
		if err != nil {
			return err
		}
		doc = document{d.Manifest, d.MediaType}
		return nil
	})
	if want, ok := ref.(name.Digest); ok && err == nil {
		if got := sha256Of(doc.raw); got.String() != want.DigestStr() {
			return doc, &DigestError{What: "manifest of " + r.ref, Want: want.DigestStr(), Got: got.String()}
		}
	}
	return doc, err
}

// blob opens a blob. Its reader fails with errStalled when nothing comes for too
// long. The body is not retried here, see transfer.
func (r *registry) blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	var body io.ReadCloser
	err := r.retry(ctx, func(ctx context.Context) (err error) {
		body, err = r.openBlob(ctx, d)
		return err
	})
	return body, err
}

func (r *registry) openBlob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	layer, err := r.puller.Layer(ctx, r.name.Context().Digest(d.Digest.String()))
	if err == nil {
		var body io.ReadCloser
		if body, err = layer.Compressed(); err == nil {
			return newStallReader(ctx, cancel, body, r.stall), nil
		}
	}
	cancel(nil)
	return nil, err
}

// transfer copies a verified blob to w, which rewind empties before each further
// try.
func (r *registry) transfer(ctx context.Context, d v1.Descriptor, what string, w io.Writer, rewind func() error) error {
	return r.retry(ctx, func(ctx context.Context) error {
		if err := rewind(); err != nil {
			return err
		}
		body, err := r.openBlob(ctx, d)
		if err != nil {
			return err
		}
		return errors.Join(copyVerified(w, body, what, d), body.Close())
	})
}

// retry calls try again after errors that may go away, and names the last one.
func (r *registry) retry(ctx context.Context, try func(context.Context) error) error {
	for k := 0; ; k++ {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if k >= len(r.waits) || !temporary(err) {
			return r.named(err)
		}
		if err := pause(ctx, r.waits[k]); err != nil {
			return err
		}
	}
}

// temporary reports whether another try may help.
func temporary(err error) bool {
	var answer *transport.Error
	if errors.As(err, &answer) {
		return answer.StatusCode >= 500 || answer.StatusCode == http.StatusRequestTimeout || answer.StatusCode == http.StatusTooManyRequests
	}
	var insecure *InsecureError
	var credentials *CredentialsError
	var certificate *tls.CertificateVerificationError
	var dns *net.DNSError
	switch {
	case errors.As(err, &insecure), errors.As(err, &credentials), errors.As(err, &certificate):
		return false
	case errors.As(err, &dns):
		return !dns.IsNotFound
	}
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, errStalled) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// named turns an error of the network into a RegistryError and leaves others.
func (r *registry) named(err error) error {
	var answer *transport.Error
	var insecure *InsecureError
	var credentials *CredentialsError
	var damaged *DigestError
	switch {
	case errors.As(err, &credentials):
		return credentials
	case errors.As(err, &answer):
		return &RegistryError{Ref: r.ref, Status: answer.StatusCode, Err: answer}
	case errors.As(err, &insecure):
		return insecure
	case errors.As(err, &damaged), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return err
	case strings.Contains(err.Error(), "does not match requested digest"):
		return &DigestError{What: "manifest of " + r.ref, Want: r.name.Identifier(), Got: "another"}
	}
	return &RegistryError{Ref: r.ref, Err: err}
}
