package imagestore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// downloads is how many layers come in at one time, as with docker.
const downloads = 3

// filler makes the lower of one image in a work directory.
type filler struct {
	store   *Store
	image   *resolved
	config  *v1.ConfigFile
	work    *workDir
	builder *erofs.Builder
	track   *tracker
}

// fill makes the image's lower and puts it in place. The caller holds the digest's
// lock. Nothing is left on error.
func (s *Store) fill(ctx context.Context, image *resolved, track *tracker) (_ *Image, err error) {
	defer func() { err = s.named(err, estimate(image)) }()
	config, err := image.config(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.check(image, config); err != nil {
		return nil, err
	}
	work, err := s.newWork()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.remove()) }()
	f := &filler{store: s, image: image, config: config, work: work, track: track}

	if err := os.Mkdir(work.join("image"), 0o700); err != nil {
		return nil, err
	}
	lower, err := os.OpenFile(work.join("image/"+fileLower), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lower.Close()) }()
	stats, err := f.build(ctx, lower)
	if err != nil {
		return nil, err
	}
	rec := record{
		Version: recordVersion, Digest: image.digest.String(), Arch: config.Architecture, Config: runConfig(config),
		Size: stats.Size, Unpacked: stats.Unpacked, Inodes: stats.Inodes, Made: time.Now(),
	}
	if stats.DroppedXattrs > 0 {
		s.opts.Log.Warn("xattrs that Linux has no place for were left out", "image", image.ref, "count", stats.DroppedXattrs)
	}
	return f.publish(ctx, lower, rec)
}

// estimate is about how much space making an image takes, its downloads included.
// Compressed layers are taken to triple.
func estimate(image *resolved) int64 {
	var n int64
	for _, l := range image.manifest.Layers {
		n += l.Size
	}
	return n * 4
}

// check holds the configuration against the platform and the manifest.
func (s *Store) check(image *resolved, config *v1.ConfigFile) error {
	if config.OS != "linux" || config.Architecture != s.opts.Arch {
		return &PlatformError{Ref: image.ref, Want: "linux/" + s.opts.Arch, Have: []string{platformString(config.OS, config.Architecture)}}
	}
	if ids, layers := len(config.RootFS.DiffIDs), len(image.manifest.Layers); ids != layers {
		return &LayoutError{Path: image.ref, Reason: fmt.Sprintf("has %d layers and a configuration for %d", layers, ids)}
	}
	return nil
}

func runConfig(c *v1.ConfigFile) Config {
	return Config{Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, User: c.Config.User, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd}
}

