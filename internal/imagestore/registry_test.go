package imagestore_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

func TestPullMergesLayersOfEveryCompression(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := imageOf(t, "linux/"+arch, gzipLayer(t, files{"a": "1", "b": "1", "d/x": "1"}.tar(t)),
		zstdLayer(t, files{".wh.a": "", "b": "2"}.tar(t)), plainLayer(files{"d/.wh..wh..opq": "", "d/-y": "3"}.tar(t)))
	ref := srv.push(t, "app:1", img)
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	got := ensure(t, s, ref, pull)
	wantFiles(t, got.Lower, files{"b": "2", "d/": "", "d/-y": "3"})
	if got.Digest != digestOf(t, img) || got.Ref != ref {
		t.Errorf("image is %s %s, want %s %s", got.Ref, got.Digest, ref, digestOf(t, img))
	}
	want := imagestore.Config{Env: []string{"PATH=/bin", "A=b c"}, WorkingDir: "/work", User: "1000:1000", Entrypoint: []string{"/e"}, Cmd: []string{"c"}}
	if !reflect.DeepEqual(got.Config, want) {
		t.Errorf("config is %+v, want %+v", got.Config, want)
	}
	if info, err := os.Stat(got.Lower); err != nil || info.Size() != got.Size || info.Mode() != 0o444 {
		t.Errorf("lower is %v, %v; want %d read-only bytes", info, err, got.Size)
	}
	wantClean(t, dir, 1)
}

func TestCachedImageNeedsNoNetwork(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	dir := t.TempDir()
	first := ensure(t, openStore(t, dir, quick()), ref, pull)
	srv.http.Close()
	s := openStore(t, dir, quick())
	for _, again := range []string{ref, srv.host + "/app@" + digestOf(t, img), digestOf(t, img)} {
		got, err := s.Ensure(t.Context(), again, imagestore.EnsureOptions{Progress: func(p imagestore.Progress) {
			t.Errorf("%s: progress %+v of an image that is there", again, p)
		}})
		if err != nil {
			t.Errorf("%s: %v", again, err)
			continue
		}
		if got.Lower != first.Lower || !reflect.DeepEqual(got.Config, first.Config) {
			t.Errorf("%s: image is %+v, want %+v", again, got, first)
		}
		closeImage(t, got)
	}
}

func TestNotCached(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	ref := srv.push(t, "app:1", simple(t, "1"))
	s := openStore(t, t.TempDir(), quick())
	for _, ref := range []string{ref, "sha256:" + strings.Repeat("0", 64)} {
		_, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{})
		if !errors.Is(err, imagestore.ErrNotCached) || !strings.Contains(err.Error(), ref) {
			t.Errorf("%s: error is %v, want ErrNotCached with the reference", ref, err)
		}
	}
	if len(srv.blobGets()) > 0 {
		t.Error("the registry was asked without leave")
	}
}

func TestReferencesAreCanonical(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir(), quick())
	for _, ref := range []string{"node", "library/node", "docker.io/library/node:latest", "index.docker.io/library/node"} {
		_, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{})
		var missing *imagestore.NotCachedError
		if !errors.As(err, &missing) || missing.Ref != "docker.io/library/node:latest" {
			t.Errorf("%s: error is %v, want one about docker.io/library/node:latest", ref, err)
		}
	}
	for _, ref := range []string{"", "UPPER", "a b", "oci:", "docker-archive:", "sha256:12", "x@sha512:" + strings.Repeat("0", 128)} {
		_, err := s.Ensure(t.Context(), ref, pull)
		var bad *imagestore.ReferenceError
		if !errors.As(err, &bad) {
			t.Errorf("%q: error is %v, want a ReferenceError", ref, err)
		}
	}
}

