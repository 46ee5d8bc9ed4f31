package imagestore

import (
	"sync"
	"time"
)

// Phases of getting an image.
const (
	PhaseResolve  = "resolve"  // the reference is being looked up
	PhaseWait     = "wait"     // another caller or process does the work
	PhaseDownload = "download" // bytes are coming in and layers are being unpacked
	PhaseUnpack   = "unpack"   // everything is here, the last layers are being unpacked
)

// Progress tells how far an image is.
type Progress struct {
	// Ref is the reference as the caller wrote it.
	Ref   string `json:"ref"`
	Phase string `json:"phase"`
	// BytesDone of BytesTotal bytes of the layers, as the source has them, have
	// been read; 0 of 0 as long as that is not known.
	BytesDone  int64 `json:"bytes_done"`
	BytesTotal int64 `json:"bytes_total"`
	// LayersDone of LayersTotal layers are unpacked.
	LayersDone  int `json:"layers_done"`
	LayersTotal int `json:"layers_total"`
}

// progressEvery is the least time between two calls of EnsureOptions.Progress for
// bytes alone.
const progressEvery = 100 * time.Millisecond

// tracker hands progress to the caller and, by lock files, to those who wait.
type tracker struct {
	mu     sync.Mutex
	now    Progress
	told   time.Time
	report func(Progress) // may be nil
	locks  []*workLock
}

// update changes the state and tells it when it is time, at once when important.
func (t *tracker) update(important bool, change func(*Progress)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.now)
	if !important && time.Since(t.told) < progressEvery {
		return
	}
	t.told = time.Now()
	for _, l := range t.locks {
		l.note(t.now)
	}
	if t.report != nil {
		t.report(t.now)
	}
}

func (t *tracker) phase(phase string) {
	t.update(true, func(p *Progress) { p.Phase = phase })
}

// waiting takes over what the holder of a lock noted.
func (t *tracker) waiting(note *Progress) {
	t.update(false, func(p *Progress) {
		p.Phase = PhaseWait
		if note != nil {
			p.BytesDone, p.BytesTotal, p.LayersDone, p.LayersTotal = note.BytesDone, note.BytesTotal, note.LayersDone, note.LayersTotal
		}
	})
}

// holds makes updates go to a lock's file, until the returned function is called.
func (t *tracker) holds(l *workLock) (release func() error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.locks = append(t.locks, l)
	return func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.locks = t.locks[:len(t.locks)-1]
		return l.release()
	}
}

// Write counts bytes read from the source, so that a tracker can be teed into.
func (t *tracker) Write(p []byte) (int, error) {
	t.add(int64(len(p)))
	return len(p), nil
}

// add counts n bytes; a failed transfer takes its own back.
func (t *tracker) add(n int64) {
	t.update(false, func(p *Progress) {
		if p.BytesDone += n; n > 0 && p.BytesDone >= p.BytesTotal {
			p.Phase = PhaseUnpack
		}
	})
}
