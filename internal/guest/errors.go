package guest

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is a call that the agent, or the way to it, refused.
type Error struct {
	// Op is the call, "exec" for example.
	Op string
	// Code says who has to act; see api/proto/guest/v1.
	Code codes.Code
	// Message is the agent's or the shim's one line about it.
	Message string
}

func (e *Error) Error() string {
	if e.Code == codes.Unavailable {
		return fmt.Sprintf("%s: the guest is gone: %s", e.Op, e.Message)
	}
	return fmt.Sprintf("%s: %s", e.Op, e.Message)
}

// deadlineSkew is how much earlier than ours the agent's timer for one deadline
// may fire; it bounds a wait.
const deadlineSkew = 100 * time.Millisecond

// callError turns what gRPC returned into what a caller can act on: the cause
// of ctx's end where that ended the call; an error that is no gRPC status (the
// VM's end, put there by package vm) as it is; an *Error otherwise.
func callError(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return fmt.Errorf("%s: %w", op, err)
	}
	if st.Code() == codes.DeadlineExceeded {
		// The agent has our deadline, and its timer may fire a moment before ours.
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < deadlineSkew {
			<-ctx.Done()
		}
	}
	if code := st.Code(); ctx.Err() != nil && (code == codes.Canceled || code == codes.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", op, context.Cause(ctx))
	}
	return &Error{Op: op, Code: st.Code(), Message: st.Message()}
}
