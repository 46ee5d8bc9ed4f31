package imagestore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Bounds of what is read into memory or followed before anything is verified.
const (
	maxDocument  = 8 << 20 // a manifest, index or config, in bytes
	maxNesting   = 4       // indexes in indexes
	maxManifests = 1024    // entries of all indexes together
	maxLayers    = 512     // docker stops at 127
)

// resolved is one image of a source: a manifest for our platform.
type resolved struct {
	ref      string
	digest   v1.Hash
	manifest v1.Manifest
	from     origin
}

// resolver picks the image for arch.
type resolver struct {
	ref, arch string
	from      origin
	found     []candidate
	have      []string
	// seen counts the entries of the indexes.
	seen int
}

type candidate struct {
	desc v1.Descriptor
	tag  string
}

// resolve finds the manifest that ref stands for now.
func (s *Store) resolve(ctx context.Context, ref string, from origin) (*resolved, error) {
	doc, err := from.root(ctx)
	if err != nil {
		return nil, err
	}
	r := &resolver{ref: ref, arch: s.opts.Arch, from: from}
	if !isIndex(doc) {
		return r.image(doc)
	}
	if err := r.collect(ctx, doc, 0); err != nil {
		return nil, err
	}
	pick, err := r.pick()
	if err != nil {
		return nil, err
	}
	doc, err = r.fetch(ctx, pick)
	if err != nil {
		return nil, err
	}
	return r.image(doc)
}

func isIndex(doc document) bool {
	if doc.mediaType != "" {
		return doc.mediaType.IsIndex()
	}
	var probe struct {
		Manifests []json.RawMessage `json:"manifests"`
	}
	return json.Unmarshal(doc.raw, &probe) == nil && probe.Manifests != nil
}

