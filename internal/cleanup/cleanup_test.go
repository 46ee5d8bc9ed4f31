package cleanup_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

type key struct{}

func TestRunGoesBackwardsThroughEveryStep(t *testing.T) {
	t.Parallel()
	var stack cleanup.Stack
	var order []int
	errA, errB := errors.New("a"), errors.New("b")
	for i, err := range []error{errA, nil, errB} {
		stack.Add(func() error {
			order = append(order, i)
			return err
		})
	}
	err := stack.Run()
	if !errors.Is(err, errA) || !errors.Is(err, errB) {
		t.Errorf("error is %v", err)
	}
	if len(order) != 3 || order[0] != 2 || order[1] != 1 || order[2] != 0 {
		t.Errorf("order is %v", order)
	}
	if err := stack.Run(); err != nil || len(order) != 3 {
		t.Errorf("a second Run did %v, %v", order, err)
	}
}

func TestStepAddedByAStepIsNotLost(t *testing.T) {
	t.Parallel()
	var stack cleanup.Stack
	ran := false
	stack.Add(func() error {
		stack.Add(func() error { ran = true; return nil })
		return nil
	})
	if err := errors.Join(stack.Run(), stack.Run()); err != nil || !ran {
		t.Errorf("ran: %v, %v", ran, err)
	}
}

func TestRunOnError(t *testing.T) {
	t.Parallel()
	cause, undoing := errors.New("cause"), errors.New("undoing")
	build := func(fail error) (undone int, err error) {
		var stack cleanup.Stack
		defer func() { err = stack.RunOnError(err) }()
		stack.Add(func() error { undone++; return undoing })
		return 0, fail
	}
	if undone, err := build(nil); err != nil || undone != 0 {
		t.Errorf("success: undone %d, %v", undone, err)
	}
	if undone, err := build(cause); !errors.Is(err, cause) || !errors.Is(err, undoing) || undone != 1 {
		t.Errorf("failure: undone %d, %v", undone, err)
	}
}

func TestReleasedStepsDoNotRun(t *testing.T) {
	t.Parallel()
	var stack cleanup.Stack
	stack.Add(func() error { return errors.New("ran") })
	stack.Release()
	if err := errors.Join(stack.Run(), stack.RunOnError(nil)); err != nil {
		t.Error(err)
	}
}

func TestContextOutlivesTheRequest(t *testing.T) {
	t.Parallel()
	request, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	cancel()
	ctx, stop := cleanup.Context(request, time.Hour)
	defer stop()
	if ctx.Err() != nil || ctx.Value(key{}) != "value" {
		t.Errorf("error %v, value %v", ctx.Err(), ctx.Value(key{}))
	}
	if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > time.Hour {
		t.Errorf("deadline is %v, %v", deadline, ok)
	}
	short, stopShort := cleanup.Context(request, 0)
	defer stopShort()
	if !errors.Is(short.Err(), context.DeadlineExceeded) {
		t.Errorf("without time: %v", short.Err())
	}
}
