// Package cleanup undoes the steps of a multi-step constructor, and gives such
// undoing a context that outlives the request that failed.
package cleanup

import (
	"context"
	"errors"
	"time"
)

// Stack is a list of undo steps. Its zero value is ready. It is not safe for
// concurrent use: it belongs to the constructor that declares it.
//
//	var undo cleanup.Stack
//	defer func() { err = undo.RunOnError(err) }()
//	...
//	undo.Add(func() error { return os.RemoveAll(dir) })
type Stack struct {
	steps []func() error
}

// Add puts step on the stack; Run calls it before those added earlier.
func (s *Stack) Add(step func() error) {
	s.steps = append(s.steps, step)
}

// Run calls the steps, last added first, every one of them whatever the others
// return, and joins their errors. The stack is empty afterwards, so a second
// Run does nothing.
func (s *Stack) Run() error {
	steps := s.steps
	s.steps = nil
	var errs []error
	for i := len(steps) - 1; i >= 0; i-- {
		errs = append(errs, steps[i]())
	}
	return errors.Join(errs...)
}

// Release forgets the steps: what they would undo now belongs to the result.
func (s *Stack) Release() {
	s.steps = nil
}

// RunOnError runs the steps when err is not nil and returns err joined with
// theirs; it releases them when err is nil.
func (s *Stack) RunOnError(err error) error {
	if err == nil {
		s.Release()
		return nil
	}
	return errors.Join(err, s.Run())
}

// Context returns a context with ctx's values that is not cancelled with it and
// ends after d: the time that undoing may take once the request is gone. The
// caller calls the cancel function.
func Context(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