func sha256Of(content []byte) v1.Hash {
	sum := sha256.Sum256(content)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

// fetch gets and verifies a manifest or index.
func (r *resolver) fetch(ctx context.Context, d v1.Descriptor) (document, error) {
	if err := checkDescriptor("manifest", d); err != nil {
		return document{}, err
	}
	doc, err := r.from.manifest(ctx, d)
	if err != nil {
		return document{}, err
	}
	if got := sha256Of(doc.raw); got != d.Digest {
		return document{}, &DigestError{What: "manifest of " + r.ref, Want: d.Digest.String(), Got: got.String()}
	}
	if doc.mediaType == "" {
		doc.mediaType = d.MediaType
	}
	return doc, nil
}

func checkDescriptor(what string, d v1.Descriptor) error {
	if d.Digest.Algorithm != "sha256" {
		return &DigestError{What: what, Want: "named by a sha256 digest", Got: "named by " + d.Digest.String()}
	}
	return nil
}

// collect gathers the images for our platform from an index and those in it.
func (r *resolver) collect(ctx context.Context, doc document, depth int) error {
	index, err := v1.ParseIndexManifest(bytes.NewReader(doc.raw))
	if err != nil {
		return &LayoutError{Path: r.ref, Reason: "has an index that is not one", Err: err}
	}
	if r.seen += len(index.Manifests); r.seen > maxManifests {
		return &LimitError{What: "entries in its indexes", Limit: maxManifests}
	}
	for _, d := range index.Manifests {
		if d.MediaType.IsIndex() {
			if depth >= maxNesting {
				return &LayoutError{Path: r.ref, Reason: "has indexes in indexes without end"}
			}
			nested, err := r.fetch(ctx, d)
			if err != nil {
				return err
			}
			if err := r.collect(ctx, nested, depth+1); err != nil {
				return err
			}
			continue
		}
		if d.MediaType != "" && !d.MediaType.IsImage() {
			continue
		}
		platform, err := r.platform(ctx, d)
		if err != nil {
			return err
		}
		if platform.OS == "unknown" {
			continue // build attestations
		}
		if platform.OS == "linux" && platform.Architecture == r.arch {
			r.found = append(r.found, candidate{desc: d, tag: d.Annotations[annotationTag]})
			r.found[len(r.found)-1].desc.Platform = &platform
		} else if s := platformString(platform.OS, platform.Architecture); !slices.Contains(r.have, s) {
			r.have = append(r.have, s)
		}
	}
	return nil
}

// platform is the descriptor's, or the config's where it has none.
func (r *resolver) platform(ctx context.Context, d v1.Descriptor) (v1.Platform, error) {
	if d.Platform != nil {
		return *d.Platform, nil
	}
	doc, err := r.fetch(ctx, d)
	if err != nil {
		return v1.Platform{}, err
	}
	image, err := r.image(doc)
	if err != nil {
		return v1.Platform{}, err
	}
	config, err := image.config(ctx)
	if err != nil {
		return v1.Platform{}, err
	}
	return v1.Platform{OS: config.OS, Architecture: config.Architecture, Variant: config.Variant}, nil
}

func platformString(os, arch string) string {
	if os == "" && arch == "" {
		return "an unnamed platform"
	}
	return os + "/" + arch
}

// pick chooses among the images for our platform: the one without a variant or
// with the lowest, which every processor of the kind can run.
func (r *resolver) pick() (v1.Descriptor, error) {
	if len(r.found) == 0 {
		slices.Sort(r.have)
		return v1.Descriptor{}, &PlatformError{Ref: r.ref, Want: "linux/" + r.arch, Have: r.have}
	}
	best := r.found[0]
	var tags []string
	for _, c := range r.found {
		if c.tag != "" && !slices.Contains(tags, c.tag) {
			tags = append(tags, c.tag)
		}
		if c.desc.Platform.Variant < best.desc.Platform.Variant {
			best = c
		}
	}
	if len(tags) > 1 {
		return v1.Descriptor{}, &LayoutError{Path: r.ref, Reason: "has several images: add one of the tags :" + strings.Join(tags, ", :")}
	}
	twin := func(c candidate) bool {
		return c.desc.Digest != best.desc.Digest && c.desc.Platform.Variant == best.desc.Platform.Variant
	}
	if r.from.local() && slices.ContainsFunc(r.found, twin) {
		return v1.Descriptor{}, &LayoutError{Path: r.ref, Reason: "has several images without a tag to tell them apart: write the layout anew with one"}
	}
	return best.desc, nil
}

// image parses and checks a manifest.
func (r *resolver) image(doc document) (*resolved, error) {
	bad := func(reason string, err error) error {
		return &LayoutError{Path: r.ref, Reason: reason, Err: err}
	}
	if t := doc.mediaType; t == types.DockerManifestSchema1 || t == types.DockerManifestSchema1Signed {
		return nil, bad("is in docker's old format (schema 1): push it again with a newer docker", nil)
	}
	manifest, err := v1.ParseManifest(bytes.NewReader(doc.raw))
	if err != nil {
		return nil, bad("has a manifest that is not one", err)
	}
	if t := manifest.Config.MediaType; t != types.OCIConfigJSON && t != types.DockerConfigJSON {
		return nil, bad(fmt.Sprintf("is no container image but holds %q", t), nil)
	}
	if n := len(manifest.Layers); n > maxLayers {
		return nil, &LimitError{What: "layers", Limit: maxLayers}
	}
	for k, l := range manifest.Layers {
		if strings.HasSuffix(string(l.MediaType), "+encrypted") {
			return nil, bad(fmt.Sprintf("has an encrypted layer (%d): push it unencrypted", k+1), nil)
		}
		if err := checkDescriptor(layerName(k, len(manifest.Layers)), l); err != nil {
			return nil, err
		}
		if l.Size < 0 {
			return nil, bad("has a layer of negative size", nil)
		}
	}
	return &resolved{ref: r.ref, digest: sha256Of(doc.raw), manifest: *manifest, from: r.from}, nil
}

// layerName is how messages call layer k, which counts from 0.
func layerName(k, n int) string { return fmt.Sprintf("layer %d of %d", k+1, n) }

// config gets and verifies the image's configuration.
func (r *resolved) config(ctx context.Context) (*v1.ConfigFile, error) {
	d := r.manifest.Config
	if err := checkDescriptor("configuration", d); err != nil {
		return nil, err
	}
	if d.Size < 0 || d.Size > maxDocument {
		return nil, &LimitError{What: "bytes of configuration", Limit: maxDocument}
	}
	body, err := r.from.blob(ctx, d)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	err = copyVerified(&buf, body, "configuration of "+r.ref, d)
	if closeErr := body.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, err
	}
	config, err := v1.ParseConfigFile(&buf)
	if err != nil {
		return nil, &LayoutError{Path: r.ref, Reason: "has a configuration that is not one", Err: err}
	}
	return config, nil
}

// copyVerified copies the content that d describes. What is too short, too long
// or has another digest is a DigestError, whatever the reader makes of it.
func copyVerified(w io.Writer, r io.Reader, what string, d v1.Descriptor) error {
	h := sha256.New()
	n, err := io.CopyN(io.MultiWriter(w, h), r, d.Size)
	if n < d.Size {
		if errors.Is(err, io.EOF) || isChecksumError(err) {
			return &DigestError{What: what, Want: fmt.Sprintf("%d bytes long", d.Size), Got: fmt.Sprintf("%d bytes long", n)}
		}
		return fmt.Errorf("%s breaks off after %d of %d bytes: %w", what, n, d.Size, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != d.Digest.Hex {
		return &DigestError{What: what, Want: d.Digest.String(), Got: "sha256:" + got}
	}
	var extra [1]byte
	if k, _ := io.ReadFull(r, extra[:]); k > 0 {
		return &DigestError{What: what, Want: fmt.Sprintf("%d bytes long", d.Size), Got: "longer"}
	}
	return nil
}

// isChecksumError recognizes go-containerregistry's own check of a blob, whose
// type is internal to it. It comes when a body ends as announced but too early.
func isChecksumError(err error) bool {
	return strings.Contains(err.Error(), "error verifying sha256 checksum")
}
