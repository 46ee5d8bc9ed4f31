package shimdriver_test

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
	"github.com/iii-hq/workers/sandbox-libkrun/test/nodesdk"
)

// site is a server of the host with what programs of guests look for.
type site struct {
	// port speaks HTTP, tlsPort the same under a certificate of ca, in PEM.
	port, tlsPort uint16
	ca            []byte
}

// openSite starts one for the test's time. repository may be empty.
func openSite(t *testing.T, repository string) *site {
	t.Helper()
	s := &site{}
	mux := http.NewServeMux()
	wheel := makeWheel(t)
	sum := sha256.Sum256(wheel)
	const wheelName = "iiiprobe-1.0-py3-none-any.whl"
	mux.HandleFunc("/simple/iiiprobe/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, `<a href="/files/%s#sha256=%x">%s</a>`, wheelName, sum, wheelName)
	})
	serveBytes := func(name string, content []byte) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			http.ServeContent(w, r, name, time.Unix(1e9, 0), bytes.NewReader(content))
		}
	}
	mux.HandleFunc("/files/"+wheelName, serveBytes(wheelName, wheel))
	mux.HandleFunc("/debian/dists/stable/InRelease", serveBytes("InRelease", []byte("Origin: test\n")))
	mux.HandleFunc("/debian/Packages", serveBytes("Packages", bytes.Repeat([]byte("Package: x\n"), 100_000)))
	mux.HandleFunc("/echo", echoWebSocket)
	if repository != "" {
		program, err := exec.Command("git", "--exec-path").Output()
		if err != nil {
			t.Fatal(err)
		}
		mux.Handle("/git/", &cgi.Handler{
			Path: filepath.Join(strings.TrimSpace(string(program)), "git-http-backend"), Root: "/git",
			Env: []string{"GIT_PROJECT_ROOT=" + repository, "GIT_HTTP_EXPORT_ALL=1"},
		})
	}
	certificate := s.certificate(t)
	s.port = serve(t, mux, nil)
	s.tlsPort = serve(t, mux, &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12})
	return s
}

// serve runs a server on the host's loopback.
func serve(t *testing.T, handler http.Handler, cfg *tls.Config) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address, _ := l.Addr().(*net.TCPAddr)
	if cfg != nil {
		l = tls.NewListener(l, cfg)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return uint16(address.Port)
}

// certificate makes an authority and a certificate of it for the host's alias.
func (s *site) certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a test's authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	root, err := x509.CreateCertificate(rand.Reader, authority, authority, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	s.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root})
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: bootspec.HostAlias}, DNSNames: []string{bootspec.HostAlias},
		NotBefore: authority.NotBefore, NotAfter: authority.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, authority, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// makeWheel is a package for pip.
