package iii

import (
	"context"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

const (
	// refusedRetry is how often a function is registered anew that another worker
	// has: that one may have gone since.
	refusedRetry = 30 * time.Second
	// maxQuoted bounds in bytes what is logged, or put into an error, of the
	// engine's words.
	maxQuoted = 200
)

// introduction is what the engine must know before anything else: which
// connection the next one replaces, who we are, what we offer. The name goes
// first, as it decides the namespace of the functions.
func (c *Client) introduction() ([][]byte, error) {
	c.mu.Lock()
	previous, token := c.workerID, c.token
	c.mu.Unlock()
	var messages []any
	if previous != "" {
		messages = append(messages, reattachMessage{Type: typeReattach, Previous: previous, Token: token})
	}
	me, err := encode(workerMessage{
		Runtime: "go", Version: c.options.Version, Name: c.options.Name, Description: c.options.Description,
		OS: runtime.GOOS + " (" + runtime.GOARCH + ")", PID: os.Getpid(),
		Isolation: c.options.Isolation, Namespace: c.options.Namespace, Features: []string{featureLargeMessages},
	})
	if err != nil {
		return nil, err
	}
	messages = append(messages, invokeMessage{
		Type: typeInvoke, Function: "engine::workers::register", Data: me, Action: &actionMessage{Type: "void"},
	})
	for _, f := range c.options.Functions {
		messages = append(messages, f.message())
	}
	var frames [][]byte
	for _, message := range messages {
		text, err := encode(message)
		if err != nil {
			return nil, err
		}
		frames = append(frames, text)
	}
	return frames, nil
}

// introduce sends the introduction.
func (s *session) introduce(ctx context.Context, frames [][]byte) error {
	for _, text := range frames {
		select {
		case s.out <- text:
		case <-s.done:
			return s.err
		case <-ctx.Done():
			return errEnding
		}
	}
	return nil
}

func (f Function) message() registerMessage {
	return registerMessage{
		Type: typeRegister, ID: f.ID, Description: f.Description,
		RequestFormat: f.RequestFormat, ResponseFormat: f.ResponseFormat, Metadata: f.Metadata,
	}
}

// rejected acts on a refused registration: one of a function is tried again later,
// any other is the end of the client. Engines from 0.25 on have more reasons to
// refuse a function.
func (s *session) rejected(f frame) {
	id, owner, namespace := f.text("function_id"), quotable(f.text("owner_worker_id")), quotable(f.text("namespace"))
	code := quotable(f.text("code"))
	if code == "" && id == "" {
		s.complain(len(owner) + len(namespace))
		return
	}
	if code == codeWorkerConflict || code != codeFunctionConflict && id == "" {
		s.end(&RejectedError{Code: code, Name: quotable(f.text("worker_name")), Namespace: namespace, Owner: owner})
		return
	}
	c := s.client
	if _, ours := c.functions[id]; !ours {
		return
	}
	s.mu.Lock()
	told := s.told[id]
	s.told[id], s.refused[id] = true, true
	s.mu.Unlock()
	switch {
	case told:
	case code == codeFunctionConflict:
		c.log.Warn("another worker has this function: calls go there until it ends", "function", id, "namespace", namespace, "owner", owner)
	default:
		c.log.Warn("the engine refuses this function: it cannot be called", "function", id, "namespace", namespace, "code", code)
	}
}

// quotable is as much of the engine's words as a log may hold.
func quotable(text string) string {
	if len(text) <= maxQuoted {
		return text
	}
	return strings.ToValidUTF8(text[:maxQuoted], "") + "…"
}

// retryRefused registers functions anew that the engine refused.
func (s *session) retryRefused() {
	ticker := time.NewTicker(refusedRetry)
	defer ticker.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-ticker.C:
		}
		s.mu.Lock()
		refused := slices.Sorted(maps.Keys(s.refused))
		clear(s.refused)
		s.mu.Unlock()
		for _, id := range refused {
			text, err := encode(s.client.functions[id].message())
			if err != nil {
				continue
			}
			select {
			case s.out <- text:
			case <-s.done:
				return
			}
		}
	}
}
