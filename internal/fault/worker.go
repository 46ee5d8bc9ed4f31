package fault

import "fmt"

// HostPathRefused is S501: a worker's host_path lies under neither of the roots
// from which workers may come.
func HostPathRefused(path, composeDir, packageCache string) *Error {
	return &Error{
		Code: S501,
		Message: fmt.Sprintf("host_path %s is neither under the Compose directory %s nor under the package cache %s",
			show(path), composeDir, packageCache),
		FixNote: "move the worker below one of the two directories",
	}
}

// WorkerBusy is S502: the worker VM of that state key is preparing or running.
func WorkerBusy(stateKey, state string) *Error {
	return &Error{
		Code:    S502,
		Message: fmt.Sprintf("the worker VM of state key %q is %s", clip(stateKey), state),
		FixNote: "stop it first, or wait until it has ended",
	}
}

// BadWorkerToken is S505: auth is not the token that Compose gave the adapter.
func BadWorkerToken() *Error {
	return &Error{Code: S505, Message: "auth does not match III_SANDBOX_WORKER_TOKEN of this adapter"}
}

// NoWorkerToken is S505: the adapter was started without a token, so it takes no
// calls of Compose.
func NoWorkerToken() *Error {
	return &Error{
		Code:    S505,
		Message: "this adapter has no III_SANDBOX_WORKER_TOKEN and refuses every worker function",
		FixNote: "start the adapter through Compose, which sets the token",
	}
}