func makeWheel(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for name, text := range map[string]string{
		"iiiprobe.py":                      "answer = 42\n",
		"iiiprobe-1.0.dist-info/METADATA":  "Metadata-Version: 2.1\nName: iiiprobe\nVersion: 1.0\n",
		"iiiprobe-1.0.dist-info/WHEEL":     "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"iiiprobe-1.0.dist-info/RECORD":    "iiiprobe.py,,\n",
		"iiiprobe-1.0.dist-info/INSTALLER": "test\n",
	} {
		f, err := w.Create(name)
		if err == nil {
			_, err = io.WriteString(f, text)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// echoWebSocket sends every message back.
func echoWebSocket(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer c.CloseNow() //nolint:errcheck // the client sees what it got
	c.SetReadLimit(1 << 20)
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil || c.Write(r.Context(), kind, message) != nil {
			return
		}
	}
}

// launchOn boots an image with a network on which the site's ports are open.
func launchOn(t *testing.T, image string, s *site) (*vmtest.Env, *vm.Machine) {
	t.Helper()
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	req := e.Request()
	req.Lower, req.MemoryMiB = host.Image(t, image), 512
	req.Env = append(req.Env, fmt.Sprintf("SITE=http://%s:%d", bootspec.HostAlias, s.port), fmt.Sprintf("TLS=https://%s:%d", bootspec.HostAlias, s.tlsPort))
	req.Network = &vm.Network{Policy: egress.Policy{Mode: egress.Open, HostPorts: []uint16{s.port, s.tlsPort}}}
	m := e.Launch(t, e.Launcher(t), req)
	put(t, e, m, "/tmp/ca.pem", bytes.NewReader(s.ca))
	return e, m
}

func put(t *testing.T, e *vmtest.Env, m *vm.Machine, path string, content io.Reader) {
	t.Helper()
	if _, err := m.Guest().WriteFile(e.Context(t), path, guest.WriteOptions{Mode: 0o644, Parents: true}, content); err != nil {
		t.Fatal(err)
	}
}

// expect runs a script whose last line has to be want.
func expect(t *testing.T, e *vmtest.Env, m *vm.Machine, want, script string) {
	t.Helper()
	got, err := vmtest.Output(e.Context(t), m, script)
	lines := strings.Split(strings.TrimSpace(got), "\n")
	if err != nil || lines[len(lines)-1] != want {
		t.Errorf("%s\nsaid %q: %v", script, got, err)
	}
}

// pythonClient fetches as apt does, by many threads, and over TLS.
const pythonClient = `
import concurrent.futures, http.client, os, socket, ssl, urllib.error, urllib.parse, urllib.request
site, tls = os.environ["SITE"], os.environ["TLS"]
where = urllib.parse.urlsplit(site)
families = {a[0] for a in socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)}
assert families == {socket.AF_INET, socket.AF_INET6}, families
try:
    socket.getaddrinfo("nobody.invalid", 80)
    raise SystemExit("a name that nobody has was resolved")
except socket.gaierror as e:
    assert e.errno in (socket.EAI_NONAME, socket.EAI_AGAIN), e

# As apt: one connection, a request that finds nothing new, and a part of a file.
c = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
for headers, status, length in [({}, 200, 1100000), ({"If-Modified-Since": "Sun, 09 Sep 2001 01:46:40 GMT"}, 304, 0), ({"Range": "bytes=1099990-"}, 206, 10)]:
    c.request("GET", "/debian/Packages", headers=headers)
    r = c.getresponse()
    assert (r.status, len(r.read())) == (status, length), r.status
c.close()

context = ssl.create_default_context(cafile="/tmp/ca.pem")
def fetch(i):
    url = (tls if i % 4 == 0 else site) + "/debian/dists/stable/InRelease"
    return urllib.request.urlopen(url, timeout=120, context=context).read()
with concurrent.futures.ThreadPoolExecutor(200) as pool:
    assert set(pool.map(fetch, range(200))) == {b"Origin: test\n"}
try:
    urllib.request.urlopen(tls)
    raise SystemExit("an unknown authority was trusted")
except urllib.error.URLError as e:
    assert "CERTIFICATE_VERIFY_FAILED" in str(e), e
print("done")
`

func TestPythonClients(t *testing.T) {
	t.Parallel()
	s := openSite(t, "")
	e, m := launchOn(t, "python", s)
	put(t, e, m, "/tmp/client.py", strings.NewReader(pythonClient))
	expect(t, e, m, "done", "python3 /tmp/client.py")
	expect(t, e, m, "42", `export PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/tmp
		python3 -m pip install -q --no-cache-dir --cert /tmp/ca.pem --index-url "$TLS/simple" --target /tmp/site iiiprobe >&2 &&
		PYTHONPATH=/tmp/site python3 -c 'import iiiprobe; print(iiiprobe.answer)'`)
}

// nodeClient holds a WebSocket over TLS, and one without, with messages of many
// sizes both ways.
const nodeClient = `
const WebSocket = require('/tmp/ws');
const fs = require('fs'), https = require('https');
const ca = fs.readFileSync('/tmp/ca.pem');
const talk = (url) => new Promise((resolve, reject) => {
	const ws = new WebSocket(url.replace('http', 'ws') + '/echo', { ca });
	const sizes = [0, 1, 125, 126, 65535, 65536, 1000000], got = [];
	ws.on('error', reject);
	ws.on('open', () => sizes.forEach((n) => ws.send(Buffer.alloc(n, 120))));
	ws.on('message', (data) => { got.push(data.length); if (got.length === sizes.length) ws.close(1000); });
	ws.on('close', (code) => got.join() === sizes.join() && code === 1000 ? resolve() : reject(new Error(code + ' ' + got)));
});
// As npm fetches: an agent with many sockets, over TLS.
const agent = new https.Agent({ ca, keepAlive: true, maxSockets: 15 });
const fetchOne = () => new Promise((resolve, reject) => {
	https.get(process.env.TLS + '/debian/Packages', { agent }, (res) => {
		let n = 0;
		res.on('data', (d) => { n += d.length; });
		res.on('end', () => n === 1100000 ? resolve() : reject(new Error('only ' + n)));
	}).on('error', reject);
});
Promise.all([talk(process.env.SITE), talk(process.env.TLS), ...Array.from({ length: 30 }, fetchOne)])
	.then(() => { console.log('done'); agent.destroy(); }, (e) => { console.error(e); process.exit(1); });
`

func TestNodeClients(t *testing.T) {
	t.Parallel()
	packages := nodesdk.Install(t)
	s := openSite(t, "")
	e, m := launchOn(t, "node", s)
	ws := filepath.Join(packages, "node_modules", "ws")
	for _, pattern := range []string{"package.json", "index.js", "lib/*.js"} {
		files, err := filepath.Glob(filepath.Join(ws, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s has no %s: %v", ws, pattern, err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			put(t, e, m, "/tmp/ws"+strings.TrimPrefix(file, ws), bytes.NewReader(content))
		}
	}
	put(t, e, m, "/tmp/client.js", strings.NewReader(nodeClient))
	expect(t, e, m, "done", "node /tmp/client.js")
}

func TestGitClones(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("SKIPPED: this host has no git to serve a repository with")
	}
	dir := t.TempDir()
	work := filepath.Join(dir, "work")
	script := `set -e; git init -q -b main "$0"; cd "$0"; head -c 5000000 /dev/urandom >blob
		for i in 1 2 3 4 5; do echo $i >file; git add .; git -c user.name=t -c user.email=t@example.com commit -q -m "commit $i"; done
		git clone -q --bare . ../served.git; sha256sum blob | cut -d' ' -f1`
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", script, work)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_NOSYSTEM=1", "HOME="+dir)
	sum, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		t.Fatalf("make a repository: %v: %s", err, exit.Stderr)
	}
	if err != nil {
		t.Fatal(err)
	}
	s := openSite(t, dir)
	e, m := launchOn(t, "git", s)
	expect(t, e, m, strings.TrimSpace(string(sum))+" 5", `export HOME=/tmp; cd /tmp
		git clone -q "$SITE/git/served.git" plain && git -c http.sslCAInfo=/tmp/ca.pem clone -q --depth 1 "$TLS/git/served.git" shallow >&2 &&
		cmp plain/blob shallow/blob && echo $(sha256sum <plain/blob | cut -d' ' -f1) $(git -C plain rev-list --count HEAD)`)
}