func TestMovedTag(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	one, two := simple(t, "1"), simple(t, "2")
	ref := srv.push(t, "app:latest", one)
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	old := ensure(t, s, ref, pull)
	srv.push(t, "app:latest", two)
	if again := ensure(t, s, ref, pull); again.Digest != old.Digest {
		t.Error("Ensure asked the registry for an image that is there")
	} else {
		closeImage(t, again)
	}
	fresh, err := s.Pull(t.Context(), ref, imagestore.EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	closeImage(t, fresh)
	if fresh.Digest != digestOf(t, two) {
		t.Errorf("Pull got %s, want the new image", fresh.Digest)
	}
	// In use, the old one survives a collection and can still be opened.
	if result, err := s.GC(t.Context(), imagestore.GCOptions{}); err != nil || len(result.Removed) != 0 || result.Kept != 1 {
		t.Errorf("GC: %+v, %v; want the old image kept", result, err)
	}
	closeImage(t, ensure(t, s, old.Digest, imagestore.EnsureOptions{}))
	closeImage(t, old)
	result, err := s.GC(t.Context(), imagestore.GCOptions{})
	if err != nil || len(result.Removed) != 1 || result.Removed[0].Digest != old.Digest || result.Freed == 0 {
		t.Errorf("GC: %+v, %v; want the old image removed", result, err)
	}
	wantClean(t, dir, 1)
}

func TestPlatforms(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	add := func(index v1.ImageIndex, img v1.Image, platform v1.Platform) v1.ImageIndex {
		return mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &platform}})
	}
	base := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	mine := simple(t, "mine")
	index := add(base, imageOf(t, "linux/arm64"), v1.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"})
	index = add(index, imageOf(t, "unknown/unknown"), v1.Platform{OS: "unknown", Architecture: "unknown"})
	wrong := srv.pushIndex(t, "wrong:1", index)
	both := add(add(index, simple(t, "v3"), v1.Platform{OS: "linux", Architecture: arch, Variant: "v3"}), mine, v1.Platform{OS: "linux", Architecture: arch})
	right := srv.pushIndex(t, "right:1", both)
	nested := srv.pushIndex(t, "nested:1", mutate.AppendManifests(base, mutate.IndexAddendum{Add: both}))
	single := srv.push(t, "single:1", imageOf(t, "linux/s390x"))

	dir := t.TempDir()
	s := openStore(t, dir, quick())
	for ref, have := range map[string]string{wrong: "linux/arm64", single: "linux/s390x"} {
		_, err := s.Ensure(t.Context(), ref, pull)
		var platform *imagestore.PlatformError
		if !errors.As(err, &platform) || platform.Want != "linux/"+arch || !reflect.DeepEqual(platform.Have, []string{have}) {
			t.Errorf("%s: error is %v, want a PlatformError with %s", ref, err, have)
		}
	}
	wantClean(t, dir, 0)
	for _, ref := range []string{right, nested} {
		if got := ensure(t, s, ref, pull); got.Digest != digestOf(t, mine) {
			t.Errorf("%s: got %s, want the image without a variant", ref, got.Digest)
		}
	}
}

func TestImageOfAnotherProcessorInACopiedStore(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	dir := t.TempDir()
	ensure(t, openStore(t, dir, quick()), ref, pull)
	opts := quick()
	opts.Arch = "arm64"
	for _, ref := range []string{ref, digestOf(t, img)} {
		if _, err := openStore(t, dir, opts).Ensure(t.Context(), ref, imagestore.EnsureOptions{}); !errors.Is(err, imagestore.ErrNotCached) {
			t.Errorf("%s: error is %v, want ErrNotCached", ref, err)
		}
	}
}

