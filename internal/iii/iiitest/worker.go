package iiitest

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/google/uuid"
)

const (
	// queueLength bounds what waits to be sent to one worker, in messages.
	queueLength = 64
	// namingGrace is how long registrations wait for the worker's name, which may
	// put them into another namespace.
	namingGrace = 5 * time.Second
	// rejectGrace is how long a refused worker has to answer the Close.
	rejectGrace = time.Second
)

// A worker is one connection.
type worker struct {
	id, token string
	socket    *websocket.Conn
	conn      net.Conn
	since     time.Time

	// out is what waits to be sent; nil in it closes the connection.
	out  chan []byte
	gone chan struct{} // closed when the connection has ended
	once sync.Once

	// Guarded by the engine's mu.
	named     bool
	namespace string
	info      workerInfo
	early     []message // registrations that came before the name
}

// workerInfo is what a worker tells about itself.
type workerInfo struct {
	Runtime     string  `json:"runtime"`
	Version     *string `json:"version"`
	Name        *string `json:"name"`
	Description *string `json:"description"`
	OS          *string `json:"os"`
	PID         *uint32 `json:"pid"`
	Isolation   *string `json:"isolation"`
	Namespace   *string `json:"namespace"`
}

// send queues a message; it is dropped when the worker is gone.
func (w *worker) send(text []byte) {
	select {
	case w.out <- text:
	case <-w.gone:
	}
}

// cut ends the connection without a word.
func (w *worker) cut() { _ = w.conn.Close() }

// write sends what is queued.
func (w *worker) write(ctx context.Context) {
	for {
		select {
		case text := <-w.out:
			if text == nil {
				late := time.AfterFunc(rejectGrace, w.cut)
				_ = w.socket.Close(websocket.StatusNormalClosure, "")
				late.Stop()
				w.cut()
				return
			}
			if w.socket.Write(ctx, websocket.MessageText, text) != nil {
				w.cut()
				return
			}
		case <-w.gone:
			return
		}
	}
}

// serveWorker serves one worker until its connection ends.
func (e *Engine) serveWorker(rw http.ResponseWriter, r *http.Request, conn net.Conn) {
	socket, err := websocket.Accept(rw, r, nil)
	if err != nil {
		return
	}
	socket.SetReadLimit(messageLimit)
	w := &worker{
		id: uuid.NewString(), token: uuid.NewString(), socket: socket, conn: conn, since: time.Now(),
		out: make(chan []byte, queueLength), gone: make(chan struct{}),
	}
	e.mu.Lock()
	e.workers[w.id] = w
	e.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { w.write(r.Context()) })
	unnamed := time.AfterFunc(namingGrace, func() { e.spawn(func() { e.name(w, workerInfo{}) }) })
	defer func() {
		unnamed.Stop()
		e.leave(w)
		w.cut()
		writer.Wait()
		_ = socket.CloseNow()
	}()
	w.send(raw(map[string]string{"type": "workerregistered", "worker_id": w.id, "reattach_token": w.token}))
	e.log.Debug("a worker connected", "worker_id", w.id)
	for {
		_, text, err := socket.Read(r.Context())
		if err != nil {
			e.log.Debug("a worker's connection ended", "worker_id", w.id, "close_code", int(websocket.CloseStatus(err)))
			return
		}
		e.receive(r.Context(), w, text)
	}
}

// receive acts on one message. Only registrations are acted on here, to keep their
// order; what may wait for others runs beside.
func (e *Engine) receive(ctx context.Context, w *worker, text []byte) {
	if e.options.Observe != nil {
		e.options.Observe(w.id, text)
	}
	m, err := decode(text)
	if err != nil {
		if len(text) > 0 {
			e.log.Warn("a worker sent what is not JSON: skipped, as the engine does", "worker_id", w.id, "bytes", len(text))
		}
		return
	}
	switch m.text("type") {
	case "ping":
		w.send([]byte(`{"type":"pong"}`))
	case "reattach":
		e.evict(m.text("previous_worker_id"), m.text("reattach_token"))
	case "registerfunction", "unregisterfunction":
		e.registration(w, m)
	case "invokefunction":
		e.receiveCall(ctx, w, m)
	case "invocationresult":
		e.spawn(func() { e.settle(w, m) })
	default:
		e.log.Debug("a message was ignored", "worker_id", w.id)
	}
}

// evict ends the connection that a new one replaces, if the token is its own.
func (e *Engine) evict(id, token string) {
	e.mu.Lock()
	old := e.workers[id]
	e.mu.Unlock()
	if old == nil || old.token != token {
		return
	}
	e.leave(old)
	old.cut()
}

// leave forgets a worker, its functions, and the calls that it made or was
// answering.
func (e *Engine) leave(w *worker) {
	w.once.Do(func() { close(w.gone) })
	var stopped []*call
	e.mu.Lock()
	delete(e.workers, w.id)
	for key, f := range e.functions {
		if f.worker == w {
			delete(e.functions, key)
		}
	}
	for id, c := range e.pending {
		if c.caller == w || c.executor == w {
			delete(e.pending, id)
		}
		if c.executor == w && c.caller != w {
			stopped = append(stopped, c)
		}
	}
	e.change()
	e.mu.Unlock()
	if e.closing() {
		return
	}
	for _, c := range stopped {
		c.end(failed("invocation_stopped", "the worker that was answering is gone"))
	}
}

// name gives a worker the name, the namespace and the rest that it tells; a name
// that another has already is refused, and the connection closed.
func (e *Engine) name(w *worker, info workerInfo) bool {
	namespace := defaultNamespace
	if info.Namespace != nil && *info.Namespace != "" {
		namespace = *info.Namespace
	}
	e.mu.Lock()
	if w.named {
		// It may tell more, but not move.
		if info.PID != nil {
			w.info = info
			e.change()
		}
		e.mu.Unlock()
		return true
	}
	if info.Name != nil {
		for _, other := range e.workers {
			if other != w && other.named && other.namespace == namespace && other.info.Name != nil && *other.info.Name == *info.Name {
				e.mu.Unlock()
				e.log.Warn("a worker's name is taken", "worker_id", w.id, "owner", other.id)
				w.send(raw(map[string]string{
					"type": "registrationrejected", "code": "WORKER_NAMESPACE_CONFLICT",
					"namespace": namespace, "worker_name": *info.Name, "owner_worker_id": other.id,
				}))
				w.send(nil)
				return false
			}
		}
	}
	w.named, w.namespace, w.info = true, namespace, info
	early := w.early
	w.early = nil
	refusals := make([]json.RawMessage, 0)
	for _, m := range early {
		if refusal := e.register(w, m); refusal != nil {
			refusals = append(refusals, refusal)
		}
	}
	e.change()
	e.mu.Unlock()
	e.log.Info("a worker is there", "worker_id", w.id, "namespace", namespace)
	for _, refusal := range refusals {
		w.send(refusal)
	}
	return true
}
