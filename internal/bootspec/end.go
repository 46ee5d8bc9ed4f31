package bootspec

// End says how a VM ended. The shim writes it to layout.Machine.End before it
// exits, where it still can.
type End struct {
	Class EndClass `json:"class"`
	// Message is one line for a person: what happened and what to do about it.
	Message string `json:"message"`
	// ExitCode is the VMM's exit status, -1 when a signal ended it.
	ExitCode int `json:"exit_code"`
	// Signal ended the VMM; 0 when none did.
	Signal int `json:"signal,omitempty"`
	// Booted tells that the guest's link was up at some time.
	Booted bool `json:"booted"`
}

// EndClass sorts the ends of a VM by who has to act.
type EndClass string

// The classes of ends.
const (
	// EndBadSpec: the spec itself is wrong; nothing was started.
	EndBadSpec EndClass = "bad-spec"
	// EndRefused: the VMM is missing or refused the VM.
	EndRefused EndClass = "vmm-refused"
	// EndCrashed: the VMM or the guest's kernel died by itself.
	EndCrashed EndClass = "vmm-crashed"
	// EndGuest: the guest shut down in order.
	EndGuest EndClass = "guest-ended"
	// EndKilled: somebody ended it from outside: Kill, the lifeline, the idle
	// time-out, a signal.
	EndKilled EndClass = "killed"
)

// ExitStatus is the exit status of a shim whose VM ended with this class. 1 and
// 2 are what a Go program that crashes ends with, and 2 wrong usage.
func (c EndClass) ExitStatus() int {
	for _, s := range statuses() {
		if s.class == c {
			return s.status
		}
	}
	return 1
}

// ClassOfStatus is the class that a shim's exit status stands for; false for one
// that no class has.
func ClassOfStatus(status int) (EndClass, bool) {
	for _, s := range statuses() {
		if s.status == status {
			return s.class, true
		}
	}
	return "", false
}

type classStatus struct {
	class  EndClass
	status int
}

func statuses() []classStatus {
	return []classStatus{{EndGuest, 0}, {EndBadSpec, 10}, {EndRefused, 11}, {EndCrashed, 12}, {EndKilled, 13}}
}

// Error lets an End be returned as the error of what the VM's end interrupted.
func (e End) Error() string {
	return string(e.Class) + ": " + e.Message
}