// TestFaultyRegistry has one misbehaviour of the registry each. What goes away
// within the tries must be survived, what does not must be named, and nothing
// may be left.
func TestFaultyRegistry(t *testing.T) {
	t.Parallel()
	blob := gzipLayer(t, files{"big": strings.Repeat("some text. ", 50_000)}.tar(t))
	img := imageOf(t, "linux/"+arch, blob)
	layer := isLayer(t, img)
	size := len(blob.blob)
	send := func(w http.ResponseWriter, announced int, body []byte) {
		w.Header().Set("Content-Length", strconv.Itoa(announced))
		_, _ = w.Write(body)
	}
	tampered := bytes.Clone(blob.blob)
	tampered[size/2] ^= 1
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", code) }
	}
	wantStatus := func(code int) func(error) bool {
		return func(err error) bool {
			var answer *imagestore.RegistryError
			return errors.As(err, &answer) && answer.Status == code
		}
	}
	isDigest := func(err error) bool {
		var damaged *imagestore.DigestError
		return errors.As(err, &damaged) && strings.Contains(damaged.What, "layer 1 of 1")
	}
	isUnreachable := wantStatus(0)
	tests := []struct {
		name   string
		faulty int // how many times
		fault  http.HandlerFunc
		want   func(error) bool // nil: the pull succeeds
		gets   int
	}{
		{"tampered", 1, func(w http.ResponseWriter, _ *http.Request) { send(w, size, tampered) }, isDigest, 1},
		{"shorter as announced", 1, func(w http.ResponseWriter, _ *http.Request) { send(w, size/2, blob.blob[:size/2]) }, isDigest, 1},
		{"longer", 1, func(w http.ResponseWriter, _ *http.Request) { send(w, size+1, append(bytes.Clone(blob.blob), 0)) }, isDigest, 1},
		{"empty", 1, func(w http.ResponseWriter, _ *http.Request) { send(w, 0, nil) }, isDigest, 1},
		{"cut off once", 1, func(w http.ResponseWriter, _ *http.Request) { send(w, size, blob.blob[:size/2]) }, nil, 2},
		{"cut off twice", 2, func(w http.ResponseWriter, _ *http.Request) { send(w, size, blob.blob[:1]) }, nil, 3},
		{"cut off always", 99, func(w http.ResponseWriter, _ *http.Request) { send(w, size, blob.blob[:size/2]) }, isUnreachable, 3},
		{"not found", 99, status(404), wantStatus(404), 1},
		{"denied", 99, status(403), wantStatus(403), 1},
		{"busy twice", 2, status(503), nil, 3},
		{"too many requests", 99, status(429), wantStatus(429), 3},
		{"broken", 99, status(500), wantStatus(500), 3},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			srv := newServer(t)
			ref := srv.push(t, "app:1", img)
			var seen atomic.Int32
			srv.setFault(func(w http.ResponseWriter, r *http.Request) {
				if layer(r) && int(seen.Add(1)) <= test.faulty {
					test.fault(w, r)
					return
				}
				srv.real.ServeHTTP(w, r)
			})
			dir := t.TempDir()
			s := openStore(t, dir, quick())
			var last imagestore.Progress
			img, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) { last = p }})
			if int(seen.Load()) != test.gets {
				t.Errorf("the layer was asked for %d times, want %d", seen.Load(), test.gets)
			}
			if test.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				closeImage(t, img)
				if last.BytesDone != int64(size) || last.BytesTotal != int64(size) || last.LayersDone != 1 || last.LayersTotal != 1 || last.Ref != ref {
					t.Errorf("last progress is %+v", last)
				}
				wantClean(t, dir, 1)
				return
			}
			if !test.want(err) {
				t.Errorf("error is %T: %v", err, err)
			}
			wantClean(t, dir, 0)
			// The store is as good as before.
			srv.setFault(nil)
			ensure(t, s, ref, pull)
		})
	}
}

func TestStalledTransferIsTriedAgain(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	layer := isLayer(t, img)
	var seen atomic.Int32
	srv.setFault(func(w http.ResponseWriter, r *http.Request) {
		if layer(r) && seen.Add(1) == 1 {
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte{1})
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		srv.real.ServeHTTP(w, r)
	})
	opts := quick()
	opts.StallTimeout = 300 * time.Millisecond
	ensure(t, openStore(t, t.TempDir(), opts), ref, pull)
	if seen.Load() != 2 {
		t.Errorf("the layer was asked for %d times, want 2", seen.Load())
	}
}