// build downloads the layers, a few at a time, and merges each as soon as it and
// those below are here.
func (f *filler) build(ctx context.Context, lower *os.File) (_ erofs.Stats, err error) {
	side, err := os.OpenFile(f.work.join("side"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return erofs.Stats{}, err
	}
	defer func() { err = errors.Join(err, side.Close()) }()
	f.builder = erofs.NewBuilder(lower, side, f.store.opts.Limits)
	layers := f.image.manifest.Layers
	f.track.update(true, func(p *Progress) {
		p.Phase, p.LayersTotal = PhaseDownload, len(layers)
		for _, l := range layers {
			p.BytesTotal += l.Size
		}
	})
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(downloads + 1)
	ready := make([]chan struct{}, len(layers))
	for k := range layers {
		ready[k] = make(chan struct{})
	}
	group.Go(func() error { return f.merge(groupCtx, ready) })
	for k := range layers {
		group.Go(func() error {
			if err := f.download(groupCtx, k); err != nil {
				return err // which ends merge too, that must not see half a layer
			}
			close(ready[k])
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return erofs.Stats{}, err
	}
	stats, err := f.builder.Finish()
	if err != nil {
		return stats, err
	}
	return stats, lower.Sync()
}

func (f *filler) blobName(k int) string { return f.work.join(fmt.Sprintf("layer-%d", k)) }

// download brings layer k into the work directory, verified. Local blobs stay
// where they are.
func (f *filler) download(ctx context.Context, k int) (err error) {
	remote, ok := f.image.from.(*registry)
	if !ok || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	file, err := os.OpenFile(f.blobName(k), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	d := f.image.manifest.Layers[k]
	counted := &countingWriter{track: f.track}
	return remote.transfer(ctx, d, layerName(k, len(f.image.manifest.Layers))+" of "+f.image.ref, io.MultiWriter(file, counted), func() error {
		counted.reset()
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return err
		}
		return file.Truncate(0)
	})
}

// countingWriter counts a transfer's bytes and takes them back for another try.
type countingWriter struct {
	track *tracker
	n     int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return c.track.Write(p)
}

func (c *countingWriter) reset() {
	c.track.add(-c.n)
	c.n = 0
}

// merge feeds the layers to the builder, lowest first.
func (f *filler) merge(ctx context.Context, ready []chan struct{}) error {
	for k := range ready {
		select {
		case <-ready[k]:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := f.mergeLayer(ctx, k); err != nil {
			return err
		}
		f.track.update(true, func(p *Progress) { p.LayersDone++ })
	}
	return nil
}

// mergeLayer unpacks layer k, checking the blob's digest, where that was not done
// on download, and the diff ID.
func (f *filler) mergeLayer(ctx context.Context, k int) (err error) {
	d := f.image.manifest.Layers[k]
	what := layerName(k, len(f.image.manifest.Layers)) + " of " + f.image.ref
	blob, err := f.openLayer(ctx, k)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, blob.Close()) }()
	blobSum, plainSum := sha256.New(), sha256.New()
	// A local file may be longer than its description, or a device without end.
	source := io.TeeReader(io.LimitReader(blob, d.Size+1), blobSum)
	if f.image.from.local() {
		source = io.TeeReader(source, f.track)
	}
	plain, done, err := decompress(source)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer done()
	mergeErr := f.builder.AddLayer(ctx, io.TeeReader(plain, plainSum))
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// A damaged blob shows as broken gzip or tar first; its digest says it better.
	if _, ok := f.image.from.(*layoutOrigin); ok {
		if _, err := io.Copy(io.Discard, source); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if got := hex.EncodeToString(blobSum.Sum(nil)); got != d.Digest.Hex {
			return &DigestError{What: what, Want: d.Digest.String(), Got: "sha256:" + got}
		}
	}
	if mergeErr != nil {
		return fmt.Errorf("%s: %w", what, mergeErr)
	}
	if got := hex.EncodeToString(plainSum.Sum(nil)); got != f.config.RootFS.DiffIDs[k].Hex {
		return &DigestError{What: what + ", unpacked,", Want: f.config.RootFS.DiffIDs[k].String(), Got: "sha256:" + got}
	}
	return nil
}

// openLayer opens layer k's blob. A downloaded one has no name any more then.
func (f *filler) openLayer(ctx context.Context, k int) (io.ReadCloser, error) {
	if f.image.from.local() {
		return f.image.from.blob(ctx, f.image.manifest.Layers[k])
	}
	file, err := os.Open(f.blobName(k))
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.blobName(k)); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// publish writes the record and moves the image to its place, locked already so
// that no collector gets in between.
func (f *filler) publish(ctx context.Context, lower *os.File, rec record) (*Image, error) {
	if err := lower.Chmod(0o444); err != nil {
		return nil, err
	}
	if err := f.takePins(); err != nil {
		return nil, err
	}
	if err := f.work.writeJSON(f.work.join("image/"+fileRecord), rec); err != nil {
		return nil, err
	}
	if err := flock.Try(lower, flock.Shared); err != nil {
		return nil, err
	}
	s, target := f.store, f.store.imageDir(f.image.digest)
	err := os.Rename(f.work.join("image"), target)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		// What is there was found damaged.
		if err = os.Rename(target, f.work.join("damaged")); err == nil {
			err = os.Rename(f.work.join("image"), target)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := syncDir(s.imagesDir()); err != nil {
		return nil, err
	}
	s.opts.Log.Info("image is ready", "image", f.image.ref, "digest", rec.Digest, "bytes", rec.Size)
	image, err := s.open(ctx, f.image.digest, f.image.ref)
	if err != nil {
		return nil, fmt.Errorf("open the new image: %w", err)
	}
	return image, nil
}

// takePins gives the image the pins of the damaged one that it replaces. Nobody
// can add any meanwhile: a pin is put on an image that can be opened.
func (f *filler) takePins() error {
	to, from := f.work.join("image/"+dirPins), filepath.Join(f.store.imageDir(f.image.digest), dirPins)
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	pins, err := os.ReadDir(from)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, pin := range pins {
		err := os.Link(filepath.Join(from, pin.Name()), filepath.Join(to, pin.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
