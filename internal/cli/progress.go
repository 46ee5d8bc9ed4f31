package cli

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// progressEvery is how often a pull says where it is when nobody watches a bar.
const progressEvery = 2 * time.Second

// progress shows a pull: a bar on a terminal, else a line every 2 s. A pull that
// is quicker leaves no line.
type progress struct {
	out      io.Writer
	terminal bool

	mu   sync.Mutex
	bar  *progressbar.ProgressBar
	last time.Time
}

func newProgress(out io.Writer, terminal bool) *progress {
	return &progress{out: out, terminal: terminal, last: time.Now()}
}

// Update is called by the store, from any goroutine.
func (p *progress) Update(now imagestore.Progress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.terminal {
		if time.Since(p.last) < progressEvery {
			return
		}
		p.last = time.Now()
		_, _ = fmt.Fprintf(p.out, "pulling %s: %s of %s, layer %d of %d\n", now.Ref, mib(now.BytesDone), mib(now.BytesTotal), now.LayersDone, now.LayersTotal)
		return
	}
	if p.bar == nil {
		p.bar = progressbar.NewOptions64(now.BytesTotal, progressbar.OptionSetWriter(p.out),
			progressbar.OptionShowBytes(true), progressbar.OptionSetWidth(30),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
	}
	p.bar.ChangeMax64(max(now.BytesTotal, 1))
	p.bar.Describe(fmt.Sprintf("%s (layer %d/%d)", now.Ref, now.LayersDone, now.LayersTotal))
	_ = p.bar.Set64(now.BytesDone)
}

// Close takes the bar off the screen.
func (p *progress) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