func TestManifestFaults(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	serve := func(mediaType, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				srv.real.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Type", mediaType)
			_, _ = w.Write([]byte(body))
		}
	}
	layout := func(err error) bool {
		var bad *imagestore.LayoutError
		return errors.As(err, &bad)
	}
	hash := "sha256:" + strings.Repeat("0", 64)
	manifest := func(config, layers string) string {
		return fmt.Sprintf(`{"schemaVersion":2,"config":{"mediaType":%q,"digest":%q,"size":3},"layers":[%s]}`, config, hash, layers)
	}
	oci := string(types.OCIManifestSchema1)
	tests := []struct {
		name string
		ref  string
		h    http.HandlerFunc
		want func(error) bool
	}{
		{"no JSON", ref, serve(oci, "hello"), layout},
		{"an artifact", ref, serve(oci, manifest("application/vnd.cncf.helm.config.v1+json", "")), layout},
		{"old docker", ref, serve("application/vnd.docker.distribution.manifest.v1+prettyjws", "{}"), layout},
		{"encrypted", ref, serve(oci, manifest(string(types.OCIConfigJSON), fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip+encrypted","digest":%q,"size":1}`, hash))), layout},
		{"negative size", ref, serve(oci, manifest(string(types.OCIConfigJSON), fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":-1}`, types.OCILayer, hash))), layout},
		{"other digests", ref, serve(oci, manifest(string(types.OCIConfigJSON), fmt.Sprintf(`{"mediaType":%q,"digest":"sha512:%s","size":1}`, types.OCILayer, strings.Repeat("0", 128)))), func(err error) bool {
			var bad *imagestore.DigestError
			return errors.As(err, &bad)
		}},
		{"another manifest than the digest's", srv.host + "/app@" + digestOf(t, img), serve(oci, manifest(string(types.OCIConfigJSON), "")), func(err error) bool {
			var bad *imagestore.DigestError
			return errors.As(err, &bad)
		}},
		{"no such tag", srv.host + "/app:2", nil, func(err error) bool {
			var answer *imagestore.RegistryError
			return errors.As(err, &answer) && answer.Status == 404
		}},
	}
	for _, test := range tests {
		srv.setFault(test.h)
		if _, err := s.Ensure(t.Context(), test.ref, pull); !test.want(err) {
			t.Errorf("%s: error is %T: %v", test.name, err, err)
		}
	}
	wantClean(t, dir, 0)
}

func TestUnreachableRegistry(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	srv.http.Close()
	_, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), srv.host+"/app:1", pull)
	var answer *imagestore.RegistryError
	if !errors.As(err, &answer) || answer.Status != 0 || !strings.Contains(err.Error(), "III_SANDBOX_IMAGE_DIR") {
		t.Errorf("error is %v, want a RegistryError that says what else to do", err)
	}
}

func TestPlainHTTPIsForLoopbackAndListedHosts(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	layer := isLayer(t, img)
	srv.setFault(func(w http.ResponseWriter, r *http.Request) {
		if layer(r) {
			// A documentation address: nothing is ever sent there.
			http.Redirect(w, r, "http://elsewhere.example/blob", http.StatusTemporaryRedirect)
			return
		}
		srv.real.ServeHTTP(w, r)
	})
	_, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), ref, pull)
	var insecure *imagestore.InsecureError
	if !errors.As(err, &insecure) || insecure.Host != "elsewhere.example" {
		t.Errorf("error is %v, want an InsecureError", err)
	}
	opts := quick()
	opts.InsecureRegistries, opts.RetryWaits = []string{"elsewhere.example"}, []time.Duration{}
	_, err = openStore(t, t.TempDir(), opts).Ensure(t.Context(), ref, pull)
	if err == nil || errors.As(err, &insecure) {
		t.Errorf("error is %v, want the listed host to be tried", err)
	}
}

// withPassword guards a registry by HTTP basic authentication.
func withPassword(srv *server, user, password string) {
	srv.setFault(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != user || p != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"log in"}]}`, http.StatusUnauthorized)
			return
		}
		srv.real.ServeHTTP(w, r)
	})
}

type keychain authn.AuthConfig

func (k keychain) Resolve(authn.Resource) (authn.Authenticator, error) {
	return authn.FromConfig(authn.AuthConfig(k)), nil
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	ref := srv.push(t, "app:1", simple(t, "1"))
	withPassword(srv, "me", "secret")
	for password, status := range map[string]int{"": 401, "wrong": 401, "secret": 0} {
		opts := quick()
		opts.Keychain = keychain{}
		if password != "" {
			opts.Keychain = keychain{Username: "me", Password: password}
		}
		img, err := openStore(t, t.TempDir(), opts).Ensure(t.Context(), ref, pull)
		if status == 0 {
			if err != nil {
				t.Fatal(err)
			}
			closeImage(t, img)
			continue
		}
		var answer *imagestore.RegistryError
		if !errors.As(err, &answer) || answer.Status != status || !strings.Contains(err.Error(), "docker login") {
			t.Errorf("password %q: error is %v, want status %d", password, err, status)
		}
		if password != "" && strings.Contains(fmt.Sprint(err), password) {
			t.Errorf("error tells the password: %v", err)
		}
	}
}

// TestDockerConfig changes the environment, so it is not parallel.
func TestDockerConfig(t *testing.T) {
	srv := newServer(t)
	ref := srv.push(t, "app:1", simple(t, "1"))
	withPassword(srv, "me", "secret")
	bin := t.TempDir()
	helper := "#!/bin/sh\nread host\necho '{\"Username\":\"me\",\"Secret\":\"secret\"}'\n"
	if err := proc.WriteProgram(filepath.Join(bin, "docker-credential-iiitest"), []byte(helper)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for name, config := range map[string]string{
		"auths":             fmt.Sprintf(`{"auths":{%q:{"auth":"bWU6c2VjcmV0"}}}`, srv.host),
		"credential helper": fmt.Sprintf(`{"credHelpers":{%q:"iiitest"}}`, srv.host),
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Setenv("DOCKER_CONFIG", dir)
		img, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), ref, pull)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		closeImage(t, img)
	}
}

func TestBrokenCredentialHelper(t *testing.T) {
	srv := newServer(t)
	ref := srv.push(t, "app:1", simple(t, "1"))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), fmt.Appendf(nil, `{"credHelpers":{%q:"iii-is-not-there"}}`, srv.host), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_CONFIG", dir)
	_, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), ref, pull)
	var bad *imagestore.CredentialsError
	if !errors.As(err, &bad) || bad.Host != srv.host {
		t.Errorf("error is %T %v, want a CredentialsError", err, err)
	}
}
